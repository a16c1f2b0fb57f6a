"""Rows of families with recurrent layers, of Gemma 4, whose layers have several sizes, and of Gemma 3n with several
streams.

Source: llama.cpp, conversion/*.py (tensors) and src/models/*.cpp (metadata, and what an architecture computes).

Shapes: G key heads, H value heads.
"""

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from lean_ft.gguf.header import Facts
from lean_ft.gguf.rows import (
    CORRECTED_EXPERTS,
    EXPERTS,
    GRANITE_NUMBERS,
    LOCAL_EXPERTS,
    PLUS_ONE,
    USUAL_EXPERTS,
    Change,
    GGUFFamily,
    Step,
    StoredAs,
    always,
    attention_bias,
    biases,
    qwen_config,
    renamed,
    scaled,
    times,
)

if TYPE_CHECKING:
    from lean_ft.models import Decoder, DecoderConfig


def mixer_of(config: "DecoderConfig") -> Any:
    """The configuration of the recurrent layers; None if there are none."""
    return next((layer.mixer for layer in config.layers if layer.mixer is not None), None)


def _kinds(facts: Facts, other: str = "linear_attention") -> list[str]:
    """The type of each layer: attention in those with key heads."""
    return ["full_attention" if number else other for number in facts.per_layer("attention.head_count_kv")]


# The gated delta rule.


