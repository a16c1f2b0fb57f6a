"""Fields of config.json, from the metadata of families with experts, latent attention, recurrent layers, or layers of several sizes.

Source: llama.cpp, conversion/*.py (the way back) and src/models/*.cpp (defaults).
"""

import math
from typing import Any

from lean_ft.gguf.facts import Facts
from lean_ft.gguf.rows import ABSENT, GELU, biases


def experts(
    facts: Facts, count: str = "num_experts", used: str = "num_experts_per_tok", size: str = "moe_intermediate_size"
) -> dict[str, Any]:
    dense = facts.count("feed_forward_length", 0)
    return {
        count: facts.count("expert_count", least=1),
        used: facts.count("expert_used_count", least=1),
        size: facts.count("expert_feed_forward_length", dense, least=1),
    }


def qwen_config(facts: Facts) -> dict[str, Any]:
    fields = {**experts(facts), "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    shared = facts.count("expert_shared_feed_forward_length", 0)
    return fields | ({"shared_expert_intermediate_size": shared} if shared else {})


def local_config(facts: Facts) -> dict[str, Any]:
    return experts(facts, "num_local_experts", size="intermediate_size")


def gpt_oss_config(facts: Facts) -> dict[str, Any]:
    """Published models do not round the bounds of yarn's frequencies. Files do not say so."""
    exact = {"rope_more": {"truncate": False}} if facts.values.get("rope.scaling.type") == "yarn" else {}
    return {**local_config(facts), "attention_bias": True, **exact}


def _corrected_config(facts: Facts) -> dict[str, Any]:
    return {
        **experts(facts, "n_routed_experts"),
        "n_shared_experts": facts.count("expert_shared_count", 0),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "num_nextn_predict_layers": 0,
    }


def glm4_moe_config(facts: Facts) -> dict[str, Any]:
    return {**_corrected_config(facts), **biases(facts), "use_qk_norm": facts.has("attn_q_norm.weight")}


def ernie_config(facts: Facts) -> dict[str, Any]:
    return {
        **experts(facts, "moe_num_experts", "moe_k"),
        "moe_num_shared_experts": facts.count("expert_shared_count", 0),
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0),
        "moe_layer_end_index": facts.num_layers - 1,
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
        "use_bias": False,
    }


def deepseek_config(facts: Facts) -> dict[str, Any]:
    """yarn has a scale of queries and keys, and one of scores, which the file has as its growth with the factor's logarithm."""
    turned = facts.count("rope.dimension_count")
    config = {
        **_corrected_config(facts),
        "head_dim": ABSENT,
        "num_key_value_heads": facts.count("attention.head_count"),
        "q_lora_rank": facts.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": facts.count("attention.key_length_mla") - turned,
        "v_head_dim": facts.count("attention.value_length_mla"),
        "rope_interleave": True,
        "attention_bias": False,
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


def llama4_config(facts: Facts) -> dict[str, Any]:
    return {
        **local_config(facts),
        "intermediate_size_mlp": facts.count("feed_forward_length"),
        "interleave_moe_layer_step": facts.count("interleave_moe_layer_step", 1),
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "use_qk_norm": facts.count("expert_count") != 128,
        "attention_bias": False,
    }


def delta_rule_config(facts: Facts) -> dict[str, Any]:
    period = facts.count("full_attention_interval", 4, least=1)
    by_period = [(i + 1) % period != 0 for i in range(facts.num_layers)]
    recurrent = facts.per_layer("attention.recurrent_layers") if "attention.recurrent_layers" in facts else by_period
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "linear_num_key_heads": facts.count("ssm.group_count"),
        "linear_num_value_heads": facts.count("ssm.time_step_rank"),
        "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_value_head_dim": facts.count("ssm.inner_size") // facts.count("ssm.time_step_rank", least=1),
        "attention_bias": False,
    }


def _kinds(facts: Facts, other: str) -> list[str]:
    """The type of each layer: attention in those with key heads."""
    return ["full_attention" if number else other for number in facts.per_layer("attention.head_count_kv")]


def lfm2_config(facts: Facts) -> dict[str, Any]:
    return {
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "layer_types": _kinds(facts, "conv"),
    }


