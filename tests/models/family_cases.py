"""Random tiny checkpoints of each family, as settings of transformers' configs.

A family that is registered has at least one case here; the tests of parity, of folders and of the table of families go
over all of them. To add one: its model_type, and the fields of its config that differ from `SIZES`. An activation in a
family's first case is the only one that the family has; otherwise `test_parity.py` also draws others.
"""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NUM_TOKENS = 40  # length of the test texts, longer than windows and original contexts

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}


def longrope(num_frequencies: int, **settings: Any) -> dict[str, Any]:
    factors = {"short_factor": 1.0, "long_factor": 2.5}
    divisors = {name: [start + 0.3 * i for i in range(num_frequencies)] for name, start in factors.items()}
    return {"rope_type": "longrope", "rope_theta": 300.0, **divisors, **settings}


# Distinct numbers of heads, features and taps.
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
SHARED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_chunk_size": 7}
GEMMA_3N = {"vocab_size_per_layer_input": 90, "head_dim": 12, "sliding_window": 6, "hidden_size_per_layer_input": 7}
GEMMA_3N |= {"laurel_rank": 5, "final_logit_softcapping": 3.0}
GEMMA_4 = {"vocab_size_per_layer_input": 101, "head_dim": 12, "global_head_dim": 20, "sliding_window": 6}

