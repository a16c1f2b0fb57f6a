"""Families of GGUF files with experts, latent attention, recurrent layers, or layers of several sizes.

Source: llama.cpp, conversion/*.py (tensors) and src/models/*.cpp (metadata, and what an architecture computes).

Shapes: E experts, I intermediate features of an expert, D features, G key heads, H value heads.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lean_ft.export.gguf_families import (
    GGUF_FAMILIES,
    GRANITE_FIELDS,
    LLAMA,
    PLUS_ONE,
    STORED,
    Change,
    GGUFFamily,
    Layout,
    all_heads,
    always,
)
from lean_ft.export.gguf_mixture_fields import (
    bamba_config,
    deepseek_config,
    delta_rule_config,
    ernie_config,
    experts,
    falcon_config,
    gemma4_config,
    glm4_moe_config,
    gpt_oss_config,
    granite_config,
    lfm2_config,
    llama4_config,
    local_config,
    nemotron_config,
    qwen_config,
)
from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig, LatentConfig, MixtureConfig
from lean_ft.models.gguf_layouts import Step
from lean_ft.models.rope import RopeConfig

_LATENT_NORM_EPS = 1e-6  # of norms of latents, whatever config.json says
_DEPTHS_WITHOUT_QUERY_LATENT = (26, 27)  # llama.cpp reads no query latent in models with so many layers


def mixer_of(config: DecoderConfig) -> Any:
    """The configuration of the recurrent layers; None if there are none."""
    return next((layer.mixer for layer in config.layers if layer.mixer is not None), None)


def _mixture(config: DecoderConfig) -> MixtureConfig:
    assert config.mixture is not None
    return config.mixture


def _renamed(name: str) -> Layout:
    return Layout(places=(name,))


def _scaled(*factors: float) -> tuple[Step, ...]:
    """The step that multiplies by a factor, or by one for each stretch of rows: size, factor, size, factor, ..."""
    if all(factor == 1.0 for factor in factors[-1::-2]):
        return ()
    return (("multiply" if len(factors) == 1 else "multiply_rows", *factors),)


def _times(factor: Callable[[DecoderConfig], float]) -> Change:
    return lambda config: Layout(_scaled(factor(config)))


# Experts.


def _gates_and_ups(places: str, is_bias: bool = False) -> Change:
    """Split matrices (E, 2 * I, D) or biases (E, 2 * I) of experts."""

    def layout(config: DecoderConfig) -> Layout:
        mixture = _mixture(config)
        steps: tuple[Step, ...] = (("transpose",),) if mixture.input_first and not is_bias else ()
        if not mixture.gated:
            return Layout(steps, (places.format("up"),))
        split = ("unzip", 1) if mixture.gates_interleaved else ("split", 1, *[mixture.intermediate_size] * 2)
        return Layout((*steps, split), (places.format("gate"), places.format("up")))

    return layout


def _down(config: DecoderConfig) -> Layout:
    return Layout((("transpose",),) if _mixture(config).input_first else (), ("mlp.experts.down_proj.weight",))


def _rows_split(places: str, size: Callable[[DecoderConfig], int]) -> Change:
    """Split a matrix (2 * I, D)."""
    return lambda config: Layout((("split", 0, *[size(config)] * 2),), (places.format("gate"), places.format("up")))


def in_every_layer(config: DecoderConfig, layer: int) -> MixtureConfig | None:
    return config.mixture


def _after_dense_layers(config: DecoderConfig, layer: int) -> MixtureConfig | None:
    return config.mixture if any(other.mixture for other in config.layers[: layer + 1]) else None


def _in_every_nth_layer(config: DecoderConfig, layer: int) -> MixtureConfig | None:
    step = next((i + 1 for i, other in enumerate(config.layers) if other.mixture is not None), 1)
    return None if (layer + 1) % step else config.mixture


def _some_window(config: DecoderConfig, layer: int) -> Any:
    """llama.cpp opens no file of these families without a window."""
    return STORED if any(other.window for other in config.layers) else "a sliding window in some layers"


def _whole_shared_experts(config: DecoderConfig) -> int:
    """Files have the number of shared experts; llama.cpp needs one at least."""
    size = _mixture(config).intermediate_size
    return max(_mixture(config).shared_intermediate_size // size, 1) * size


# Latent attention.


def _latent(config: DecoderConfig) -> LatentConfig:
    assert config.latent is not None
    return config.latent


def _readable_latent(config: DecoderConfig) -> LatentConfig:
    without_query = config.num_layers in _DEPTHS_WITHOUT_QUERY_LATENT
    return replace(_latent(config), query_rank=None) if without_query else _latent(config)


def _keys_and_values(config: DecoderConfig) -> Layout:
    sizes = _latent(config).plain_dim, _latent(config).value_dim
    return Layout((("keys_and_values", config.num_heads, *sizes),), ("k_b_proj", "v_b_proj"))


def _norm_factor(config: DecoderConfig) -> float:
    """Scales a projection to latents so that their norm computes the same with the epsilon of the other norms."""
    return (config.norm_eps / _LATENT_NORM_EPS) ** 0.5


def _latents_and_positions(config: DecoderConfig) -> Layout:
    return Layout(_scaled(_latent(config).rank, _norm_factor(config), config.head_dim, 1.0))


def _plain_scale(config: DecoderConfig) -> float:
    return (_latent(config).plain_dim + config.head_dim) ** -0.5


def _latent_metadata(model: Decoder) -> dict[str, Any]:
    config, latent, rope = model.config, _latent(model.config), model.config.layers[0].rope
    metadata: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": latent.query_rank or 0,
        "attention.kv_lora_rank": latent.rank,
        "attention.key_length": latent.rank + config.head_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.plain_dim + config.head_dim,
        "attention.value_length_mla": latent.value_dim,
    }
    if rope is not None and rope.scaling == "yarn":
        # llama.cpp multiplies scores by the square of attn_factor * (1 + yarn_log_multiplier * log(factor)).
        scale = ((config.attention_scale or 0.0) / _plain_scale(config)) ** 0.5 / rope.attention_factor
        if not math.isclose(scale, 1.0):
            metadata["rope.scaling.yarn_log_multiplier"] = (scale - 1.0) / math.log(rope.factor)
            metadata["rope.scaling.attn_factor"] = rope.attention_factor
    return metadata


def _latent_scale(config: DecoderConfig) -> float | None:
    """Only with yarn files have the scale of scores."""
    is_yarn = any(layer.rope and layer.rope.scaling == "yarn" for layer in config.layers)
    return config.attention_scale if is_yarn else _plain_scale(config)


# Llama 4.

_GROWING_QUERIES = RopeConfig(
    1.0, "proportional", nonzero_fraction=0.0, query_growth=0.1, query_growth_positions=8192, query_growth_start=1
)


def _is_turned(config: DecoderConfig, layer: int) -> bool:
    return layer % 4 != 3


# Recurrent layers.


def _taps(config: DecoderConfig) -> Layout:
    return Layout((("reshape", -1, mixer_of(config).num_taps),))


def _tiled(config: DecoderConfig, dim: int = 0, first: int = 0) -> tuple[Step, ...]:
    """Key head h belongs to value heads h, h + G, ... in the file, and to H / G neighbors here."""
    mixer = mixer_of(config)
    return (("tile", dim, first, mixer.num_key_heads, mixer.num_heads // mixer.num_key_heads),)


def _values_tiled(config: DecoderConfig) -> tuple[Step, ...]:
    """The same for the values after queries and keys."""
    return _tiled(config, first=2 * mixer_of(config).num_key_heads * mixer_of(config).key_dim)


def _ungrouped(config: DecoderConfig) -> Layout:
    """Turn query, key, values and gates of each key head into all queries, all keys, all values, and all gates."""
    mixer = mixer_of(config)
    keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
    sizes = (mixer.key_dim, mixer.key_dim, *[values // mixer.num_key_heads] * 2)
    steps = (("ungroup", mixer.num_key_heads, *sizes), ("split", 0, 2 * keys + values, values))
    return Layout(steps, ("in_proj_qkv", "in_proj_z"))


def _delta_rule_metadata(model: Decoder) -> dict[str, Any]:
    config, recurrent = model.config, [layer.mixer is not None for layer in model.config.layers]
    rope = next((layer.rope for layer in config.layers if layer.rope is not None), RopeConfig(1.0))
    frequencies = int(config.head_dim * rope.rotary_fraction) // 2
    return {
        "attention.head_count_kv": config.num_kv_heads,
        "attention.recurrent_layers": recurrent,
        "full_attention_interval": recurrent.index(False) + 1 if False in recurrent else len(recurrent) + 1,
        # Of time, height and width, which are equal for text.
        "rope.dimension_sections": [(frequencies + 2) // 3, (frequencies + 1) // 3, frequencies // 3, 0],
    }


def _granite_architecture(config: DecoderConfig) -> str:
    return "granitehybrid" if config.has_states else "granite" if config.mixture is None else "granitemoe"


def _granite_metadata(model: Decoder) -> dict[str, Any]:
    size = {} if model.config.mixture is None else {"feed_forward_length": model.config.mixture.intermediate_size}
    return {"rope.scaling.finetuned": _has_any_rope(model.config, 0), **size}


def _has_any_rope(config: DecoderConfig, layer: int) -> bool:
    return any(other.rope is not None for other in config.layers)


def _falcon_projection(config: DecoderConfig) -> Layout:
    """Multiply the rows of gates, values, keys, queries and steps."""
    mixer = mixer_of(config)
    values, keys = mixer.num_heads * mixer.value_dim, mixer.num_key_heads * mixer.key_dim
    rows = zip((values, values, keys, keys, mixer.num_heads), mixer.multipliers, strict=True)
    return Layout(_scaled(*(x for size, factor in rows for x in (size, factor * mixer.in_multiplier))))


def _falcon_embedding(config: DecoderConfig) -> Layout:
    factors = config.embedding_multiplier, 1 / config.logits_divisor
    if not config.tied_embeddings or factors[0] == factors[1]:
        return Layout(_scaled(factors[0]))
    return Layout((("twice", *factors),), ("model.embed_tokens", "lm_head"))


def _falcon_key_factor(config: DecoderConfig) -> float:
    return config.attention_multipliers[0] * (config.attention_scale or 0.0) * config.head_dim**0.5


# Gemma 4.


def _gemma4_metadata(model: Decoder) -> dict[str, Any]:
    config = model.config
    sizes = {bool(layer.window): config.head_dim_of(i) for i, layer in enumerate(config.layers)}
    full, windowed = sizes.get(False, config.head_dim), sizes.get(True, config.head_dim)
    return {
        "attention.shared_kv_layers": sum(layer.kv_from_layer is not None for layer in config.layers),
        "embedding_length_per_layer_input": config.layer_input_dim,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), full),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), windowed
        ),
        "final_logit_softcapping": float(config.logits_softcap or 0.0),  # llama.cpp's default is 30
    }


def _gemma4_kv_source(config: DecoderConfig, layer: int) -> int | None:
    """The upper layers use the keys and values of the last two lower layers."""
    first = sum(other.kv_from_layer is None for other in config.layers)
    return None if layer < first else first - (2 if config.layers[layer].window else 1)


def _gemma4_head_dim(config: DecoderConfig, layer: int) -> int | None:
    """All layers with a window have one size of heads, and all others."""
    kind = bool(config.layers[layer].window)
    return next(other.head_dim for other in config.layers if bool(other.window) == kind)


# A table: related fields share a line.
# fmt: off
_TIED = frozenset({"tied_embeddings"})
_EXPERTS: dict[str, Change] = {
    "mlp.experts.gate_up_proj_bias": _gates_and_ups("mlp.experts.{}_proj.bias", is_bias=True),
    "mlp.experts.gate_up_proj": _gates_and_ups("mlp.experts.{}_proj.weight"),
    "mlp.experts.down_proj_bias": _renamed("mlp.experts.down_proj.bias"),
    "mlp.experts.down_proj": _down,
    "e_score_correction_bias": Layout((("reshape", -1),), ("e_score_correction.bias",)),
}
_MIXTURE = GGUFFamily("", changes=_EXPERTS, layers={"mixture": in_every_layer}, mixture={"weights_sum_to_one": True})
_CORRECTED = {
    "weights_sum_to_one": STORED, "weights_factor": STORED, "score": STORED, "has_score_correction": True,
    "num_groups": STORED, "groups_per_token": STORED, "shared_intermediate_size": _whole_shared_experts,
}
_QWEN_EXPERTS = {"weights_sum_to_one": True, "shared_intermediate_size": STORED, "shared_gate": True}
_MAMBA: dict[str, Change] = {
    "mamba.A_log": Layout((("decay",), ("reshape", -1, 1))), "mamba.D": Layout((("reshape", -1, 1),)),
    "mamba.dt_bias": _renamed("mamba.dt_proj.bias"), "mamba.conv1d.weight": _taps,
    "mamba.norm.weight": lambda config: Layout((("reshape", mixer_of(config).num_key_heads, -1),)),
}
_MAMBA2 = {
    "activation": "silu", "convolution_bias": True, "in_bias": False, "out_bias": False, "norm": "after_gate",
    "step_limits": (0.0, math.inf),
}
_DELTA_RULE = GGUFFamily(
    "qwen3next",
    changes={
        **_EXPERTS, "linear_attn.A_log": Layout((("decay",),)), "linear_attn.dt_bias": _renamed("linear_attn.dt_proj.bias"),
        "linear_attn.conv1d.weight": _taps, "in_proj_qkvz": _ungrouped,
        "linear_attn.norm.weight": Layout(), "norm.weight": PLUS_ONE,
    },
    metadata=_delta_rule_metadata,
    fixed={"norm_weight_offset": 1.0, "qk_norm": "head", "attention_gate": True, "norm_eps": 1e-6},
    layers={"mixer": STORED, "has_attention": STORED, "mixture": in_every_layer}, mixture=_QWEN_EXPERTS,
    mixer={"value_dim": lambda config: mixer_of(config).key_dim, "fused_projections": True},
    class_name="Qwen3Next", config=lambda facts: {**qwen_config(facts), **delta_rule_config(facts), "norm_topk_prob": True},
)
_QWEN3_5 = _DELTA_RULE._replace(
    architecture="qwen35moe",
    changes={
        **_DELTA_RULE.changes, "linear_attn.A_log": lambda config: Layout((("decay",), *_tiled(config))),
        "linear_attn.dt_bias": lambda config: Layout(_tiled(config), ("linear_attn.dt_proj.bias",)),
        "linear_attn.conv1d.weight": lambda config: Layout((*_taps(config).steps, *_values_tiled(config))),
        "linear_attn.in_proj_qkv": lambda config: Layout(_values_tiled(config)),
        "linear_attn.in_proj": lambda config: Layout(_tiled(config)),
        "linear_attn.out_proj": lambda config: Layout(_tiled(config, 1)),
    },
    mixer={**_DELTA_RULE.mixer, "fused_projections": False},
    class_name="Qwen3_5Moe", config=lambda facts: {**qwen_config(facts), **delta_rule_config(facts)},
)
_GRANITE_HYBRID = GGUFFamily(
    "granitehybrid",
    changes={
        **_EXPERTS, **_MAMBA, "mlp.gate_up_proj": _rows_split("mlp.{}_proj", lambda config: config.intermediate_size),
        "mlp.shared_expert.gate_up_proj": _rows_split(
            "mlp.shared_expert.{}_proj", lambda config: _mixture(config).shared_intermediate_size
        ),
        "mlp.down_proj": _renamed("mlp.down_proj"),
    },
    metadata=_granite_metadata, shown=LLAMA.shown | {"fused_gate_up"}, pairs_neighbors=True, has_rope=_has_any_rope,
    layers={"mixer": STORED, "has_attention": STORED},
    mixer={**_MAMBA2, "value_dim": lambda config: 2 * config.hidden_size / mixer_of(config).num_heads},
    class_name="Bamba", config=bamba_config,
)
_GEMMA4 = GGUFFamily(
    "gemma4",
    changes={
        "layer_scalar": _renamed("layer_scalar.weight"),
        "mixture.router.proj": _renamed("router.proj"), "mixture.router.scale": _renamed("router.proj.scale"),
        "mixture.router.per_expert_scale": _renamed("experts.down_proj.scale"),
        "mixture.experts.gate_up_proj": _renamed("experts.gate_up_proj.weight"),
        "mixture.experts.down_proj": _renamed("experts.down_proj.weight"),
    },
    metadata=_gemma4_metadata, shown=_TIED | {"logits_softcap", "layer_input_dim", "layer_scalars"},
    fixed={
        "norm_placement": "both", "activation": "gelu_tanh", "qk_norm": "head", "value_norm": True,
        "embedding_multiplier": lambda config: config.hidden_size**0.5, "attention_scale": 1.0,
        "layer_input_vocab_size": lambda config: config.vocab_size if config.layer_input_dim else 0,
    },
    scalings=frozenset({"default", "proportional"}), windows=always, scaled_windows=False,
    no_adapter=frozenset({"per_layer_model_projection", "embed_tokens_per_layer"}),
    layers={
        "mixture": in_every_layer, "num_kv_heads": STORED, "intermediate_size": STORED, "values_are_keys": STORED,
        "head_dim": _gemma4_head_dim, "kv_from_layer": _gemma4_kv_source, "window": _some_window,
    },
    mixture={
        "weights_sum_to_one": True, "activation": "gelu_tanh", "beside_mlp": True,
        "router_norm_eps": lambda config: config.norm_eps,
    },
    optional=frozenset({"experts"}), class_name="Gemma4", config=gemma4_config,
)

GGUF_MIXTURES: dict[str, GGUFFamily] = {
    "mixtral": _MIXTURE._replace(
        architecture="llama", pairs_neighbors=True, scalings=LLAMA.scalings, class_name="Mixtral",
        config=lambda facts: {**local_config(facts), "sliding_window": None},
    ),
    "qwen3_moe": _MIXTURE._replace(
        architecture="qwen3moe", fixed={"qk_norm": "head"}, class_name="Qwen3Moe",
        config=lambda facts: {**qwen_config(facts), "attention_bias": False, "norm_topk_prob": True},
    ),
    "qwen2_moe": _MIXTURE._replace(
        architecture="qwen2moe", shown=frozenset({"qkv_bias"}), fixed={"tied_embeddings": False, "head_dim": all_heads},
        mixture={**_QWEN_EXPERTS, "weights_sum_to_one": False}, class_name="Qwen2Moe",
        config=lambda facts: {**qwen_config(facts), "qkv_bias": facts.has("attn_q.bias"), "norm_topk_prob": False},
    ),
    "olmoe": _MIXTURE._replace(
        architecture="olmoe", shown=frozenset(), mixture={"weights_sum_to_one": False},
        fixed={
            "qk_norm": "projection", "tied_embeddings": False, "head_dim": all_heads,
            "num_kv_heads": lambda config: config.num_heads,
        },
        class_name="Olmoe",
        config=lambda facts: {**experts(facts, size="intermediate_size"), "attention_bias": False, "norm_topk_prob": False},
    ),
    "gpt_oss": _MIXTURE._replace(
        architecture="gpt-oss", changes={**_EXPERTS, "sinks": _renamed("sinks.weight")}, shown=frozenset(),
        fixed={"qkv_bias": True, "output_bias": True, "attention_sinks": True, "tied_embeddings": False},
        windows=always, layers={**_MIXTURE.layers, "window": _some_window},
        rope={"truncate": STORED},  # llama.cpp rounds; the export says so
        mixture={
            "weights_sum_to_one": True, "router_bias": True, "expert_bias": True, "gate_scale": 1.702, "up_offset": 1.0,
            "limit": 7.0,
        },
        class_name="GptOss", period=2,
        config=gpt_oss_config,
    ),
    "glm4_moe": _MIXTURE._replace(
        architecture="glm4moe", shown=_TIED | {"qkv_bias", "qk_norm"}, layers={"mixture": _after_dense_layers},
        mixture=_CORRECTED, class_name="Glm4Moe", config=glm4_moe_config,
    ),
    "ernie4_5_moe": _MIXTURE._replace(
        architecture="ernie4_5-moe", pairs_neighbors=True, layers={"mixture": _after_dense_layers},
        mixture={"weights_sum_to_one": True, "has_score_correction": True, "shared_intermediate_size": STORED},
        class_name="Ernie4_5_Moe", config=ernie_config,
    ),
    "minimax_m2": _MIXTURE._replace(
        architecture="minimax-m2", shown=frozenset(), fixed={"qk_norm": "projection", "tied_embeddings": False},
        mixture={"weights_sum_to_one": True, "has_score_correction": True, "score": STORED},
        class_name="MiniMaxM2", config=local_config,
    ),
    "deepseek_v3": _MIXTURE._replace(
        architecture="deepseek2",
        changes={
            **_EXPERTS, "kv_b_proj": _keys_and_values, "q_a_proj": _times(_norm_factor),
            "kv_a_proj_with_mqa": _latents_and_positions,
        },
        no_adapter=frozenset({"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "lm_head"}),
        metadata=_latent_metadata, shown=_TIED, fixed={"latent": _readable_latent, "attention_scale": _latent_scale},
        pairs_neighbors=True, scalings=frozenset({"default", "yarn"}), layers={"mixture": _after_dense_layers},
        mixture=_CORRECTED, class_name="DeepseekV3", config=deepseek_config,
    ),
    "llama4_text": _MIXTURE._replace(
        architecture="llama4", pairs_neighbors=True, scalings=LLAMA.scalings,
        layers={
            "mixture": _in_every_nth_layer,
            "rope": lambda config, layer: config.layers[0].rope if _is_turned(config, layer) else _GROWING_QUERIES,
            "chunk": lambda config, layer: 8192 if _is_turned(config, layer) else None,
            "unit_qk": lambda config, layer: (
                _is_turned(config, layer) and (config.mixture is None or config.mixture.num_experts != 128)
            ),
        },
        mixture={
            "weights_sum_to_one": False, "score": "sigmoid", "scales_input": True,
            "shared_intermediate_size": lambda config: _mixture(config).intermediate_size,
        },
        class_name="Llama4", config=llama4_config,
    ),
    "qwen3_next": _DELTA_RULE,
    "qwen3_5_text": _QWEN3_5._replace(
        architecture="qwen35", mixture={}, class_name="Qwen3_5", config=delta_rule_config
    ),
    "qwen3_5_moe_text": _QWEN3_5,
    "lfm2": GGUFFamily(
        "lfm2", changes={"conv.conv.weight": _taps}, shown=_TIED, fixed={"qk_norm": "head", "head_dim": all_heads},
        layers={"mixer": STORED, "has_attention": STORED}, mixer={"bias": False}, class_name="Lfm2",
        fields={"attention.layer_norm_rms_epsilon": "norm_eps"}, config=lfm2_config,
    ),
    "granitemoehybrid": _GRANITE_HYBRID._replace(
        architecture_of=_granite_architecture,
        numbers=GGUF_FAMILIES["granite"].numbers,
        layers={**_GRANITE_HYBRID.layers, "mixture": in_every_layer},
        mixture={"weights_sum_to_one": True, "shared_intermediate_size": STORED},
        optional=frozenset({"experts", "recurrent layers"}), class_name="GraniteMoeHybrid", fields=GRANITE_FIELDS,
        config=granite_config,
    ),
    "bamba": _GRANITE_HYBRID,
    "falcon_h1": GGUFFamily(
        "falcon-h1",
        changes={
            **_MAMBA, "model.embed_tokens": _falcon_embedding,
            "lm_head": _times(lambda config: 1.0 / config.logits_divisor),
            "q_proj": _times(lambda config: config.attention_multipliers[0]), "k_proj": _times(_falcon_key_factor),
            "v_proj": _times(lambda config: config.attention_multipliers[0]),
            "o_proj": _times(lambda config: config.attention_multipliers[1]),
            "mlp.gate_proj": _times(lambda config: config.mlp_multipliers[0]),
            "mlp.down_proj": _times(lambda config: config.mlp_multipliers[1]),
            "mamba.in_proj": _falcon_projection, "mamba.out_proj": _times(lambda config: mixer_of(config).out_multiplier),
        },
        shown=_TIED | {
            "mlp_bias", "attention_scale", "attention_multipliers", "mlp_multipliers", "embedding_multiplier",
            "logits_divisor",
        },
        layers={"mixer": STORED}, no_adapter=frozenset({"model.embed_tokens"}),
        mixer={
            **_MAMBA2, "norm": lambda config: None if mixer_of(config).norm is None else "after_gate",
            "in_multiplier": STORED, "multipliers": STORED, "out_multiplier": STORED,
        },
        class_name="FalconH1", config=falcon_config,
    ),
    "nemotron_h": GGUFFamily(
        "nemotron_h", changes={**_EXPERTS, **_MAMBA, "post_attention_layernorm": _renamed("input_layernorm")},
        architecture_of=lambda config: "nemotron_h" if config.mixture is None else "nemotron_h_moe",
        metadata=lambda model: {"attention.layer_norm_epsilon": float(model.config.norm_eps)},
        shown=_TIED | {"mlp_bias"}, fixed={"activation": "relu2", "gated": False}, has_rope=lambda config, layer: False,
        layers={
            "mixer": STORED, "has_attention": STORED, "has_mlp": STORED,
            "mixture": lambda config, layer: config.mixture if config.layers[layer].has_mlp else None,
        },
        mixture={**_CORRECTED, "activation": "relu2", "gated": False, "score": "sigmoid", "shared_intermediate_size": STORED},
        mixer=_MAMBA2, optional=frozenset({"experts"}), class_name="NemotronH",
        fields={"attention.layer_norm_epsilon": "layer_norm_epsilon"}, config=nemotron_config,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,  # read as gemma4_text, which computes the same
}
# fmt: on

# Families that llama.cpp computes differently: how.
GGUF_REFUSED = {
    "phimoe": "it has RMSNorm instead of LayerNorm, and experts' weights from a softmax instead of sparsemixer",
    "ministral": "its architecture for Mistral's models has no sliding window",
}
