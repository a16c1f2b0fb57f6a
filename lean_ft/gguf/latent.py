"""Rows of families with multi-head latent attention.

Source: llama.cpp, conversion/*.py (tensors) and src/models/*.cpp (metadata, and what an architecture computes).
"""

import math
from typing import TYPE_CHECKING, Any

from lean_ft.gguf.header import Facts
from lean_ft.gguf.rows import (
    CORRECTED_EXPERTS,
    EXPERTS,
    MIXTURE,
    SCORE,
    StoredAs,
    corrected_config,
    longrope,
    renamed,
    scaled,
    times,
)

if TYPE_CHECKING:
    from lean_ft.models import Decoder, DecoderConfig
    from lean_ft.models.config import LatentConfig

_LATENT_NORM_EPS = 1e-6  # of norms of latents, whatever config.json says
_DEPTHS_WITHOUT_QUERY_LATENT = (26, 27)  # llama.cpp reads no query latent in models with so many layers


def _latent(config: "DecoderConfig") -> "LatentConfig":
    assert config.latent is not None
    return config.latent


def _keys_and_values(config: "DecoderConfig") -> StoredAs:
    sizes = _latent(config).plain_dim, _latent(config).value_dim
    return StoredAs((("keys_and_values", config.num_heads, *sizes),), ("k_b_proj", "v_b_proj"))


def _norm_factor(config: "DecoderConfig") -> float:
    """Scales a projection to latents so that their norm computes the same with the epsilon of the other norms."""
    return (config.norm_eps / _LATENT_NORM_EPS) ** 0.5


def _latents_and_positions(config: "DecoderConfig") -> StoredAs:
    return StoredAs(scaled(_latent(config).rank, _norm_factor(config), config.head_dim, 1.0))


def _plain_scale(config: "DecoderConfig") -> float:
    return (_latent(config).plain_dim + config.head_dim) ** -0.5


def _latent_metadata(model: "Decoder") -> dict[str, Any]:
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
    if rope is not None and rope.query_growth:
        metadata["attention.temperature_length"] = int(rope.query_growth_positions)
    if rope is not None and rope.scaling == "yarn":
        # llama.cpp multiplies scores by the square of attn_factor * (1 + yarn_log_multiplier * log(factor)).
        scale = ((config.attention_scale or 0.0) / _plain_scale(config)) ** 0.5 / rope.attention_factor
        if not math.isclose(scale, 1.0):
            metadata["rope.scaling.yarn_log_multiplier"] = (scale - 1.0) / math.log(rope.factor)
            metadata["rope.scaling.attn_factor"] = rope.attention_factor
    return metadata


def _latent_config(facts: Facts) -> dict[str, Any]:
    """yarn has a scale of queries and keys, and one of scores, which the file has as its growth with the factor's
    logarithm."""
    turned = facts.count("rope.dimension_count")
    query_rank = facts.count("attention.q_lora_rank", 0) or None
    config: dict[str, Any] = {
        "head_dim": turned,
        "num_key_value_heads": facts.count("attention.head_count"),
        "q_lora_rank": None if facts.num_layers in _DEPTHS_WITHOUT_QUERY_LATENT else query_rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": facts.count("attention.key_length_mla") - turned,
    }
    if "rope.scaling.yarn_log_multiplier" in facts:
        own, log = (
            facts.number("rope.scaling.attn_factor", 1.0),
            math.log(max(facts.number("rope.scaling.factor"), 1.1)),
        )
        of_scores = own * (1.0 + facts.number("rope.scaling.yarn_log_multiplier") * log)
        scales = {"mscale": own * of_scores, "mscale_all_dim": of_scores}
        config["rope_more"] = {name: (scale - 1.0) / (0.1 * log) for name, scale in scales.items()}
    return config


def _deepseek_v2_config(facts: Facts) -> dict[str, Any]:
    if facts.count("expert_group_count", 1) > 1:
        raise facts.wrong("expert_group_count", "1, as it scores a group by two experts, and DeepSeek V2 by one")
    return {**corrected_config(facts), **_latent_config(facts)}


def _youtu_metadata(model: "Decoder") -> dict[str, Any]:
    experts = {"expert_shared_count": 0, "expert_feed_forward_length": model.config.intermediate_size}
    return {**_latent_metadata(model), **experts, "leading_dense_block_count": model.config.num_layers}


def _minicpm3_metadata(model: "Decoder") -> dict[str, Any]:
    config, latent = model.config, _latent(model.config)
    return {
        "attention.q_lora_rank": latent.query_rank or 0,
        "attention.kv_lora_rank": latent.rank,
        "attention.key_length": latent.plain_dim + config.head_dim,
        "attention.value_length": latent.value_dim,
        **longrope(model),
    }


def _minicpm3_config(facts: Facts) -> dict[str, Any]:
    heads, turned = facts.count("attention.head_count", least=1), facts.count("rope.dimension_count")
    return {
        "head_dim": turned,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": facts.count("attention.key_length") - turned,
        "v_head_dim": facts.count("attention.value_length", facts.count("embedding_length") // heads),
    }


# A table: related fields share a line.
# fmt: off
_DEEPSEEK = MIXTURE._replace(
    architecture="deepseek2", class_name="DeepseekV3",
    changes={
        **EXPERTS, "kv_b_proj": _keys_and_values, "q_a_proj": times(_norm_factor),
        "kv_a_proj_with_mqa": _latents_and_positions,
    },
    fields=CORRECTED_EXPERTS | SCORE | {
        "attention.kv_lora_rank": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
    },
    metadata=_latent_metadata, config=lambda facts: {**corrected_config(facts), **_latent_config(facts)},
    no_adapter=frozenset({"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "lm_head"}),
    pairs_neighbors=True, scalings=frozenset({"default", "yarn"}),
)

LATENT = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK._replace(class_name="DeepseekV2", config=_deepseek_v2_config),
    "mistral4": _DEEPSEEK._replace(
        architecture="mistral4", class_name="Mistral4",
        config=lambda facts: {**_DEEPSEEK.config(facts), "head_dim": facts.count("attention.key_length_mla")},
        changes={**_DEEPSEEK.changes, "mlp.experts.gate_up_proj": renamed("mlp.experts.gate_up_proj.weight")},
    ),
    "youtu": _DEEPSEEK._replace(
        class_name="Youtu", metadata=_youtu_metadata, config=_latent_config,
        fields={"attention.kv_lora_rank": "kv_lora_rank", "attention.value_length_mla": "v_head_dim"},
    ),
    "minicpm3": _DEEPSEEK._replace(
        architecture="minicpm3", class_name="MiniCPM3", metadata=_minicpm3_metadata, config=_minicpm3_config,
        changes={name: _DEEPSEEK.changes[name] for name in ("q_a_proj", "kv_a_proj_with_mqa")},
        fields={"attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank"},
        no_adapter=frozenset({"q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"}),
        pairs_neighbors=False, scalings=frozenset({"default", "longrope"}),
    ),
}
# fmt: on
