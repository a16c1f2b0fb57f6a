"""The families: one row of differences each, for one decoder.

A row is data: facts of the decoder, each a value or what reads it from config.json, and what an absent field means.
`lean_ft.models.config_json` reads a config.json by its family's row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from lean_ft.models.config import DeltaRuleConfig, LatentConfig, MixerConfig, ShortConvolutionConfig
from lean_ft.models.config_fields import Fields, head_dim_of
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config, rope_settings

# Readers of one field by its name: true or false, a positive integer, a positive number, such a number or null.
flag, count, number, number_or_null = (
    partial(methodcaller, kind) for kind in ("flag", "count", "positive", "positive_or_null")
)


def _num_experts(fields: Fields) -> int:
    """transformers has written either name for the same family; a family's default has the first."""
    names = [name for name in ("num_local_experts", "num_experts") if fields.config.get(name) is not None]
    counts = {name: fields.count(name) for name in names or ["num_local_experts"]}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{fields.where}: {counts}; expected the same number in both. Remove the one that is wrong.")
    return next(iter(counts.values()))


def _router_aux_loss_coef(fields: Fields) -> float:
    """transformers adds the loss only where it also returns the logits that it is made from."""
    return fields.positive("router_aux_loss_coef", or_0=True) if fields.flag("output_router_logits") else 0.0


# Which layers have a window, where config.json does not list it: a function of the fields and the layer's number.


def no_layer(fields: Fields, layer: int) -> bool:
    return False


def _every_layer(fields: Fields, layer: int) -> bool:
    return fields.get("sliding_window") is not None


