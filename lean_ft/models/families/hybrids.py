"""Families of which some layers have another mixer of tokens than attention."""

from functools import partial
from typing import Any

from lean_ft.models.config import DeltaRuleConfig, ShortConvolutionConfig
from lean_ft.models.config_fields import Fields
from lean_ft.models.families.family import ATTENTION_BIAS, Family, a_part_turned, count, flag
from lean_ft.models.families.mixtures import EXPERTS_ON_DISK, MIXTURE, MIXTURE_DEFAULTS, every_nth_layer_but_some

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


# How positions of images are spread over frequencies; those of a text are the same in all three directions.
_OF_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")

_QWEN_HYBRID: dict[str, Any] = {  # of qwen3_next and 3.5
    "facts": {**ATTENTION_BIAS, "norm_weight_offset": 1.0, "qk_norm": "head", "attention_gate": True},
    "layer_type": _attention_in_every_nth_layer,
    "rope": partial(a_part_turned, ignored=_OF_IMAGE_POSITIONS),
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
    **MIXTURE,
    "intermediate_size": count("moe_intermediate_size"),
    "shared_intermediate_size": count("shared_expert_intermediate_size"),
    "shared_gate": True,
}
_DELTA_RULE = {"linear_attention": partial(_delta_rule, fused_projections=False)}

HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family(
        **_QWEN_HYBRID,
        mixers={"linear_attention": partial(_delta_rule, fused_projections=True)},
        mixture={**_QWEN_HYBRID_MIXTURE, "weights_sum_to_one": flag("norm_topk_prob")},
        has_mixture=every_nth_layer_but_some,
        on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS,
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
        on_disk=EXPERTS_ON_DISK,
        defaults={
            **MIXTURE_DEFAULTS,
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