def _tiled(config: "DecoderConfig", dim: int = 0, first: int = 0) -> tuple[Step, ...]:
    """Key head h belongs to value heads h, h + G, ... in the file, and to H / G neighbors here."""
    mixer = mixer_of(config)
    return (("tile", dim, first, mixer.num_key_heads, mixer.num_heads // mixer.num_key_heads),)


def _values_tiled(config: "DecoderConfig") -> tuple[Step, ...]:
    """The same for the values after queries and keys."""
    return _tiled(config, first=2 * mixer_of(config).num_key_heads * mixer_of(config).key_dim)


def _ungrouped(config: "DecoderConfig") -> StoredAs:
    """Turn query, key, values and gates of each key head into all queries, all keys, all values, and all gates."""
    mixer = mixer_of(config)
    keys, values = mixer.num_key_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
    sizes = (mixer.key_dim, mixer.key_dim, *[values // mixer.num_key_heads] * 2)
    steps = (("ungroup", mixer.num_key_heads, *sizes), ("split", 0, 2 * keys + values, values))
    return StoredAs(steps, ("in_proj_qkv", "in_proj_z"))


def _delta_rule_metadata(model: "Decoder") -> dict[str, Any]:
    recurrent = [layer.mixer is not None for layer in model.config.layers]
    return {
        "attention.head_count_kv": model.config.num_kv_heads,
        "attention.recurrent_layers": recurrent,
        "full_attention_interval": recurrent.index(False) + 1 if False in recurrent else len(recurrent) + 1,
    }


def _with_sections(model: "Decoder") -> dict[str, Any]:
    """llama.cpp needs the sections of time, height and width, which are equal for text, even if config.json has
    none."""
    config = model.config
    fraction = next((layer.rope.rotary_fraction for layer in config.layers if layer.rope is not None), 1.0)
    frequencies = int(config.head_dim * fraction) // 2
    sections = [(frequencies + 2) // 3, (frequencies + 1) // 3, frequencies // 3, 0]
    return {**_delta_rule_metadata(model), "rope.dimension_sections": sections}


def _delta_rule_config(facts: Facts) -> dict[str, Any]:
    period = facts.count("full_attention_interval", 4, least=1)
    recurrent = [(i + 1) % period != 0 for i in range(facts.num_layers)]
    if "attention.recurrent_layers" in facts:
        recurrent = facts.per_layer("attention.recurrent_layers")
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "rms_norm_eps": 1e-6,
        "linear_value_head_dim": facts.count("ssm.state_size"),
    }


# Mamba.


def _granite_architecture(config: "DecoderConfig") -> str:
    return "granitehybrid" if config.has_states else "granite" if config.mixture is None else "granitemoe"


def _granite_metadata(model: "Decoder") -> dict[str, Any]:
    size = {} if model.config.mixture is None else {"feed_forward_length": model.config.mixture.intermediate_size}
    return {"rope.scaling.finetuned": any(layer.rope is not None for layer in model.config.layers), **size}


def _granite_config(facts: Facts) -> dict[str, Any]:
    shared = "expert_shared_feed_forward_length"  # files of dense models may have it too
    has_experts, has_states = "expert_count" in facts, "ssm.inner_size" in facts
    return {
        **(_granite_states(facts) if has_states else {"attention_bias": facts.has("attn_q.bias")}),
        **({} if has_experts else {"num_local_experts": 0, "num_experts_per_tok": 0}),
        "shared_intermediate_size": facts.count(shared if shared in facts else "feed_forward_length"),
        "layer_types": _kinds(facts),
        "position_embedding_type": "rope" if facts.count("rope.scaling.finetuned", 1) else "nope",
    }


def _granite_states(facts: Facts) -> dict[str, Any]:
    """llama.cpp takes twice the hidden size for the size of all heads together."""
    return {"mamba_d_head": 2 * facts.count("embedding_length") // facts.count("ssm.time_step_rank", least=1)}


def _bamba_config(facts: Facts) -> dict[str, Any]:
    indices = [i for i, kind in enumerate(_kinds(facts)) if kind == "full_attention"]
    return {**_granite_states(facts), "attn_layer_indices": indices}


def _falcon_projection(config: "DecoderConfig") -> StoredAs:
    """Multiply the rows of gates, values, keys, queries and steps."""
    mixer = mixer_of(config)
    values, keys = mixer.num_heads * mixer.value_dim, mixer.num_key_heads * mixer.key_dim
    rows = zip((values, values, keys, keys, mixer.num_heads), config.own.multipliers, strict=True)
    return StoredAs(scaled(*(x for size, factor in rows for x in (size, factor * config.own.in_multiplier))))


def _falcon_embedding(config: "DecoderConfig") -> StoredAs:
    factors = config.embedding_multiplier, 1 / config.logits_divisor
    if not config.tied_embeddings or factors[0] == factors[1]:
        return StoredAs(scaled(factors[0]))
    return StoredAs((("twice", *factors),), ("model.embed_tokens", "lm_head"))


def _falcon_key_factor(config: "DecoderConfig") -> float:
    return config.own.attention_multipliers[0] * (config.attention_scale or 0.0) * config.head_dim**0.5


def _falcon_config(facts: Facts) -> dict[str, Any]:
    norm = {"mamba_rms_norm": True, "mamba_norm_before_gate": False} if facts.has("ssm_norm.weight") else {}
    inner, heads = facts.count("ssm.inner_size"), facts.count("ssm.time_step_rank", least=1)
    return {"mamba_d_ssm": inner, "mamba_d_head": inner // heads, "mlp_bias": biases(facts)["mlp_bias"], **norm}


def _nemotron_config(facts: Facts) -> dict[str, Any]:
    sizes, kinds = facts.per_layer("feed_forward_length"), _kinds(facts)
    for i, size in enumerate(sizes):
        if size or facts.has("ffn_gate_inp.weight", i):
            kinds[i] = "moe" if facts.has("ffn_gate_inp.weight", i) else "mlp"
    return {
        "layers_block_type": kinds,
        "mamba_head_dim": facts.count("ssm.inner_size") // facts.count("ssm.time_step_rank", least=1),
        "mlp_bias": biases(facts)["mlp_bias"],
    }


# Gemma 4.


def _gemma4_metadata(model: "Decoder") -> dict[str, Any]:
    config = model.config
    sizes = {bool(layer.window): config.head_dim_of(i) for i, layer in enumerate(config.layers)}
    full, windowed = sizes.get(False, config.head_dim), sizes.get(True, config.head_dim)
    return {
        "attention.shared_kv_layers": sum(layer.kv_from_layer is not None for layer in config.layers),
        "embedding_length_per_layer_input": config.own.layer_input_dim,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), full),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), windowed
        ),
        "final_logit_softcapping": float(config.logits_softcap or 0.0),  # llama.cpp's default is 30
    }


def _gemma4_config(facts: Facts) -> dict[str, Any]:
    """Layers without a window have other heads, and may use their keys as values. llama.cpp opens no file without a
    window."""
    facts.count("attention.sliding_window", least=1)
    windowed = [bool(one) for one in facts.per_layer("attention.sliding_window_pattern")]
    sizes, num_shared = facts.per_layer("feed_forward_length"), facts.count("attention.shared_kv_layers", 0)
    heads = dict(zip(reversed(windowed), reversed(facts.per_layer("attention.head_count_kv")), strict=True))
    full = [i for i, has_window in enumerate(windowed[: facts.num_layers - num_shared]) if not has_window]
    input_dim = facts.count("embedding_length_per_layer_input", 0)
    return {
        "head_dim": facts.count("attention.key_length_swa"),
        "global_head_dim": facts.count("attention.key_length"),
        "num_key_value_heads": heads.get(True, heads.get(False)),
        "num_global_key_value_heads": heads.get(False),
        "attention_k_eq_v": bool(full) and not any(facts.has("attn_v.weight", i) for i in full),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": len(set(sizes)) > 1,
        "hidden_size_per_layer_input": input_dim,
        **({"vocab_size_per_layer_input": facts.num_rows("token_embd.weight")} if input_dim else {}),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "enable_moe_block": "expert_count" in facts,
    }


# Gemma 3n.

_PROJECTIONS = "altup_projections", "altup_unembed_projections"


def _gemma3n_metadata(model: "Decoder") -> dict[str, Any]:
    streams, cutoffs = model.config.own.streams, [layer.own.gate_sparsity for layer in model.config.layers]
    return {
        **_gemma4_metadata(model),
        "altup.active_idx": streams.active,
        "altup.num_inputs": streams.number,
        "activation_sparsity_scale": [NormalDist().inv_cdf(share) if share else -math.inf for share in cutoffs],
    }


def _gemma3n_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp opens no file without a window. Its sizes are the defaults of absent fields, and its numbers of layers
    are fixed."""
    facts.count("attention.sliding_window", least=1)
    if facts.num_layers > 20 and facts.pattern(5)[18:20] != [True, False]:
        raise facts.wrong("attention.sliding_window_pattern", "a window in layer 18 and none in layer 19")
    return {
        "num_kv_shared_layers": max(facts.num_layers - 20, 0),
        "activation_sparsity_pattern": [0.95 if i < 10 else 0.0 for i in range(facts.num_layers)],
        "vocab_size_per_layer_input": facts.num_rows("token_embd.weight"),
    }


def _cutoff_differs(config: "DecoderConfig") -> str:
    has_cutoff = any(layer.own.gate_sparsity for layer in config.layers)
    return "llama.cpp divides the squares of I gates by I - 1 and this model by I" if has_cutoff else ""


def _gemma3n_unused(config: "DecoderConfig") -> dict[str, tuple[int, ...]]:
    """Keys and values of layers that use those of others."""
    matrix = config.num_kv_heads * config.head_dim, config.hidden_size
    shapes = {"attn_k.weight": matrix, "attn_v.weight": matrix, "attn_k_norm.weight": (config.head_dim,)}
    shared = [i for i, layer in enumerate(config.layers) if layer.kv_from_layer is not None]
    return {f"blk.{i}.{name}": shape for i in shared for name, shape in shapes.items()}


# A table: related fields share a line.
# fmt: off
_TAPS = StoredAs((("squeeze", 1),))
_MAMBA: dict[str, Change] = {
    "mamba.A_log": StoredAs((("decay",), ("reshape", -1, 1))), "mamba.D": StoredAs((("reshape", -1, 1),)),
    "mamba.dt_bias": renamed("mamba.dt_proj.bias"), "mamba.conv1d.weight": _TAPS,
    "mamba.norm.weight": lambda config: StoredAs((("reshape", mixer_of(config).num_key_heads, -1),)),
}
_MAMBA_FIELDS = {
    "ssm.time_step_rank": "mamba_n_heads", "ssm.group_count": "mamba_n_groups", "ssm.state_size": "mamba_d_state",
    "ssm.conv_kernel": "mamba_d_conv",
}
_DELTA_RULE_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads", "ssm.state_size": "linear_key_head_dim",
}
_DELTA_RULE = GGUFFamily(
    "qwen3next", "Qwen3Next",
    changes={
        **EXPERTS, "linear_attn.A_log": StoredAs((("decay",),)),
        "linear_attn.dt_bias": renamed("linear_attn.dt_proj.bias"),
        "linear_attn.conv1d.weight": _TAPS, "in_proj_qkvz": _ungrouped,
        "linear_attn.norm.weight": StoredAs(), "norm.weight": PLUS_ONE,
    },
    metadata=_delta_rule_metadata, fields=USUAL_EXPERTS | _DELTA_RULE_FIELDS,
    config=lambda facts: {**qwen_config(facts), **_delta_rule_config(facts)},
)
_QWEN3_5 = _DELTA_RULE._replace(
    architecture="qwen35moe", class_name="Qwen3_5Moe", metadata=_with_sections,
    changes={
        **_DELTA_RULE.changes, "linear_attn.A_log": lambda config: StoredAs((("decay",), *_tiled(config))),
        "linear_attn.dt_bias": lambda config: StoredAs(_tiled(config), ("linear_attn.dt_proj.bias",)),
        "linear_attn.conv1d.weight": lambda config: StoredAs((*_TAPS.steps, *_values_tiled(config))),
        "linear_attn.in_proj_qkv": lambda config: StoredAs(_values_tiled(config)),
        "linear_attn.in_proj": lambda config: StoredAs(_tiled(config)),
        "linear_attn.out_proj": lambda config: StoredAs(_tiled(config, 1)),
    },
)
_GRANITE_HYBRID = GGUFFamily(
    "granitehybrid", "GraniteMoeHybrid",
    changes={
        **EXPERTS, **_MAMBA, "mlp.gate_up_proj": StoredAs((("split", 0),), ("mlp.gate_proj", "mlp.up_proj")),
        "mlp.shared_expert.gate_up_proj": StoredAs(
            (("split", 0),), ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
        ),
        "mlp.down_proj": renamed("mlp.down_proj"),
    },
    metadata=_granite_metadata, fields=LOCAL_EXPERTS | _MAMBA_FIELDS, config=_granite_config, pairs_neighbors=True,
    numbers=GRANITE_NUMBERS, architecture_of=_granite_architecture,
)
_GRANITE_MOE = _GRANITE_HYBRID._replace(
    architecture="granitemoe", class_name="GraniteMoeShared", config=attention_bias, architecture_of=None,
    fields=LOCAL_EXPERTS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
)
_GEMMA3N = GGUFFamily(
    "gemma3n", "Gemma3n",
    changes={
        "correct_output_scale": renamed("correct_output_scale.weight"),
        "embed_tokens_per_layer": lambda config: StoredAs((("rows", config.vocab_size),
            ) * (config.own.layer_input_vocab_size != config.vocab_size)),
        **{f"{name}.{i}": StoredAs((("part", i),), (name,)) for name in _PROJECTIONS for i in range(3)},
    },
    differs=_cutoff_differs, metadata=_gemma3n_metadata, config=_gemma3n_config, unused=_gemma3n_unused,
    windows=always, period=5, scaled_windows=False,
    scalings=frozenset({"default", "linear"}),
    not_stored=frozenset({"coefficient_limit", "layer_input_vocab_size"}),  # of training; rows are added
    no_adapter=frozenset({*_PROJECTIONS, "modality_router", "per_layer_model_projection", "embed_tokens_per_layer"}),
)
_GEMMA4 = GGUFFamily(
    "gemma4", "Gemma4",
    changes={
        "layer_scalar": renamed("layer_scalar.weight"),
        "mixture.router.proj": renamed("router.proj"), "mixture.router.scale": renamed("router.proj.scale"),
        "mixture.router.per_expert_scale": renamed("experts.down_proj.scale"),
        "mixture.experts.gate_up_proj": renamed("experts.gate_up_proj.weight"),
        "mixture.experts.down_proj": renamed("experts.down_proj.weight"),
    },
    metadata=_gemma4_metadata, config=_gemma4_config, fields={**USUAL_EXPERTS, "expert_used_count": "top_k_experts"},
    scalings=frozenset({"default", "proportional"}), windows=always, scaled_windows=False,
    no_adapter=frozenset({"per_layer_model_projection", "embed_tokens_per_layer"}),
)

_LFM2 = GGUFFamily(
    "lfm2", "Lfm2", changes={"conv.conv.weight": _TAPS}, whole_heads=True, fields={"shortconv.l_cache": "conv_L_cache"},
    norm_eps=("attention.layer_norm_rms_epsilon", "norm_eps"),
    config=lambda facts: {"block_auto_adjust_ff_dim": False, "layer_types": _kinds(facts, "conv")},
)

HYBRIDS = {
    "qwen3_next": _DELTA_RULE,
    "qwen3_5_text": _QWEN3_5._replace(
        architecture="qwen35", class_name="Qwen3_5", fields=_DELTA_RULE_FIELDS, config=_delta_rule_config,
    ),
    "qwen3_5_moe_text": _QWEN3_5,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2._replace(
        architecture="lfm2moe", class_name="Lfm2Moe", changes={**EXPERTS, **_LFM2.changes},
        fields={**_LFM2.fields, **USUAL_EXPERTS, "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": ""},
    ),
    "granitemoehybrid": _GRANITE_HYBRID,
    "granitemoeshared": _GRANITE_MOE,
    "granitemoe": _GRANITE_MOE,  # read as granitemoeshared, which computes the same
    "bamba": _GRANITE_HYBRID._replace(
        class_name="Bamba", fields=_MAMBA_FIELDS, config=_bamba_config, numbers={}, architecture_of=None,
    ),
    "falcon_h1": GGUFFamily(
        "falcon-h1", "FalconH1",
        changes={
            **_MAMBA, "model.embed_tokens": _falcon_embedding,
            "lm_head": times(lambda config: 1.0 / config.logits_divisor),
            "q_proj": times(lambda config: config.own.attention_multipliers[0]), "k_proj": times(_falcon_key_factor),
            "v_proj": times(lambda config: config.own.attention_multipliers[0]),
            "o_proj": times(lambda config: config.own.attention_multipliers[1]),
            "mlp.gate_proj": times(lambda config: config.own.mlp_multipliers[0]),
            "mlp.down_proj": times(lambda config: config.own.mlp_multipliers[1]),
            "mamba.in_proj": _falcon_projection, "mamba.out_proj": times(lambda config: config.own.out_multiplier),
        },
        fields=_MAMBA_FIELDS, config=_falcon_config, no_adapter=frozenset({"model.embed_tokens"}),
        not_stored=frozenset({  # the weights have the multipliers
            "attention_scale", "attention_multipliers", "mlp_multipliers", "embedding_multiplier", "logits_divisor",
            "in_multiplier", "multipliers", "out_multiplier", "tied_embeddings",
        }),
    ),
    "nemotron_h": GGUFFamily(
        "nemotron_h", "NemotronH",
        changes={
            **EXPERTS, **_MAMBA, "post_attention_layernorm": renamed("input_layernorm"),
            "mlp.experts.gate_up_proj": renamed("mlp.experts.up_proj.weight"),  # without gates
        },
        architecture_of=lambda config: "nemotron_h" if config.mixture is None else "nemotron_h_moe",
        metadata=lambda model: {"attention.layer_norm_epsilon": float(model.config.norm_eps)}, config=_nemotron_config,
        norm_eps=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        fields=CORRECTED_EXPERTS | {
            "ssm.time_step_rank": "mamba_num_heads", "ssm.group_count": "n_groups", "ssm.state_size": "ssm_state_size",
            "ssm.conv_kernel": "conv_kernel",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        },
    ),
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,  # read as gemma4_text, which computes the same
}
# fmt: on