def _upper_layers(fields: Fields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer >= fields.count("max_window_layers", least=0)


def _every_second_of_the_lower_layers(fields: Fields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer % 2 == 0 and not _upper_layers(fields, layer)


def _layers_without_rope(fields: Fields, layer: int) -> bool:
    slides = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    return slides and not _has_rope(fields, layer)


def _all_but_every_nth_layer(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields.count("sliding_window_pattern") != 0


def _unlisted_layers_but_every_nth(fields: Fields, layer: int) -> bool:
    """The same of a file that lists no layers; with such a list the pattern may be anything."""
    fields.get("sliding_window_pattern")
    if fields.get("layer_types") is not None:
        return False
    fields.count("sliding_window")  # where there is none, transformers wants the list
    return _all_but_every_nth_layer(fields, layer)


# Which layers of a family with experts have them.


def _every_nth_layer_but_some(fields: Fields, layer: int) -> bool:
    excepted = fields.get("mlp_only_layers") or []
    if not isinstance(excepted, list):
        raise ValueError(f"{fields.where}: mlp_only_layers is {excepted!r}; expected a list of layers' numbers.")
    return layer not in excepted and (layer + 1) % fields.count("decoder_sparse_step") == 0


# Which layers have another mixer than attention, where config.json does not list it, and what it is.


def _attention_in_every_nth_layer(fields: Fields, layer: int) -> str:
    return "linear_attention" if (layer + 1) % fields.count("full_attention_interval") else "full_attention"


def _attention_in_some_layers(fields: Fields, layer: int) -> str:
    some = fields.get("full_attn_idxs")
    if some is not None and not isinstance(some, list):
        raise ValueError(f"{fields.where}: full_attn_idxs is {some!r}; expected a list of layers' numbers.")
    return "full_attention" if some is None or layer in some else "conv"


def _delta_rule(fields: Fields, fused_projections: bool) -> DeltaRuleConfig:
    num_key_heads, num_heads = (fields.count(f"linear_num_{of}_heads") for of in ("key", "value"))
    if num_heads % num_key_heads:
        raise ValueError(
            f"{fields.where}: linear_num_value_heads is {num_heads} and linear_num_key_heads is {num_key_heads}; expected "
            "the first to be a multiple of the second."
        )
    key_dim, value_dim = (fields.count(f"linear_{of}_head_dim") for of in ("key", "value"))
    num_taps = fields.count("linear_conv_kernel_dim")
    return DeltaRuleConfig(num_key_heads, num_heads, key_dim, value_dim, num_taps, fused_projections)


def _short_convolution(fields: Fields) -> ShortConvolutionConfig:
    return ShortConvolutionConfig(fields.count("hidden_size"), fields.count("conv_L_cache"), fields.flag("conv_bias"))


def _adjusted_intermediate_size(fields: Fields) -> int:
    """Two thirds of what is said, times a factor, rounded up to a multiple: unless it is said to be as it is."""
    size = fields.count("intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim"):
        size = int(2 * size / 3)
        if fields.get("block_ffn_dim_multiplier") is not None:
            multiple = fields.count("block_multiple_of")
            size = -(-int(fields.positive("block_ffn_dim_multiplier") * size) // multiple) * multiple
    return size


_LONGEST = "max_position_embeddings"


def _all_layers_but_the_first(fields: Fields, layer: int) -> bool:
    return layer >= fields.count("first_k_dense_replace", least=0)


# How positions turn queries and keys, a function of the fields, the layer's number and whether it has a window.


def _rope_but_in_some_layers(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return rope_config(fields) if _has_rope(fields, layer) else None


def _has_rope(fields: Fields, layer: int) -> bool:
    has_rope = (layer + 1) % fields.count("no_rope_layer_interval") != 0
    if fields.get("no_rope_layers") is not None:  # named for the layers without, a 1 nevertheless marks those with it
        has_rope = fields.of_each_layer("no_rope_layers")[layer] == 1
    return has_rope


def _a_part_turned(fields: Fields, layer: int, is_windowed: bool, **facts: Any) -> RopeConfig:
    fields.positive("partial_rotary_factor")  # null is another number to transformers once it has saved the file
    return rope_config(fields, may_be_partial=True, **facts)


def _dims_turned(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig:
    """A part of each head, of which published files say how many features it has."""
    if fields.get("rotary_dim") is None:
        return rope_config(fields, may_be_partial=True)
    key, settings = rope_settings(fields)
    share = {"partial_rotary_factor": fields.count("rotary_dim") / head_dim_of(fields)}
    return rope_config(fields, settings={**share, **settings}, key=key, may_be_partial=True)


def _neighbours_in_windows(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return rope_config(fields, turns_neighbours=True) if is_windowed else None


def _rope_of_windows_or_of_all(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig | None:
    """Where no layer has a window, all have positions."""
    return rope_config(fields) if is_windowed or fields.get("sliding_window") is None else None


def _rope_with_alpha(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig:
    """`dynamic` with an alpha is another base, whatever the text's length and the other settings."""
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("alpha"):
        return rope_config(fields)
    own = Fields(settings, {"rope_theta": fields.get("rope_theta")}, f"{fields.where}: {key}")
    head_dim = head_dim_of(fields)
    theta = own.positive("rope_theta") * own.positive("alpha") ** (head_dim / (head_dim - 2))
    return rope_config(fields, settings={"rope_theta": theta}, key=key)


# How positions of images are spread over frequencies; those of a text are the same in all three directions.
_OF_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def _rope_with_growing_queries(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig:
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("llama_4_scaling_beta"):
        return rope_config(fields)
    own = Fields(settings, {}, f"{fields.where}: {key}")
    growth = own.positive("llama_4_scaling_beta"), own.positive("original_max_position_embeddings")
    # The longest context is there a second time.
    known = {name: value for name, value in settings.items() if name not in ("llama_4_scaling_beta", _LONGEST)}
    return rope_config(fields, settings=known, key=key, query_growth=growth[0], query_growth_positions=growth[1])


def _rope_by_window(fields: Fields, layer: int, is_windowed: bool) -> RopeConfig:
    """One base for the layers with a window, another one, and the scaling, for those that see everything."""
    theta = fields.positive("rope_local_base_freq" if is_windowed else "rope_theta")
    if fields.get("rope_parameters") is None:
        scaling = {} if is_windowed else fields.get("rope_scaling") or {}
        return rope_config(fields, settings={"rope_theta": theta, **scaling}, key="rope_scaling")
    kinds = fields.get("rope_parameters")
    if not isinstance(kinds, dict) or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{fields.where}: rope_parameters is {kinds!r}; expected an object with full_attention and "
            "sliding_attention."
        )
    kind = "sliding_attention" if is_windowed else "full_attention"
    return rope_config(
        fields, settings={"rope_theta": theta, **(kinds.get(kind) or {})}, key=f"rope_parameters: {kind}"
    )


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Family:
    """What tells a family from the others."""

    # Facts of DecoderConfig: a value, or what reads it from config.json.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # What a field means where config.json leaves it out; None for num_key_value_heads: as many as query heads.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: Callable[[Fields, int], bool] = no_layer
    rope: Callable[[Fields, int, bool], RopeConfig | None] = lambda fields, layer, is_windowed: rope_config(fields)
    # Whether `layer_types`, where config.json has it, decides which layers have a window.
    reads_layer_types: bool = False
    # The other mixers that `layer_types` may name, and what a layer is where config.json does not list them.
    mixers: Mapping[str, Callable[[Fields], MixerConfig]] = field(default_factory=dict)
    layer_type: Callable[[Fields, int], str] = lambda fields, layer: "full_attention"
    activation_field: str = "hidden_act"
    # The activations that config.json may name, and which each is.
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    norm_eps_field: str = "rms_norm_eps"
    # Facts of MixtureConfig, as above; without any the family has no experts.
    mixture: Mapping[str, Any] = field(default_factory=dict)
    has_mixture: Callable[[Fields, int], bool] = lambda fields, layer: True
    # What the folder has in the place of a part of our parameters' names: several names where the first dimension is
    # cut into so many parts, and `*` for the index in a stack, whose matrices it holds one by one.
    on_disk: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_ATTENTION_BIAS = {"qkv_bias": flag("attention_bias"), "output_bias": flag("attention_bias")}
_MLP_BIAS = {"mlp_bias": flag("mlp_bias")}
_EVERY_BIAS: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), flag("use_bias"))
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_FACTS = {
    **_ATTENTION_BIAS,
    "norm_weight_offset": 1.0,
    "embedding_multiplier": lambda fields: fields.count("hidden_size") ** 0.5,
    "embedding_multiplier_in_weight_dtype": True,
}
_GEMMA_2_FACTS = {  # and 3's
    **_GEMMA_FACTS,
    "norm_placement": "both",
    "attention_scale": lambda fields: fields.positive("query_pre_attn_scalar") ** -0.5,
    "logits_softcap": number_or_null("final_logit_softcapping"),
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

_MIXTURE = {
    "num_experts": _num_experts,
    "experts_per_token": count("num_experts_per_tok"),
    "intermediate_size": count("intermediate_size"),
    "router_aux_loss_coef": _router_aux_loss_coef,
}
_MIXTURE_DEFAULTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_EXPERTS_ON_DISK = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}

_MIXTRAL_ON_DISK = {
    "mlp.gate.": ("block_sparse_moe.gate.",),
    "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
}
_CORRECTED_MIXTURE = {
    "num_experts": count("n_routed_experts"),
    "experts_per_token": count("num_experts_per_tok"),
    "intermediate_size": count("moe_intermediate_size"),
    "weights_sum_to_one": flag("norm_topk_prob"),
    "shared_intermediate_size": lambda fields: (
        fields.count("moe_intermediate_size") * fields.count("n_shared_experts", least=0)
    ),
    "shared_name": "shared_experts",
    "score": "sigmoid",
    "corrected": True,
    "num_groups": count("n_group"),
    "groups_per_token": count("topk_group"),
    "weights_factor": number("routed_scaling_factor"),
    "wide_router": True,
}
_CORRECTED_MIXTURE_DEFAULTS = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


def _latent(fields: Fields) -> LatentConfig:
    query_rank = None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank")
    return LatentConfig(
        fields.count("kv_lora_rank"), query_rank, fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    )


def _yarn_scale(fields: Fields) -> float:
    """That of the scores, which grows where `yarn` stretches positions."""
    scale = (fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")) ** -0.5
    key, settings = rope_settings(fields)
    if not isinstance(settings, dict) or not settings.get("mscale_all_dim") or not settings.get("factor"):
        return scale
    own = Fields(settings, {}, f"{fields.where}: {key}")
    factor = own.positive("factor")
    return scale * (1.0 if factor <= 1 else 0.1 * own.positive("mscale_all_dim") * math.log(factor) + 1.0) ** 2


_QWEN_HYBRID: dict[str, Any] = {  # of qwen3_next and 3.5
    "facts": {**_ATTENTION_BIAS, "norm_weight_offset": 1.0, "qk_norm": "head", "attention_gate": True},
    "layer_type": _attention_in_every_nth_layer,
    "rope": partial(_a_part_turned, ignored=_OF_IMAGE_POSITIONS),
}
_QWEN_HYBRID_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_HYBRID_MIXTURE = {
    **_MIXTURE,
    "intermediate_size": count("moe_intermediate_size"),
    "shared_intermediate_size": count("shared_expert_intermediate_size"),
    "shared_gate": True,
}
_DELTA_RULE = {"linear_attention": partial(_delta_rule, fused_projections=False)}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        facts={**_ATTENTION_BIAS, **_MLP_BIAS},
        defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        has_window=_every_layer,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        facts={"qkv_bias": True},
        has_window=_upper_layers,
        reads_layer_types=True,
        defaults=_QWEN_DEFAULTS,
    ),
    "qwen3": Family(
        facts={**_ATTENTION_BIAS, "qk_norm": "head"},
        has_window=_upper_layers,
        reads_layer_types=True,
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "gemma": Family(
        facts=_GEMMA_FACTS,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16},
        activations={**ACTIVATIONS, "gelu": "gelu_tanh"},  # by which its older files mean the other
    ),
    "gemma2": Family(
        facts={**_GEMMA_2_FACTS, "attention_softcap": number_or_null("attn_logit_softcapping")},
        has_window=lambda fields, layer: layer % 2 == 0,
        reads_layer_types=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation_field="hidden_activation",
    ),
    "gemma3_text": Family(
        facts={**_GEMMA_2_FACTS, "qk_norm": "head"},
        has_window=_all_but_every_nth_layer,
        reads_layer_types=True,
        rope=_rope_by_window,
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        activation_field="hidden_activation",
    ),
    "phi3": Family(
        facts={"fused_qkv": True, "fused_gate_up": True},
        has_window=_every_layer,
        rope=lambda fields, layer, is_windowed: rope_config(fields, may_be_partial=True),
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "olmo2": Family(
        facts={**_ATTENTION_BIAS, "norm_placement": "out", "qk_norm": "projection"},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "smollm3": Family(
        facts={**_ATTENTION_BIAS, **_MLP_BIAS},
        has_window=_layers_without_rope,
        reads_layer_types=True,
        rope=_rope_but_in_some_layers,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "granite": Family(
        facts={
            **_ATTENTION_BIAS,
            **_MLP_BIAS,
            "attention_scale": number("attention_multiplier"),
            "embedding_multiplier": number("embedding_multiplier"),
            "residual_multiplier": number("residual_multiplier"),
            "logits_divisor": number("logits_scaling"),
        },
        defaults={
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "ministral": Family(
        has_window=_every_layer,
        reads_layer_types=True,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "ministral3": Family(
        has_window=_every_layer,
        rope=_rope_with_growing_queries,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo3": Family(
        facts={**_ATTENTION_BIAS, "norm_placement": "out", "qk_norm": "projection"},
        has_window=_all_but_every_nth_layer,
        reads_layer_types=True,
        rope=_rope_by_window,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 5e5,
            "rope_local_base_freq": 5e5,
        },
    ),
    "glm4": Family(
        facts={"qkv_bias": flag("attention_bias"), "norm_placement": "both", "fused_gate_up": True},
        rope=partial(_a_part_turned, turns_neighbours=True),
        on_disk={
            "post_attention_layernorm": ("post_self_attn_layernorm",),
            "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "post_feedforward_layernorm": ("post_mlp_layernorm",),
        },
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
    ),
    "seed_oss": Family(
        facts={"qkv_bias": flag("attention_bias"), "output_bias": flag("attention_out_bias"), **_MLP_BIAS},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
    "ernie4_5": Family(
        facts=_EVERY_BIAS,
        rope=lambda fields, layer, is_windowed: rope_config(fields, turns_neighbours=True),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 5e5,
            "use_bias": False,
        },
    ),
    "hunyuan_v1_dense": Family(
        facts={**_ATTENTION_BIAS, "qk_norm": "turned_head"},
        rope=_rope_with_alpha,
        on_disk={"self_attn.q_norm": ("self_attn.query_layernorm",), "self_attn.k_norm": ("self_attn.key_layernorm",)},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "exaone4": Family(
        facts={"norm_placement": "out", "qk_norm": "head"},
        has_window=_unlisted_layers_but_every_nth,
        reads_layer_types=True,
        rope=_rope_of_windows_or_of_all,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "apertus": Family(
        facts={**_ATTENTION_BIAS, "qk_norm": "head"},
        activations={"xielu": "xielu"},
        on_disk={
            "input_layernorm": ("attention_layernorm",),
            "post_attention_layernorm": ("feedforward_layernorm",),
        },
        defaults={
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 65536,
            "rope_theta": 12e6,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "cohere2": Family(
        facts={
            **_ATTENTION_BIAS,
            "norm_placement": "once",
            "norm_centered": True,
            "logits_divisor": lambda fields: 1 / fields.positive("logit_scale"),
        },
        has_window=_all_but_every_nth_layer,
        reads_layer_types=True,
        rope=_neighbours_in_windows,
        norm_eps_field="layer_norm_eps",
        defaults={
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "mixtral": Family(
        has_window=_every_layer,
        mixture={**_MIXTURE, "weights_sum_to_one": True},
        on_disk=_MIXTRAL_ON_DISK,
        defaults={
            **_MIXTURE_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": Family(
        facts={**_ATTENTION_BIAS, "qk_norm": "head"},
        has_window=lambda fields, layer: fields.flag("use_sliding_window") and _every_layer(fields, layer),
        mixture={
            **_MIXTURE,
            "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
        },
        has_mixture=_every_nth_layer_but_some,
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_MIXTURE_DEFAULTS,
            **_QWEN_DEFAULTS,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    "olmoe": Family(
        facts={**_ATTENTION_BIAS, "qk_norm": "projection"},
        mixture={**_MIXTURE, "weights_sum_to_one": flag("norm_topk_prob")},
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_MIXTURE_DEFAULTS,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
    ),
    "qwen2_moe": Family(
        facts={"qkv_bias": flag("qkv_bias")},
        has_window=_every_second_of_the_lower_layers,
        reads_layer_types=True,
        mixture={
            **_MIXTURE,
            "intermediate_size": count("moe_intermediate_size"),
            "weights_sum_to_one": flag("norm_topk_prob"),
            "shared_intermediate_size": count("shared_expert_intermediate_size"),
            "shared_gate": True,
        },
        has_mixture=_every_nth_layer_but_some,
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_MIXTURE_DEFAULTS,
            **_QWEN_DEFAULTS,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "qkv_bias": True,
        },
    ),
    "glm4_moe": Family(
        facts={
            "qkv_bias": flag("attention_bias"),
            "qk_norm": lambda fields: "head" if fields.flag("use_qk_norm") else None,
        },
        rope=_a_part_turned,
        mixture=_CORRECTED_MIXTURE,
        has_mixture=_all_layers_but_the_first,
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_CORRECTED_MIXTURE_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
        },
    ),
    "minimax_m2": Family(
        facts={"qk_norm": "projection"},
        rope=_dims_turned,
        mixture={**_MIXTURE, "weights_sum_to_one": True, "score": "sigmoid", "corrected": True},
        on_disk={
            "mlp.gate.e_score": ("block_sparse_moe.e_score",),
            **_MIXTRAL_ON_DISK,
        },
        defaults={
            **_MIXTURE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "intermediate_size": 1536,
        },
    ),
    "deepseek_v3": Family(
        facts={
            **_ATTENTION_BIAS,
            "num_kv_heads": count("num_attention_heads"),
            "attention_scale": _yarn_scale,
            "latent": _latent,
        },
        rope=lambda fields, layer, is_windowed: rope_config(fields, turns_neighbours=fields.flag("rope_interleave")),
        mixture=_CORRECTED_MIXTURE,
        has_mixture=_all_layers_but_the_first,
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_CORRECTED_MIXTURE_DEFAULTS,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
    ),
    "gpt_oss": Family(
        facts={**_ATTENTION_BIAS, "attention_sinks": True},
        has_window=lambda fields, layer: layer % 2 == 0,
        reads_layer_types=True,
        mixture={
            **_MIXTURE,
            "weights_sum_to_one": True,
            "router_name": "router",
            "router_bias": True,
            "expert_bias": True,
            "input_first": True,
            "gate_scale": number("swiglu_alpha"),
            "up_offset": 1.0,
            "limit": number("swiglu_limit"),
        },
        defaults={
            **_MIXTURE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "qwen3_next": Family(
        **_QWEN_HYBRID,
        mixers={"linear_attention": partial(_delta_rule, fused_projections=True)},
        mixture={**_QWEN_HYBRID_MIXTURE, "weights_sum_to_one": flag("norm_topk_prob")},
        has_mixture=_every_nth_layer_but_some,
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_MIXTURE_DEFAULTS,
            **_QWEN_HYBRID_DEFAULTS,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "num_local_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_5_text": Family(
        **_QWEN_HYBRID,
        mixers=_DELTA_RULE,
        defaults={**_QWEN_HYBRID_DEFAULTS, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe_text": Family(
        **_QWEN_HYBRID,
        mixers=_DELTA_RULE,
        mixture={**_QWEN_HYBRID_MIXTURE, "weights_sum_to_one": True},
        on_disk=_EXPERTS_ON_DISK,
        defaults={
            **_MIXTURE_DEFAULTS,
            **_QWEN_HYBRID_DEFAULTS,
            "num_key_value_heads": 2,
            "intermediate_size": 512,  # no layer has it
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "lfm2": Family(
        facts={
            "qk_norm": "head",
            "activation": "silu",
            "intermediate_size": _adjusted_intermediate_size,
            "tied_embeddings": lambda fields: fields.flag(
                "tie_word_embeddings" if fields.get("tie_embedding") is None else "tie_embedding"
            ),
        },
        mixers={"conv": _short_convolution},
        layer_type=_attention_in_some_layers,
        norm_eps_field="norm_eps",
        on_disk={
            "input_layernorm": ("operator_norm",),
            "post_attention_layernorm": ("ffn_norm",),
            "model.norm": ("model.embedding_norm",),
            "self_attn.o_proj": ("self_attn.out_proj",),
            "self_attn.q_norm": ("self_attn.q_layernorm",),
            "self_attn.k_norm": ("self_attn.k_layernorm",),
            "mlp.gate_proj": ("feed_forward.w1",),
            "mlp.up_proj": ("feed_forward.w3",),
            "mlp.down_proj": ("feed_forward.w2",),
        },
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "intermediate_size": 12288,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
    ),
}