def _mamba_config(facts: Facts) -> dict[str, Any]:
    heads, inner = facts.count("ssm.time_step_rank", least=1), facts.count("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": facts.count("ssm.group_count"),
        "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_d_conv": facts.count("ssm.conv_kernel"),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_bias": False,
    }


def granite_config(facts: Facts) -> dict[str, Any]:
    has_experts, has_states = "expert_count" in facts, "ssm.inner_size" in facts
    shared = "expert_shared_feed_forward_length"  # files of dense models may have it too
    size = facts.count(shared if shared in facts else "feed_forward_length")
    of_experts = local_config(facts) if has_experts else {"num_local_experts": 0, "num_experts_per_tok": 0}
    return {
        **(_mamba_config(facts) if has_states else {"attention_bias": facts.has("attn_q.bias")}),
        **of_experts,
        "shared_intermediate_size": size,
        "layer_types": _kinds(facts, "linear_attention"),
        "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned", True) else "nope",
    }


def bamba_config(facts: Facts) -> dict[str, Any]:
    indices = [i for i, kind in enumerate(_kinds(facts, "linear_attention")) if kind == "full_attention"]
    return {**_mamba_config(facts), "attn_layer_indices": indices, "mlp_bias": False}


def falcon_config(facts: Facts) -> dict[str, Any]:
    """The file's weights have the multipliers."""
    has_norm = facts.has("ssm_norm.weight")
    norm = {
        "mamba_d_ssm": facts.count("ssm.inner_size"),
        "mamba_rms_norm": has_norm,
        "mamba_norm_before_gate": not has_norm,
    }
    return {**_mamba_config(facts), **norm, "mlp_bias": False, "projectors_bias": False}


def nemotron_config(facts: Facts) -> dict[str, Any]:
    sizes, kinds = facts.per_layer("feed_forward_length"), _kinds(facts, "linear_attention")
    for i, size in enumerate(sizes):
        if size or facts.has("ffn_gate_inp.weight", i):
            kinds[i] = "moe" if facts.has("ffn_gate_inp.weight", i) else "mlp"
    heads = facts.count("ssm.time_step_rank", least=1)
    of_experts: dict[str, Any] = {}
    if "expert_count" in facts:
        of_experts = _corrected_config(facts)
        of_experts["moe_shared_expert_intermediate_size"] = facts.count("expert_shared_feed_forward_length")
    return {
        **of_experts,
        "hidden_act": ABSENT,
        "mlp_hidden_act": "relu2",
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": facts.count("ssm.inner_size") // heads,
        "n_groups": facts.count("ssm.group_count"),
        "ssm_state_size": facts.count("ssm.state_size"),
        "conv_kernel": facts.count("ssm.conv_kernel"),
        "use_conv_bias": True,
        "use_bias": False,
        "attention_bias": False,
        "mlp_bias": facts.has("ffn_up.bias"),
    }


def gemma4_config(facts: Facts) -> dict[str, Any]:
    """Layers without a window have other heads, and may use their keys as values."""
    windowed = facts.per_layer("attention.sliding_window_pattern")
    heads, sizes = facts.per_layer("attention.head_count_kv"), facts.per_layer("feed_forward_length")
    num_shared = facts.count("attention.shared_kv_layers", 0)
    full = [i for i, has_window in enumerate(windowed[: facts.num_layers - num_shared]) if not has_window]
    config = {
        **GELU,
        "attention_bias": False,
        "head_dim": facts.count("attention.key_length_swa"),
        "global_head_dim": facts.count("attention.key_length"),
        "num_key_value_heads": next((n for n, has_window in zip(heads, windowed, strict=True) if has_window), heads[0]),
        "num_global_key_value_heads": next(
            (n for n, has_window in zip(heads, windowed, strict=True) if not has_window), None
        ),
        "attention_k_eq_v": bool(full) and not any(facts.has("attn_v.weight", i) for i in full),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": len(set(sizes)) > 1,
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "enable_moe_block": "expert_count" in facts,
    }
    if config["hidden_size_per_layer_input"]:
        config["vocab_size_per_layer_input"] = facts.num_rows("per_layer_token_embd.weight")
    return config | (experts(facts, used="top_k_experts") if "expert_count" in facts else {})
