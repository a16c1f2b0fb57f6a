"""Rows of families with experts and latent attention.

Source: llama.cpp, conversion/*.py (tensors) and src/models/*.cpp (metadata, and what an architecture computes).

Shapes: E experts, I intermediate features of an expert, D features.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lean_ft.gguf.header import Facts
from lean_ft.gguf.rows import LLAMA3_SCALINGS, Change, GGUFFamily, Step, StoredAs, always, biases

if TYPE_CHECKING:
    from lean_ft.models import Decoder, DecoderConfig
    from lean_ft.models.config import LatentConfig, MixtureConfig

_LATENT_NORM_EPS = 1e-6  # of norms of latents, whatever config.json says
_DEPTHS_WITHOUT_QUERY_LATENT = (26, 27)  # llama.cpp reads no query latent in models with so many layers


def mixture_of(config: "DecoderConfig") -> "MixtureConfig":
    assert config.mixture is not None
    return config.mixture


def renamed(name: str) -> StoredAs:
    return StoredAs(places=(name,))


def scaled(*factors: float) -> tuple[Step, ...]:
    """The step that multiplies by a factor, or by one for each stretch of rows: size, factor, size, factor, ..."""
    if all(factor == 1.0 for factor in factors[-1::-2]):
        return ()
    return (("multiply" if len(factors) == 1 else "multiply_rows", *factors),)


def times(factor: Callable[["DecoderConfig"], float]) -> Change:
    return lambda config: StoredAs(scaled(factor(config)))


# Experts.


def _gates_and_ups(places: str, is_bias: bool = False) -> Change:
    """Split matrices (E, 2 * I, D) or biases (E, 2 * I) of experts."""

    def change(config: "DecoderConfig") -> StoredAs:
        mixture = mixture_of(config)
        steps: tuple[Step, ...] = (("transpose",),) if mixture.input_first and not is_bias else ()
        if not mixture.gated:
            return StoredAs(steps, (places.format("up"),))
        split = ("unzip", 1) if mixture.gates_interleaved else ("split", 1, *[mixture.intermediate_size] * 2)
        return StoredAs((*steps, split), (places.format("gate"), places.format("up")))

    return change


def _down(config: "DecoderConfig") -> StoredAs:
    return StoredAs((("transpose",),) if mixture_of(config).input_first else (), ("mlp.experts.down_proj.weight",))


def qwen_config(facts: Facts) -> dict[str, Any]:
    shared = facts.count("expert_shared_feed_forward_length", 0)
    return {"shared_expert_intermediate_size": shared} if shared else {}


def _corrected_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp needs a shared expert."""
    return {"n_shared_experts": max(1, facts.count("expert_shared_count", 0)), "num_nextn_predict_layers": 0}


def _gpt_oss_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp opens no file without a window. Published models do not round the bounds of yarn's frequencies."""
    facts.count("attention.sliding_window", least=1)
    return {"rope_more": {"truncate": False}} if facts.values.get("rope.scaling.type") == "yarn" else {}


# Latent attention.


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
    if rope is not None and rope.scaling == "yarn":
        # llama.cpp multiplies scores by the square of attn_factor * (1 + yarn_log_multiplier * log(factor)).
        scale = ((config.attention_scale or 0.0) / _plain_scale(config)) ** 0.5 / rope.attention_factor
        if not math.isclose(scale, 1.0):
            metadata["rope.scaling.yarn_log_multiplier"] = (scale - 1.0) / math.log(rope.factor)
            metadata["rope.scaling.attn_factor"] = rope.attention_factor
    return metadata


def _latent_config(facts: Facts) -> dict[str, Any]:
    """yarn has a scale of queries and keys, and one of scores, which the file has as its growth with the factor's logarithm."""
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


# A table: related fields share a line.
# fmt: off
EXPERTS: dict[str, Change] = {
    "mlp.experts.gate_up_proj_bias": _gates_and_ups("mlp.experts.{}_proj.bias", is_bias=True),
    "mlp.experts.gate_up_proj": _gates_and_ups("mlp.experts.{}_proj.weight"),
    "mlp.experts.down_proj_bias": renamed("mlp.experts.down_proj.bias"),
    "mlp.experts.down_proj": _down,
    "e_score_correction_bias": StoredAs((("reshape", -1),), ("e_score_correction.bias",)),
}
def _experts(count: str = "num_experts", used: str = "num_experts_per_tok", size: str = "moe_intermediate_size") -> dict[str, str]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": size}


