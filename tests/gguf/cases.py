"""A tiny model of each family that GGUF files support."""

from typing import Any

from tests.export.conftest import LLAMA3_ROPE

GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
WINDOW = 12
SHORT_WINDOW = {"sliding_window": WINDOW, "head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0], "rope_theta": 300.0}
LONGROPE |= {"long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5], "partial_rotary_factor": 0.75}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}
ROUTED |= {"first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4}
HYBRID = {"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
HYBRID |= {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
}
GEMMA4 = {"vocab_size_per_layer_input": 416, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW}
GEMMA3N = {
    "vocab_size_per_layer_input": 416,
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
    "head_dim": 16,
    "sliding_window": WINDOW,
}
GEMMA3N_WINDOWS = [*["sliding_attention"] * 4, "full_attention"] * 4
# Name -> transformers' name of the family, and settings. A name is the model_type, with a variant behind a slash.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "llama/yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.9}, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": WINDOW, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 64, "sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "exaone4/no_windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3_ROPE}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": WINDOW, "pad_token_id": 0}),
    "cohere": ("Cohere", {"pad_token_id": 0}),
    "cohere/qk_norm": ("Cohere", {"pad_token_id": 0, "use_qk_norm": True, "num_hidden_layers": 64}),
    "olmo": ("Olmo", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "num_hidden_layers": 3, "pad_token_id": 0}),
    "stablelm/parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "pad_token_id": 0}),
    "nemotron": ("Nemotron", {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {"sliding_window": None, "tie_word_embeddings": False, "rope_parameters": YARN}),
    "phi": ("Phi", {"num_key_value_heads": 4, "intermediate_size": 256, "rope_parameters": PLAIN | {"rope_theta": 1e4,
        "partial_rotary_factor": 0.5}, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", {"hidden_act": "gelu_fast", "rotary_pct": 0.5, "num_hidden_layers": 3}),
    "gpt_neox/serial": ("GPTNeoX", {"hidden_act": "gelu_fast", "use_parallel_residual": False}),
    "gpt2": ("GPT2", {}),
    "gpt2/inner": ("GPT2", {"n_inner": 96, "tie_word_embeddings": False}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "jais2": ("Jais2", {"num_key_value_heads": 2}),
    "arcee": ("Arcee", {"rope_parameters": YARN}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3/short": ("Phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 512,
        "max_position_embeddings": 1024}),
    "phi3/long": ("Phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {**SHORT_WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}),
    "gemma3_text": ("Gemma3", {**SHORT_WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_parameters": {
        "full_attention": LINEAR, "sliding_attention": PLAIN,
    }}),
    "granite": ("Granite", GRANITE),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "gpt_oss": ("GptOss", {
        **SHORT_WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": YARN,
        "num_hidden_layers": 3,
    }),
    "glm4_moe": ("Glm4Moe", {
        **ROUTED, "num_hidden_layers": 3, "head_dim": 16, "routed_scaling_factor": 1.7, "use_qk_norm": True,
        "attention_bias": True, "n_shared_experts": 2, "pad_token_id": 0,
    }),
    "solar_open": ("SolarOpen", {**ROUTED, "head_dim": 16, "routed_scaling_factor": 1.7, "pad_token_id": 0}),
    "dots1": ("Dots1", {
        **ROUTED, "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 24, "routed_scaling_factor": 1.7,
        "norm_topk_prob": True, "n_shared_experts": 2, "pad_token_id": 0,
    }),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": 2, "head_dim": 24, "pad_token_id": 0}),
    "exaone_moe": ("ExaoneMoe", {
        **EXPERTS, "num_hidden_layers": 5, "head_dim": 24, "sliding_window": WINDOW, "n_group": 3, "topk_group": 2,
        "num_shared_experts": 2,
        "rope_parameters": LLAMA3_ROPE,
    }),
    "afmoe": ("Afmoe", {
        **EXPERTS, **SHORT_WINDOW, "num_hidden_layers": 5, "num_dense_layers": 2, "num_shared_experts": 2,
        "route_scale": 1.7,
        "mup_enabled": True,
    }),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }),
    "minimax_m2": ("MiniMaxM2", {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    }),
    "deepseek_v3": ("DeepseekV3", {
        **ROUTED, **LATENT, "num_hidden_layers": 3, "q_lora_rank": 24, "rms_norm_eps": 1e-3,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    "deepseek_v3/no_query_latent": ("DeepseekV3", {
        **ROUTED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "tie_word_embeddings": True,
    }),
    "deepseek_v2": ("DeepseekV2", {
        **ROUTED, **LATENT, "num_hidden_layers": 3, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    }),
    "mistral4": ("Mistral4", {
        **ROUTED, **LATENT, "num_hidden_layers": 3, "q_lora_rank": 24, "rope_parameters": {
            **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.9, "partial_rotary_factor": 1 / 3,
        },
    }),
    # Without a padding token, whose row transformers sets to 0 when it loads the family.
    "youtu": ("Youtu", {**LATENT, "q_lora_rank": 24, "pad_token_id": None}),
    "minicpm3": ("MiniCPM3", {
        **LATENT, "q_lora_rank": 24, "v_head_dim": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2, 1.4, 1.6],
            "long_factor": [2.0, 2.5, 3.0, 3.5],
        }, "original_max_position_embeddings": 32,
    }),
    "llama4_text": ("Llama4", {
        "num_hidden_layers": 5, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "rope_parameters": LLAMA3_ROPE,
    }),
    "mimo_v2_flash": ("MiMoV2Flash", {
        **ROUTED, "num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 24, "v_head_dim": 16,
        "sliding_window": WINDOW,
    }),
    "mimo_v2_flash/listed": ("MiMoV2Flash", {
        **ROUTED, "num_attention_heads": 8, "num_hidden_layers": 3, "head_dim": 16, "v_head_dim": 16,
        "sliding_window": WINDOW,
        "n_group": 1, "topk_group": 1, "attention_value_scale": None, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {**LINEAR, "partial_rotary_factor": 0.5},
            "sliding_attention": {**PLAIN, "partial_rotary_factor": 0.5},
        },
    }),
    "qwen3_next": ("Qwen3Next", {
        **HYBRID, **EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "tie_word_embeddings": True,
    }),
    "qwen3_5_text": ("Qwen3_5", {**HYBRID, "linear_num_key_heads": 1}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 8}),
    "lfm2_moe": ("Lfm2Moe", {
        **EXPERTS, "num_hidden_layers": 4, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }),
    "granitemoe": ("GraniteMoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2,
        "intermediate_size": 32}),
    "granitemoeshared": ("GraniteMoeShared", {
        **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32,
        "shared_intermediate_size": 48,
    }),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        **MAMBA, **GRANITE, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3, "num_local_experts": 5,
        "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 48,
        "position_embedding_type": "nope",
    }),
    "granitemoehybrid/rope": ("GraniteMoeHybrid", {
        **MAMBA, **GRANITE, "layer_types": ["full_attention", "linear_attention"], "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 48, "position_embedding_type": "rope",
    }),
    "granitemoehybrid/attention": ("GraniteMoeHybrid", {
        **MAMBA, **GRANITE, "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 48, "position_embedding_type": "rope",
    }),
    "bamba": ("Bamba", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", {
        **MAMBA, "mamba_d_ssm": 96, "mamba_d_head": 12, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
        "mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.6, "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9], "tie_word_embeddings": True,
    }),
    "falcon_h1/norm": ("FalconH1", {
        **MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "tie_word_embeddings": False,
    }),
    "nemotron_h": ("NemotronH", {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention",
        "mlp"]}),
    "nemotron_h/experts": ("NemotronH", {
        **NEMOTRON, **ROUTED, "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "routed_scaling_factor": 1.7,
        "moe_shared_expert_intermediate_size": 48,
    }),
    # llama.cpp fixes the sizes of these projections, and the 20 layers that have own keys. With a large epsilon,
    # rounding stays small.
    "gemma3n_text": ("Gemma3n", {
        **GEMMA3N, "num_hidden_layers": 23, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 410,
        "rms_norm_eps": 2.0,
        "layer_types": [*GEMMA3N_WINDOWS, "full_attention", "sliding_attention", "full_attention"],
    }),
    "gemma3n_text/short": ("Gemma3n", {
        **GEMMA3N, "num_hidden_layers": 6, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 6,
        "tie_word_embeddings": False, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN},
    }),
    "gemma4_text": ("Gemma4", {
        **GEMMA4, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
        "final_logit_softcapping": 3.0,
    }),
    "gemma4_text/experts": ("Gemma4", {
        **GEMMA4, "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
    }),
    "gemma4_unified_text": ("Gemma4Unified", {
        **{name: value for name, value in GEMMA4.items() if name != "vocab_size_per_layer_input"},
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
}  # fmt: skip
# Further cases, which llama.cpp's server does not run.
FAMILIES = CASES | {
    "llama/tied_wide_heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama/biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama/linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "llama/llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    # Only layers with a window have positions, even if the window is longer than the context.
    "cohere2/long_window": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 4096, "pad_token_id": 0}),
    "qwen2/rope": ("Qwen2", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gpt_oss/published": ("GptOss", CASES["gpt_oss"][1] | {"rope_parameters": YARN | {"truncate": False}}),
}
# Of each kind of file one: reordered rows, stacked experts, divisors as tensors, states, transposed matrices, latents.
QUICK = ("llama", "qwen3_moe", "phi3/long", "qwen3_5_text", "gpt2", "deepseek_v2")
