"""Families of GGUF files with experts, latent attention, recurrent layers, or layers of several sizes.

Source: llama.cpp, conversion/*.py (tensors) and src/models/*.cpp (metadata, and what an architecture computes).

Shapes: E experts, I intermediate features of an expert, D features, G key heads, H value heads.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lean_ft.export.gguf_families import GGUF_FAMILIES, LLAMA, STORED, Change, GGUFFamily, all_heads, always, plus_one
from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig, LatentConfig, MixtureConfig, ShortConvolutionConfig
from lean_ft.models.rope import RopeConfig

_LATENT_NORM_EPS = 1e-6  # of norms of latents, whatever config.json says
_DEPTHS_WITHOUT_QUERY_LATENT = (26, 27)  # llama.cpp reads no query latent in models with so many layers


def mixture_metadata(config: DecoderConfig, family: GGUFFamily) -> dict[str, Any]:
    """Return what files of a family store about experts; nothing if the model has none."""
    mixture, rules = config.mixture, family.mixture
    if mixture is None:
        return {}
    metadata: dict[str, Any] = {
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.experts_per_token,
        "expert_feed_forward_length": mixture.intermediate_size,
    }
    if rules.get("weights_sum_to_one") is STORED:
        metadata["expert_weights_norm"] = mixture.weights_sum_to_one
    if rules.get("weights_factor") is STORED:
        metadata["expert_weights_scale"] = float(mixture.weights_factor)
    if rules.get("score") is STORED:
        metadata["expert_gating_func"] = {"softmax": 1, "sigmoid": 2}[mixture.score]
    if family.layers["mixture"] is not _in_every_layer:
        first, *others = (i for i, layer in enumerate(config.layers) if layer.mixture is not None)
        metadata["leading_dense_block_count"] = first
        metadata["interleave_moe_layer_step"] = others[0] - first if others else 1
    if shared := mixture.shared_intermediate_size:
        metadata["expert_shared_feed_forward_length"] = shared
        metadata["expert_shared_count"] = shared // mixture.intermediate_size
    if mixture.groups_per_token < mixture.num_groups:
        metadata["expert_group_count"] = mixture.num_groups
        metadata["expert_group_used_count"] = mixture.groups_per_token
    return metadata


def mixer_metadata(config: DecoderConfig) -> dict[str, Any]:
    """Return what files store about recurrent layers; nothing if there are none."""
    mixer = mixer_of(config)
    if mixer is None:
        return {}
    if isinstance(mixer, ShortConvolutionConfig):
        return {"shortconv.l_cache": mixer.num_taps}
    return {
        "ssm.conv_kernel": mixer.num_taps,
        "ssm.state_size": mixer.key_dim,
        "ssm.group_count": mixer.num_key_heads,
        "ssm.inner_size": mixer.num_heads * mixer.value_dim,
        "ssm.time_step_rank": mixer.num_heads,
    }


def mixer_of(config: DecoderConfig) -> Any:
    """The configuration of the recurrent layers; None if there are none."""
    return next((layer.mixer for layer in config.layers if layer.mixer is not None), None)


def _mixture(config: DecoderConfig) -> MixtureConfig:
    assert config.mixture is not None
    return config.mixture


def _renamed(name: str) -> Change:
    return lambda weight, config: {name: weight}


def _times(factor: Callable[[DecoderConfig], float]) -> Change:
    return lambda weight, config: weight.float() * factor(config)


# Experts.


def _output_first(stacked: Tensor, config: DecoderConfig) -> Tensor:
    """Matrices (E, outputs, inputs) of experts, or their biases."""
    return stacked.mT if _mixture(config).input_first and stacked.ndim == 3 else stacked


def _gates_and_ups(places: str) -> Change:
    """Split matrices (E, 2 * I, D) or biases (E, 2 * I) of experts."""

    def split(stacked: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
        stacked = _output_first(stacked, config)
        if _mixture(config).activation == "relu2":  # no gates
            return {places.format("up"): stacked}
        halves = stacked.unflatten(1, (-1, 2)).unbind(2) if _mixture(config).gates_interleaved else stacked.chunk(2, 1)
        return {places.format(name): half for name, half in zip(("gate", "up"), halves, strict=True)}

    return split


def _rows_split(places: str) -> Change:
    """Split a matrix (2 * I, D)."""
    return lambda weight, config: {places.format("gate"): weight.chunk(2)[0], places.format("up"): weight.chunk(2)[1]}


def _in_every_layer(config: DecoderConfig, layer: int) -> MixtureConfig | None:
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


def _keys_and_values(weight: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
    """Split the projection of latents. llama.cpp multiplies queries with that of keys, (heads, latent, features)."""
    heads = weight.unflatten(0, (config.num_heads, -1))
    keys, values = heads.split((_latent(config).plain_dim, _latent(config).value_dim), 1)
    return {"k_b_proj": keys.mT, "v_b_proj": values}


def _for_norm_eps(weight: Tensor, config: DecoderConfig) -> Tensor:
    """Scale a projection to latents so that their norm computes the same with the epsilon of the other norms."""
    factor = (config.norm_eps / _LATENT_NORM_EPS) ** 0.5
    return weight if factor == 1.0 else weight.float() * factor


def _latents_for_norm_eps(weight: Tensor, config: DecoderConfig) -> Tensor:
    rank = _latent(config).rank
    return torch.cat((_for_norm_eps(weight[:rank], config), weight[rank:]))


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


def _decay(weight: Tensor, config: DecoderConfig) -> Tensor:
    return -weight.float().exp()


def _taps(weight: Tensor, config: DecoderConfig) -> Tensor:
    return weight.squeeze(1)


def _tiled(weight: Tensor, config: DecoderConfig, dim: int = 0) -> Tensor:
    """Reorder value heads: key head h belongs to value heads h, h + G, ... in the file, and to H / G neighbors here."""
    num_key_heads, num_heads = mixer_of(config).num_key_heads, mixer_of(config).num_heads
    heads = weight.unflatten(dim, (num_key_heads, num_heads // num_key_heads, -1))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _values_tiled(weight: Tensor, config: DecoderConfig) -> Tensor:
    """The same for the values after queries and keys."""
    size = 2 * mixer_of(config).num_key_heads * mixer_of(config).key_dim
    return torch.cat((weight[:size], _tiled(weight[size:], config)))


def _ungrouped(weight: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
    """Turn query, key, values and gates of each key head into all queries, all keys, all values, and all gates."""
    mixer = mixer_of(config)
    size = mixer.num_heads // mixer.num_key_heads * mixer.value_dim
    parts = weight.unflatten(0, (mixer.num_key_heads, -1)).split((mixer.key_dim, mixer.key_dim, size, size), 1)
    *mixed, gate = (part.flatten(0, 1) for part in parts)
    return {"in_proj_qkv": torch.cat(mixed), "in_proj_z": gate}


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


def _falcon_projection(weight: Tensor, config: DecoderConfig) -> Tensor:
    """Multiply the rows of gates, values, keys, queries and steps."""
    mixer = mixer_of(config)
    values, keys = mixer.num_heads * mixer.value_dim, mixer.num_key_heads * mixer.key_dim
    rows = weight.float().split((values, values, keys, keys, mixer.num_heads))
    return torch.cat([part * mixer.in_multiplier * m for part, m in zip(rows, mixer.multipliers, strict=True)])


def _falcon_embedding(weight: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
    output = {"lm_head": weight.float() / config.logits_divisor} if config.tied_embeddings else {}
    return {"model.embed_tokens": weight.float() * config.embedding_multiplier, **output}


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
    "mlp.experts.gate_up_proj_bias": _gates_and_ups("mlp.experts.{}_proj.bias"),
    "mlp.experts.gate_up_proj": _gates_and_ups("mlp.experts.{}_proj.weight"),
    "mlp.experts.down_proj_bias": _renamed("mlp.experts.down_proj.bias"),
    "mlp.experts.down_proj": lambda weight, config: {"mlp.experts.down_proj.weight": _output_first(weight, config)},
    "e_score_correction_bias": lambda weight, config: {"e_score_correction.bias": weight.flatten()},
}
_MIXTURE = GGUFFamily("", changes=_EXPERTS, layers={"mixture": _in_every_layer}, mixture={"weights_sum_to_one": True})
_CORRECTED = {
    "weights_sum_to_one": STORED, "weights_factor": STORED, "score": STORED, "has_score_correction": True,
    "num_groups": STORED, "groups_per_token": STORED, "shared_intermediate_size": _whole_shared_experts,
}
_QWEN_EXPERTS = {"weights_sum_to_one": True, "shared_intermediate_size": STORED, "shared_gate": True}
_MAMBA: dict[str, Change] = {
    "mamba.A_log": lambda weight, config: _decay(weight, config)[:, None],
    "mamba.D": lambda weight, config: weight[:, None],
    "mamba.dt_bias": _renamed("mamba.dt_proj.bias"), "mamba.conv1d.weight": _taps,
    "mamba.norm.weight": lambda weight, config: weight.unflatten(0, (mixer_of(config).num_key_heads, -1)),
}
_MAMBA2 = {
    "activation": "silu", "convolution_bias": True, "in_bias": False, "out_bias": False, "norm": "after_gate",
    "step_limits": (0.0, math.inf),
}
_DELTA_RULE = GGUFFamily(
    "qwen3next",
    changes={
        **_EXPERTS, "linear_attn.A_log": _decay, "linear_attn.dt_bias": _renamed("linear_attn.dt_proj.bias"),
        "linear_attn.conv1d.weight": _taps, "in_proj_qkvz": _ungrouped,
        "linear_attn.norm.weight": lambda weight, config: weight, "norm.weight": plus_one,
    },
    metadata=_delta_rule_metadata,
    fixed={"norm_weight_offset": 1.0, "qk_norm": "head", "attention_gate": True, "norm_eps": 1e-6},
    layers={"mixer": STORED, "has_attention": STORED, "mixture": _in_every_layer}, mixture=_QWEN_EXPERTS,
    mixer={"value_dim": lambda config: mixer_of(config).key_dim, "fused_projections": True},
)
_QWEN3_5 = _DELTA_RULE._replace(
    architecture="qwen35moe",
    changes={
        **_DELTA_RULE.changes, "linear_attn.A_log": lambda weight, config: _tiled(_decay(weight, config), config),
        "linear_attn.dt_bias": lambda weight, config: {"linear_attn.dt_proj.bias": _tiled(weight, config)},
        "linear_attn.conv1d.weight": lambda weight, config: _values_tiled(_taps(weight, config), config),
        "linear_attn.in_proj_qkv": _values_tiled, "linear_attn.in_proj": _tiled,
        "linear_attn.out_proj": lambda weight, config: _tiled(weight, config, 1),
    },
    mixer={**_DELTA_RULE.mixer, "fused_projections": False}, columns=frozenset({"linear_attn.out_proj"}),
)
_GRANITE_HYBRID = GGUFFamily(
    "granitehybrid",
    changes={
        **_EXPERTS, **_MAMBA, "mlp.gate_up_proj": _rows_split("mlp.{}_proj"),
        "mlp.shared_expert.gate_up_proj": _rows_split("mlp.shared_expert.{}_proj"), "mlp.down_proj": _renamed("mlp.down_proj"),
    },
    metadata=_granite_metadata, shown=LLAMA.shown | {"fused_gate_up"}, pairs_neighbors=True, has_rope=_has_any_rope,
    layers={"mixer": STORED, "has_attention": STORED},
    mixer={**_MAMBA2, "value_dim": lambda config: 2 * config.hidden_size / mixer_of(config).num_heads},
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
        "mixture": _in_every_layer, "num_kv_heads": STORED, "intermediate_size": STORED, "values_are_keys": STORED,
        "head_dim": _gemma4_head_dim, "kv_from_layer": _gemma4_kv_source, "window": _some_window,
    },
    mixture={
        "weights_sum_to_one": True, "activation": "gelu_tanh", "beside_mlp": True,
        "router_norm_eps": lambda config: config.norm_eps,
    },
    optional=frozenset({"experts"}),
)

GGUF_MIXTURES: dict[str, GGUFFamily] = {
    "mixtral": _MIXTURE._replace(architecture="llama", pairs_neighbors=True, scalings=LLAMA.scalings),
    "qwen3_moe": _MIXTURE._replace(architecture="qwen3moe", fixed={"qk_norm": "head"}),
    "qwen2_moe": _MIXTURE._replace(
        architecture="qwen2moe", shown=frozenset({"qkv_bias"}), fixed={"tied_embeddings": False, "head_dim": all_heads},
        mixture={**_QWEN_EXPERTS, "weights_sum_to_one": False},
    ),
    "olmoe": _MIXTURE._replace(
        architecture="olmoe", shown=frozenset(), mixture={"weights_sum_to_one": False},
        fixed={
            "qk_norm": "projection", "tied_embeddings": False, "head_dim": all_heads,
            "num_kv_heads": lambda config: config.num_heads,
        },
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
    ),
    "glm4_moe": _MIXTURE._replace(
        architecture="glm4moe", shown=_TIED | {"qkv_bias", "qk_norm"}, layers={"mixture": _after_dense_layers},
        mixture=_CORRECTED,
    ),
    "ernie4_5_moe": _MIXTURE._replace(
        architecture="ernie4_5-moe", pairs_neighbors=True, layers={"mixture": _after_dense_layers},
        mixture={"weights_sum_to_one": True, "has_score_correction": True, "shared_intermediate_size": STORED},
    ),
    "minimax_m2": _MIXTURE._replace(
        architecture="minimax-m2", shown=frozenset(), fixed={"qk_norm": "projection", "tied_embeddings": False},
        mixture={"weights_sum_to_one": True, "has_score_correction": True, "score": STORED},
    ),
    "deepseek_v3": _MIXTURE._replace(
        architecture="deepseek2",
        changes={
            **_EXPERTS, "kv_b_proj": _keys_and_values, "q_a_proj": _for_norm_eps,
            "kv_a_proj_with_mqa": _latents_for_norm_eps,
        },
        no_adapter=frozenset({"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "lm_head"}),
        metadata=_latent_metadata, shown=_TIED, fixed={"latent": _readable_latent, "attention_scale": _latent_scale},
        pairs_neighbors=True, scalings=frozenset({"default", "yarn"}), layers={"mixture": _after_dense_layers},
        mixture=_CORRECTED,
    ),
    "llama4_text": _MIXTURE._replace(
        architecture="llama4", pairs_neighbors=True, scalings=LLAMA.scalings,
        layers={
            "mixture": _in_every_nth_layer,
            "rope": lambda config, layer: config.layers[0].rope if _is_turned(config, layer) else _GROWING_QUERIES,
            "chunk": lambda config, layer: 8192 if _is_turned(config, layer) else None,
            "unit_qk": lambda config, layer: _is_turned(config, layer) and _mixture(config).num_experts != 128,
        },
        mixture={
            "weights_sum_to_one": False, "score": "sigmoid", "scales_input": True,
            "shared_intermediate_size": lambda config: _mixture(config).intermediate_size,
        },
    ),
    "qwen3_next": _DELTA_RULE,
    "qwen3_5_text": _QWEN3_5._replace(architecture="qwen35", mixture={}),
    "qwen3_5_moe_text": _QWEN3_5,
    "lfm2": GGUFFamily(
        "lfm2", changes={"conv.conv.weight": _taps}, shown=_TIED, fixed={"qk_norm": "head", "head_dim": all_heads},
        layers={"mixer": STORED, "has_attention": STORED}, mixer={"bias": False},
    ),
    "granitemoehybrid": _GRANITE_HYBRID._replace(
        architecture_of=_granite_architecture,
        numbers=GGUF_FAMILIES["granite"].numbers,
        layers={**_GRANITE_HYBRID.layers, "mixture": _in_every_layer},
        mixture={"weights_sum_to_one": True, "shared_intermediate_size": STORED},
        optional=frozenset({"experts", "recurrent layers"}),
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
    ),
    "nemotron_h": GGUFFamily(
        "nemotron_h", changes={**_EXPERTS, **_MAMBA, "post_attention_layernorm": _renamed("input_layernorm")},
        architecture_of=lambda config: "nemotron_h" if config.mixture is None else "nemotron_h_moe",
        metadata=lambda model: {"attention.layer_norm_epsilon": float(model.config.norm_eps)},
        shown=_TIED | {"mlp_bias"}, fixed={"activation": "relu2"}, has_rope=lambda config, layer: False,
        layers={
            "mixer": STORED, "has_attention": STORED, "has_mlp": STORED,
            "mixture": lambda config, layer: config.mixture if config.layers[layer].has_mlp else None,
        },
        mixture={**_CORRECTED, "activation": "relu2", "score": "sigmoid", "shared_intermediate_size": STORED},
        mixer=_MAMBA2, optional=frozenset({"experts"}),
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
}
# fmt: on

# Families that llama.cpp computes differently: how.
GGUF_REFUSED = {
    "phimoe": "it has RMSNorm instead of LayerNorm, and experts' weights from a softmax instead of sparsemixer",
    "ministral": "its architecture for Mistral's models has no sliding window",
}