USUAL_EXPERTS, LOCAL_EXPERTS = _experts(), _experts("num_local_experts", size="intermediate_size")
CORRECTED_EXPERTS = _experts("n_routed_experts") | {
    "expert_shared_count": "n_shared_experts", "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "leading_dense_block_count": "first_k_dense_replace",
}
_SCORE = {"expert_gating_func": ""}
_MIXTURE = GGUFFamily("", changes=EXPERTS, fields=USUAL_EXPERTS)

MIXTURES = {
    "mixtral": _MIXTURE._replace(
        architecture="llama", class_name="Mixtral", fields=LOCAL_EXPERTS, pairs_neighbors=True, scalings=LLAMA3_SCALINGS,
    ),
    "qwen3_moe": _MIXTURE._replace(
        architecture="qwen3moe", class_name="Qwen3Moe", config=lambda facts: {**qwen_config(facts), "norm_topk_prob": True},
    ),
    "qwen2_moe": _MIXTURE._replace(
        architecture="qwen2moe", class_name="Qwen2Moe", tied=False, whole_heads=True,
        config=lambda facts: {**qwen_config(facts), "qkv_bias": facts.has("attn_q.bias")},
    ),
    "olmoe": _MIXTURE._replace(
        architecture="olmoe", class_name="Olmoe", tied=False, whole_heads=True,
        fields=_experts(size="intermediate_size") | {"attention.head_count": "num_key_value_heads"},
    ),
    "gpt_oss": _MIXTURE._replace(
        architecture="gpt-oss", class_name="GptOss", changes={**EXPERTS, "sinks": renamed("sinks.weight")},
        fields=LOCAL_EXPERTS, config=_gpt_oss_config, tied=False, windows=always, period=2,
        not_stored=frozenset({"truncate"}),  # llama.cpp rounds; the export says so
    ),
    "glm4_moe": _MIXTURE._replace(
        architecture="glm4moe", class_name="Glm4Moe", fields=CORRECTED_EXPERTS | _SCORE,
        config=lambda facts: {
            **_corrected_config(facts), **biases(facts), "use_qk_norm": facts.has("attn_q_norm.weight"),
        },
    ),
    "ernie4_5_moe": _MIXTURE._replace(
        architecture="ernie4_5-moe", class_name="Ernie4_5_Moe", pairs_neighbors=True,
        fields=_experts("moe_num_experts", "moe_k") | {
            "expert_shared_count": "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
    ),
    "minimax_m2": _MIXTURE._replace(
        architecture="minimax-m2", class_name="MiniMaxM2", fields=LOCAL_EXPERTS | _SCORE, tied=False,
    ),
    "deepseek_v3": _MIXTURE._replace(
        architecture="deepseek2", class_name="DeepseekV3",
        changes={
            **EXPERTS, "kv_b_proj": _keys_and_values, "q_a_proj": times(_norm_factor),
            "kv_a_proj_with_mqa": _latents_and_positions,
        },
        fields=CORRECTED_EXPERTS | _SCORE | {
            "attention.kv_lora_rank": "kv_lora_rank", "attention.value_length_mla": "v_head_dim",
        },
        metadata=_latent_metadata, config=lambda facts: {**_corrected_config(facts), **_latent_config(facts)},
        no_adapter=frozenset({"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "lm_head"}),
        pairs_neighbors=True, scalings=frozenset({"default", "yarn"}),
    ),
    "llama4_text": _MIXTURE._replace(
        architecture="llama4", class_name="Llama4", pairs_neighbors=True, scalings=LLAMA3_SCALINGS,
        fields=LOCAL_EXPERTS | {
            "feed_forward_length": "intermediate_size_mlp", "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        config=lambda facts: {"use_qk_norm": facts.count("expert_count") != 128},
    ),
}
# fmt: on

# Families that llama.cpp computes differently: how.
REFUSED = {
    "phimoe": "it has RMSNorm instead of LayerNorm, and experts' weights from a softmax instead of sparsemixer",
    "ministral": "its architecture for Mistral's models has no sliding window",
}