# A table: related fields share a line.
# fmt: off
# (model_type, settings) by name.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biogpt": ("biogpt", {}),
    "biogpt_untied_without_scale": ("biogpt",
        {"layer_norm_eps": 1e-3, "tie_word_embeddings": False, "scale_embedding": False}),
    "falcon": ("falcon", {}),
    "falcon_biases_and_all_heads": ("falcon", {
        "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False,
        "ffn_hidden_size": 24, "layer_norm_epsilon": 1e-3,
    }),
    "llama": ("llama", {}),
    "llama_every_head_its_own_keys": ("llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "llama_one_key_head": ("llama", {"num_key_value_heads": 1, "hidden_size": 36, "num_attention_heads": 3}),
    "llama_wide_heads_tied": ("llama", {"head_dim": 20, "tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "llama_llama3_rope": ("llama", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama_dynamic_rope": ("llama", {
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0},
    }),
    "llama_yarn_rope": ("llama", {"head_dim": 20, "rope_parameters": YARN}),
    "llama_yarn_rope_in_full": ("llama", {
        "head_dim": 32,
        "rope_parameters": {
            **YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.3,
        },
    }),
    "llama_longrope": ("llama", {"rope_parameters": longrope(4, original_max_position_embeddings=24, factor=6.0)}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 20}),
    "mistral_without_window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16}),
    "qwen2_window_above": ("qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2_listed_windows": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": YARN,
    }),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3_tied_biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_window": ("qwen3",
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    "gemma": ("gemma", {"head_dim": 20}),
    "gemma_untied": ("gemma",
        {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma2": ("gemma2", {
        "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma2_without_caps": ("gemma2", {
        "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11, "hidden_activation": "silu",
    }),
    "vaultgemma": ("vaultgemma", {
        "num_hidden_layers": 3, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "vaultgemma_without_caps": ("vaultgemma", {
        "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11, "hidden_activation": "silu",
        "tie_word_embeddings": False,
    }),
    "gemma3_text": ("gemma3_text", {
        "num_hidden_layers": 7, "head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }),
    "gemma3_text_capped": ("gemma3_text", {
        "head_dim": 8, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
        "final_logit_softcapping": 4.0, "attention_bias": True,
    }),
    "gemma3n_text": ("gemma3n_text", {
        **GEMMA_3N, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": [80, 64, 80, 64, 80, 96],
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.5, 0.0, 0.3],
    }),
    "gemma3n_text_other_stream": ("gemma3n_text", {
        **GEMMA_3N, "num_kv_shared_layers": 0, "altup_num_inputs": 3, "altup_active_idx": 2,
        "altup_correct_scale": False,
        "tie_word_embeddings": False, "attention_bias": True, "hidden_activation": "silu", "rms_norm_eps": 1e-3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    }),
    "gemma4_text": ("gemma4_text", {
        **GEMMA_4, "num_hidden_layers": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 7,
        "final_logit_softcapping": 3.0,
    }),
    "gemma4_text_keys_are_values": ("gemma4_text", {
        **GEMMA_4, "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True, "num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0,
        "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "attention_bias": True, "hidden_activation": "silu",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "proportional", "rope_theta": 70.0, "partial_rotary_factor": 0.7}
            | {"factor": 2.0},
        },
    }),
    "gemma4_text_experts": ("gemma4_text", {
        **GEMMA_4, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 7, "attention_k_eq_v": True, "num_global_key_value_heads": 3,
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24,
    }),
    "gemma4_unified_text": ("gemma4_unified_text", {
        **{name: value for name, value in GEMMA_4.items() if name != "vocab_size_per_layer_input"},
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "phi3": ("phi3", {"num_key_value_heads": 6}),
    "phi3_window_tied": ("phi3", {"sliding_window": 9, "tie_word_embeddings": True, "partial_rotary_factor": 0.75}),
    "phi3_longrope": ("phi3",
        {"original_max_position_embeddings": 24, "rope_parameters": longrope(4), "max_position_embeddings": 128}),
    "phi3_longrope_partial": ("phi3", {
        "num_attention_heads": 3, "num_key_value_heads": 1, "original_max_position_embeddings": 64,
        "rope_parameters": longrope(6, partial_rotary_factor=0.75, attention_factor=1.2),
    }),
    "olmo2": ("olmo2", {}),
    "olmo2_tied_biases": ("olmo2",
        {"num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3_window": ("smollm3", {
        "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8,
        "tie_word_embeddings": False, "mlp_bias": True,
    }),
    "granite": ("granite", {
        "attention_multiplier": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    }),
    "granite_tied_biases": ("granite", {
        "attention_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 0.5,
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    }),
    "ministral": ("ministral",
        {"head_dim": 20, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}),
    "ministral3": ("ministral3", {
        "head_dim": 20,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 8, "mscale": 0.8, "mscale_all_dim": 0.3}
        | {"llama_4_scaling_beta": 0.9, "max_position_embeddings": 256},
    }),
    "ministral3_window_tied": ("ministral3", {
        "head_dim": 8, "sliding_window": 9, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "original_max_position_embeddings": 5}
        | {"llama_4_scaling_beta": 0.4},
    }),
    "olmo3": ("olmo3", {
        "num_hidden_layers": 4, "sliding_window": 7,
        "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }),
    "olmo3_listed_windows": ("olmo3", {
        "num_key_value_heads": 6, "attention_bias": True, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
    }),
    "glm4": ("glm4", {"head_dim": 20}),
    "glm4_tied": (
        "glm4",
        {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
        | {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0, "partial_rotary_factor": 1.0}
        },
    ),
    "glm": ("glm", {"head_dim": 20}),
    "glm_linear_rope_tied": (
        "glm",
        {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
        | {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0, "partial_rotary_factor": 1.0}
        },
    ),
    "cwm": ("cwm", {"head_dim": 20, "sliding_window": 7, "rope_parameters": LLAMA3}),
    "cwm_listed_windows_tied": ("cwm", {
        "head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "mlp_bias": True,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu",
    }),
    "hyperclovax": ("hyperclovax", {
        "attention_multiplier": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    }),
    "hyperclovax_tied_biases": ("hyperclovax", {
        "head_dim": 20, "logits_scaling": 0.7, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": YARN,
    }),
    "granite_swa": ("granite_swa", {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "layer_rope_theta": [500.0, 0, 10_000.0], "sliding_window": 7, "attention_multiplier": 0.3,
        "embedding_multiplier": 5.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    }),
    "granite_swa_one_base": ("granite_swa", {
        "sliding_window": 9, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "attention_multiplier": 0.5, "rope_parameters": YARN,
    }),
    "arcee": ("arcee", {"head_dim": 20, "rope_parameters": YARN}),
    "arcee_tied_biases": ("arcee", {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-3,
    }),
    "nanochat": ("nanochat", {"final_logit_softcapping": 3.0}),
    "nanochat_gelu_biases": ("nanochat", {
        "num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu",
        "final_logit_softcapping": None, "rms_norm_eps": 1e-3, "rope_parameters": YARN,
    }),
    "jais2": ("jais2", {"head_dim": 20}),
    "jais2_tied_relu": ("jais2", {
        "num_key_value_heads": 6, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "layer_norm_eps": 1e-2, "hidden_act": "relu", "rope_parameters": LLAMA3,
    }),
    "nemotron": ("nemotron", {}),
    "nemotron_other_rope": ("nemotron", {
        "head_dim": 20, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "norm_eps": 1e-2,
        "hidden_act": "silu", "rope_parameters": {**YARN, "partial_rotary_factor": 0.8},
    }),
    "olmo": ("olmo", {}),
    "olmo_tied_biases": ("olmo", {
        "num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN,
        "hidden_act": "gelu",
    }),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.6}),
    "cohere_untied_biases": ("cohere", {
        "attention_bias": True, "tie_word_embeddings": False, "layer_norm_eps": 1e-2, "logit_scale": 1.5,
        "rope_parameters": YARN, "num_key_value_heads": 6,
    }),
    "stablelm": ("stablelm", {"hidden_size": 96, "qk_layernorm": True}),
    "stablelm_tied_biases": ("stablelm", {
        "hidden_size": 96, "use_qkv_bias": True, "tie_word_embeddings": True, "layer_norm_eps": 1e-2,
        "num_key_value_heads": 6, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
    }),
    "stablelm_parallel": ("stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 1, "hidden_size": 96}),
    "seed_oss": ("seed_oss", {"head_dim": 20}),
    "seed_oss_other_biases": (
        "seed_oss",
        {"head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
        | {"tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 20}),
    "ernie4_5_untied_biases": ("ernie4_5",
        {"head_dim": None, "use_bias": True, "tie_word_embeddings": False, "rope_parameters": YARN}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {
        "head_dim": 20,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 20.0, "factor": 1.0}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0},
    }),
    "hunyuan_v1_dense_tied_biases": ("hunyuan_v1_dense",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "exaone4": ("exaone4", {"num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 3, "head_dim": 20}),
    "exaone4_listed_windows": ("exaone4", {
        "sliding_window": 9, "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
        "rope_parameters": LLAMA3,
    }),
    "exaone4_without_windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "apertus": ("apertus", {"head_dim": 20, "rope_parameters": LLAMA3, "hidden_act": "xielu"}),
    "apertus_tied_biases": (
        "apertus",
        {"num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "cohere2": ("cohere2", {"sliding_window": 7, "sliding_window_pattern": 2, "logit_scale": 0.6}),
    "cohere2_untied_biases": ("cohere2", {
        "num_hidden_layers": 3, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "attention_bias": True,
        "tie_word_embeddings": False, "layer_norm_eps": 1e-2, "logit_scale": 1.5,
    }),
    "cohere2_moe": ("cohere2_moe", {
        "num_hidden_layers": 4, "head_dim": 20, "sliding_window": 7, "sliding_window_pattern": 2, "num_experts": 6,
        "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "logit_scale": 0.6,
    }),
    "cohere2_moe_dense_first": ("cohere2_moe", {
        "num_hidden_layers": 4, "sliding_window": 9, "num_experts": 5, "num_experts_per_tok": 3, "head_dim": 16,
        "first_k_dense_replace": 2, "prefix_dense_intermediate_size": 40, "rms_norm_eps": 1e-3,
        "num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "tie_word_embeddings": False,
        "attention_bias": True, "logit_scale": 1.0,
    }),
    "cohere2_moe_unnormed": ("cohere2_moe", {
        "num_hidden_layers": 3, "sliding_window": 5, "num_experts": 5, "num_experts_per_tok": 3, "head_dim": 16,
        "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "layer_norm_eps": 1e-2, "logit_scale": 0.8,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_sliding_window_pattern": 2,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "starcoder2": ("starcoder2", {"head_dim": 20}),
    "starcoder2_window_untied": ("starcoder2", {
        "sliding_window": 7, "use_bias": False, "tie_word_embeddings": False, "norm_epsilon": 1e-2,
        "hidden_act": "relu2",
        "rope_parameters": YARN,
    }),
    "phi": ("phi", {"num_key_value_heads": 6}),
    "phi_normed_heads": ("phi", {
        "qk_layernorm": True, "layer_norm_eps": 1e-2, "hidden_act": "relu",
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    }),
    "gpt_neox": ("gpt_neox", {"num_attention_heads": 3}),
    "gpt_neox_one_after_the_other": ("gpt_neox", {
        "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-2,
        "hidden_act": "gelu_new", "rotary_pct": 0.5, "rotary_emb_base": 300,
    }),
    "persimmon": ("persimmon", {}),
    "persimmon_tied": ("persimmon", {
        "qk_layernorm": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-2, "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    }),
    "gpt2": ("gpt2", {}),
    "gpt2_unscaled_untied": ("gpt2", {
        "n_inner": 80, "scale_attn_weights": False, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-2,
        "activation_function": "relu",
    }),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode_heads_with_their_own_keys": ("gpt_bigcode", {
        "multi_query": False, "scale_attn_weights": False, "tie_word_embeddings": False, "activation_function": "relu",
    }),
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 80}),
    "opt": ("opt", {"ffn_dim": 80}),
    "opt_untied": ("opt",
        {"ffn_dim": 60, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "mixtral_window_tied": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 12}
        | {"tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 20}
        | {"norm_topk_prob": True},
    ),
    "phimoe": ("phimoe", {
        "num_local_experts": 5, "router_jitter_noise": 0.4, "lm_head_bias": True, "attention_bias": True,
        "sliding_window": None,
        # transformers takes the divisors of short texts for long ones too.
        "rope_parameters": longrope(
            4, original_max_position_embeddings=24, factor=6.0, short_mscale=1.2, long_mscale=1.4
        )
        | {"long_factor": [1.0 + 0.3 * i for i in range(4)]},
    }),
    "phimoe_window_tied": ("phimoe",
        {"num_local_experts": 4, "num_key_value_heads": 6, "sliding_window": 9, "tie_word_embeddings": True}),
    "qwen3_moe_some_layers": ("qwen3_moe", {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 6,
        "attention_bias": True, "tie_word_embeddings": True,
    }),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe_tied_biases": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 6}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 20},
    ),
    "qwen2_moe_some_layers": ("qwen2_moe", {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "use_sliding_window": True,
        "sliding_window": 6, "max_window_layers": 2, "qkv_bias": False, "tie_word_embeddings": True,
    }),
    "glm4_moe": (
        "glm4_moe",
        {"num_hidden_layers": 3, "head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 24, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True}
        | {"num_nextn_predict_layers": 0},
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0}
        | {"moe_intermediate_size": 16, "n_shared_experts": 2, "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"num_nextn_predict_layers": 0},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {
        "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2, "tie_word_embeddings": False,
    }),
    "ernie4_5_moe_some_layers": ("ernie4_5_moe", {
        "num_hidden_layers": 5, "head_dim": 20, "moe_num_experts": 4, "moe_k": 3, "moe_intermediate_size": 16,
        "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 3,
        "moe_layer_interval": 2, "rms_norm_eps": 1e-3, "rope_parameters": YARN,
    }),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "deepseek_v3": ("deepseek_v3", {
        "num_hidden_layers": 3, "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 0, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 14, "q_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 7, "v_head_dim": 12,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    "deepseek_v3_dense": ("deepseek_v3", {
        "num_key_value_heads": 6, "n_routed_experts": 8, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 2,
        "first_k_dense_replace": 2, "kv_lora_rank": 20, "q_lora_rank": None, "qk_rope_head_dim": 4,
        "num_nextn_predict_layers": 0,
        "qk_nope_head_dim": 6, "v_head_dim": 16, "rope_interleave": False, "attention_bias": True,
        "tie_word_embeddings": True,
    }),
    "deepseek_v2": ("deepseek_v2", {
        "num_key_value_heads": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "kv_lora_rank": 14, "q_lora_rank": None, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 6, "v_head_dim": 12, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    "deepseek_v2_groups": ("deepseek_v2", {
        "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
        "kv_lora_rank": 20, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 16,
        "attention_bias": True, "tie_word_embeddings": True,
    }),
    "mistral4": ("mistral4", {
        "num_key_value_heads": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "kv_lora_rank": 14, "q_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 7, "v_head_dim": 12,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 8, "mscale": 0.8, "mscale_all_dim": 0.3}
        | {"llama_4_scaling_beta": 0.9, "max_position_embeddings": 256},
    }),
    "mistral4_groups": ("mistral4", {
        "num_hidden_layers": 3, "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "kv_lora_rank": 20, "q_lora_rank": None, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 16, "rope_interleave": False, "tie_word_embeddings": True,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4},
    }),
    # Without a padding token, whose row transformers sets to 0 when it loads the family.
    "youtu": ("youtu", {
        "pad_token_id": None, "num_key_value_heads": 6, "kv_lora_rank": 14, "q_lora_rank": 10, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 7, "v_head_dim": 12, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    "youtu_untied_biases": ("youtu", {
        "pad_token_id": None, "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": None, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 16, "rope_interleave": False, "attention_bias": True,
        "tie_word_embeddings": False,
    }),
    "granitemoe": ("granitemoe", {
        "num_local_experts": 5, "attention_multiplier": 0.3, "embedding_multiplier": 5.0,
        "residual_multiplier": 0.4, "logits_scaling": 3.0,
    }),
    "granitemoe_tied_biases": ("granitemoe", {
        "num_local_experts": 4, "num_experts_per_tok": 3, "attention_multiplier": 0.5, "tie_word_embeddings": True,
        "attention_bias": True, "rms_norm_eps": 1e-3,
    }),
    "granitemoeshared": ("granitemoeshared", {
        "num_local_experts": 5, "shared_intermediate_size": 40, "attention_multiplier": 0.3, "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
    }),
    "granitemoe_swa": ("granitemoe_swa", {
        "num_hidden_layers": 3, "num_local_experts": 5, "sliding_window": 7, "attention_multiplier": 0.3,
        "shared_intermediate_size": 40, "layer_rope_theta": [0, 300.0, 5000.0],
    }),
    "granitemoe_swa_listed_layers": ("granitemoe_swa", {
        "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
        "attention_multiplier": 0.5, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN,
    }),
    "dots1": ("dots1", {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
    }),
    "dots1_windows_groups": ("dots1", {
        "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "sliding_window": 7, "max_window_layers": 1,
        "attention_bias": True, "tie_word_embeddings": True, "head_dim": 12,
    }),
    "solar_open": ("solar_open", {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7,
        "head_dim": 12, "rope_parameters": YARN,
    }),
    "solar_open_tied_biases": ("solar_open", {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 2, "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True,
    }),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {
        "num_experts": 5, "moe_topk": 2, "head_dim": 12,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 20.0, "factor": 1.0}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0},
    }),
    "hunyuan_v1_moe_tied_biases": ("hunyuan_v1_moe", {
        "num_experts": 4, "moe_topk": [3, 3], "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-3,
    }),
    "exaone_moe": ("exaone_moe", {
        "num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 3, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_shared_experts": 2, "head_dim": 12,
    }),
    "exaone_moe_listed_layers": ("exaone_moe", {
        "num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16, "norm_topk_prob": False,
        "tie_word_embeddings": True,
    }),
    "flex_olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 3}),
    "flex_olmo_tied_biases": ("flex_olmo", {
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 6,
        "attention_bias": True, "tie_word_embeddings": True,
    }),
    "hy_v3": ("hy_v3", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12,
        "router_scaling_factor": 1.7,
    }),
    "hy_v3_listed_layers": ("hy_v3", {
        "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts": 4,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_shared_experts": 2, "head_dim": 8,
        "attention_bias": True, "tie_word_embeddings": True, "enable_moe_fp32_combine": False,
    }),
    "mellum": ("mellum", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
    }),
    "mellum_listed_layers": ("mellum", {
        "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts": 4,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": False, "head_dim": 8,
        "attention_bias": True, "tie_word_embeddings": True, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        },
    }),
    "minicpm3": ("minicpm3", {
        "num_hidden_layers": 3, "num_key_value_heads": 6, "kv_lora_rank": 14, "q_lora_rank": 10, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 7, "scale_emb": 3.3, "scale_depth": 1.2, "dim_model_base": 30,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    "minicpm3_untied_biases": ("minicpm3", {
        "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": None, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        "scale_depth": None, "dim_model_base": None,
    }),
    "afmoe": ("afmoe", {
        "num_hidden_layers": 4, "head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "sliding_window": 7, "global_attn_every_n_layers": 2, "mup_enabled": True, "route_scale": 1.7,
    }),
    "afmoe_listed_windows_tied": ("afmoe", {
        "num_hidden_layers": 3, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_dense_layers": 2, "num_shared_experts": 1, "attention_bias": True, "tie_word_embeddings": True,
    }),
    "mimo_v2_flash": ("mimo_v2_flash", {
        "num_attention_heads": 8, "num_hidden_layers": 3, "head_dim": 12, "v_head_dim": 8, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 7,
    }),
    "mimo_v2_flash_listed_layers_tied": ("mimo_v2_flash", {
        "num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 12, "v_head_dim": 12, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 16, "sliding_window": 9, "n_group": 2, "topk_group": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "attention_value_scale": None,
        "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {**YARN, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.8},
        },
    }),
    "llama4_text": ("llama4_text", {
        "num_hidden_layers": 4, "head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 40,
        "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2, "attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.3,
        "rope_parameters": LLAMA3,
    }),
    "llama4_text_listed_layers": ("llama4_text", {
        "num_hidden_layers": 3, "head_dim": 20, "intermediate_size": 16, "intermediate_size_mlp": 30,
        "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1],
        "layer_types": ["full_attention", "full_attention", "chunked_attention"], "attention_chunk_size": 11,
        "attn_temperature_tuning": False, "use_qk_norm": False, "attention_bias": True,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
    }),
    "gpt_oss": ("gpt_oss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 6, "swiglu_limit": 0.5}
        | {"hidden_act": "silu"}),
    "gpt_oss_listed_windows": ("gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 8, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": YARN, "swiglu_alpha": 0.8,
        "attention_bias": False,
    }),
    "qwen3_next": ("qwen3_next", {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16, **DELTA_RULE, **SHARED_EXPERTS,
    }),
    "qwen3_next_some_experts": ("qwen3_next", {
        "num_hidden_layers": 4, "head_dim": 8, **DELTA_RULE, **SHARED_EXPERTS, "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 2, "num_experts_per_tok": 3, "norm_topk_prob": False, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    }),
    "qwen3_5_text": ("qwen3_5_text", {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16, **DELTA_RULE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
        | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }),
    "qwen3_5_text_tied": ("qwen3_5_text", {
        "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "head_dim": 8,
        **DELTA_RULE, "linear_num_key_heads": 1, "linear_key_head_dim": 7, "rms_norm_eps": 1e-3,
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    }),
    "qwen3_5_moe_text": ("qwen3_5_moe_text",
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, **DELTA_RULE, **SHARED_EXPERTS}),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 8}),
    "lfm2_untied_biases": ("lfm2", {
        "num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "conv"], "conv_bias": True,
        "conv_L_cache": 5, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3,
    }),
    "lfm2_moe": ("lfm2_moe", {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1,
        "routed_scaling_factor": 1.7, "hidden_act": "silu",
    }),
    "lfm2_moe_untied_biases": ("lfm2_moe", {
        "layer_types": ["full_attention", "conv"], "conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False,
        "norm_eps": 1e-3, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False, "hidden_act": "silu",
    }),
    "granitemoehybrid": ("granitemoehybrid", {
        "layer_types": ["full_attention", "linear_attention"], **MAMBA, "num_local_experts": 5,
        "shared_intermediate_size": 40, "position_embedding_type": "rope", "time_step_limit": (0.1, 0.9),
        "attention_multiplier": 0.3, "residual_multiplier": 0.4,
    }),
    "granitemoehybrid_dense_tied": ("granitemoehybrid", {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **MAMBA, "mamba_n_groups": 1, "mamba_expand": 3, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "num_local_experts": 0, "shared_intermediate_size": 40, "attention_multiplier": 0.5,
        "embedding_multiplier": 3.0, "logits_scaling": 0.5, "tie_word_embeddings": True, "attention_bias": True,
    }),
    "bamba": ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA, "mlp_bias": True}),
    "falcon_h1": ("falcon_h1", {
        **MAMBA, "mamba_d_ssm": 60, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
        "mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.6, "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9],
    }),
    "falcon_h1_normed_biases": ("falcon_h1", {
        **MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True,
        "attention_bias": True, "mlp_bias": True, "mlp_multipliers": [1.2, 0.9], "ssm_in_multiplier": 0.5,
        "attention_in_multiplier": 0.7, "tie_word_embeddings": True,
    }),
    "falcon_h1_norm_after_gate": ("falcon_h1", {
        **MAMBA, "mamba_d_ssm": 60, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False,
    }),
    "nemotron_h": ("nemotron_h", {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "head_dim": 20,
        "mamba_num_heads": 6, "mamba_head_dim": 9, "n_groups": 3, "ssm_state_size": 10, "conv_kernel": 3,
        "chunk_size": 7, "mlp_hidden_act": "relu2",
    }),
    "nemotron_h_experts": ("nemotron_h", {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "head_dim": 8,
        "mamba_num_heads": 12, "mamba_head_dim": 7, "n_groups": 3, "ssm_state_size": 6, "use_conv_bias": False,
        "use_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20,
    }),
    "flint": ("flint", {
        "num_hidden_layers": 4, "sliding_window": 7, "head_dim": 20, "moe_intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1],
    }),
    "flint_listed_windows_tied": ("flint", {
        "num_hidden_layers": 3, "sliding_window": 9, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 5,
        "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40, "mlp_only_layers": [], "norm_topk_prob": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "attention_bias": True,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "rope_parameters": YARN,
    }),
    "kolibri1": ("kolibri1", {
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 20,
        "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_local_experts": 6,
        "shared_expert_intermediate_size": 20,
    }),
    "kolibri1_tied": ("kolibri1", {
        "num_hidden_layers": 5, "sliding_window": 9, "head_dim": 8, "moe_intermediate_size": 16,
        "num_experts_per_tok": 3, "num_local_experts": 5, "shared_expert_intermediate_size": 40,
        "tie_word_embeddings": True, "norm_topk_prob": True, "rms_norm_eps": 1e-3, "num_key_value_heads": 6,
        "rope_parameters": YARN,
    }),
}

# Text encoders, which transformers has without an output layer. Their tests are in test_encoders.py.
ENCODER_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eurobert": ("eurobert", {"num_hidden_layers": 3}),
    "eurobert_biases": ("eurobert", {
        "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    }),
    "modernbert": ("modernbert", {"num_hidden_layers": 5, "local_attention": 6}),
    "modernbert_biases": ("modernbert", {
        "num_hidden_layers": 3, "local_attention": 9, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "norm_eps": 1e-3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }),
    "gemma3_text_both_sides": ("gemma3_text", {
        "num_hidden_layers": 7, "head_dim": 12, "sliding_window": 9, "use_bidirectional_attention": True,
    }),
}
# fmt: on
# By family, its first case, which default tests of all families take.
FIRST_CASES = {model_type: name for name, (model_type, _) in reversed(CASES.items())}
# 20 families that have between them every fact of a row, those with the most facts first. Tests that cost more than a
# comparison of logits take as many of these by default as they can afford (`first(n)`), and all families as long tests.
COVER = ("gemma4_text", "llama4_text", "nemotron_h", "gpt_oss", "deepseek_v2", "qwen3_next", "phimoe", "falcon_h1")
COVER += ("llama", "lfm2_moe", "gemma3n_text", "mimo_v2_flash", "granitemoehybrid", "nanochat", "gpt_bigcode", "flint")
COVER += ("vaultgemma", "qwen3_5_text", "kolibri1", "ernie4_5_moe")
IN_ORDER = tuple(dict.fromkeys((*COVER, *FIRST_CASES.values(), *CASES)))  # so that `first` takes the cover


def with_all_experts(case: str) -> dict[str, float]:
    """Settings with which every token uses all experts, because the choice of experts can depend on rounding."""
    family, settings = CASES[case]
    if family == "phimoe":  # always two experts; with this margin both count, but rounding can still decide their order
        return {"num_local_experts": 2, "router_jitter_noise": 50.0}
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    num_experts = next((settings[name] for name in counts if name in settings), None)
    if num_experts is None:
        return {}
    experts_a_token = next(
        (name for name in ("top_k_experts", "moe_k", "moe_topk") if name in settings), "num_experts_per_tok"
    )
    groups = {"n_group": 1, "topk_group": 1} if "n_group" in settings else {}
    return {experts_a_token: num_experts, **groups}
