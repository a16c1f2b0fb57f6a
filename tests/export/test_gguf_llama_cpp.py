"""Exported files in llama.cpp: its log-probabilities and greedy tokens equal ours."""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lean_ft.export import export_gguf
from lean_ft.export.gguf_families import GGUF_FAMILIES
from lean_ft.export.gguf_mixtures import GGUF_MIXTURES
from lean_ft.models import load_model
from lean_ft.tokenizers import load_tokenizer
from tests.export.conftest import LLAMA3_ROPE, qwen_tokenizer
from tests.export.llama_server import LlamaServer

pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")

NUM_GREEDY = 32
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
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4}
LATENT |= {"first_k_dense_replace": 1}
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
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3/short": ("Phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 512, "max_position_embeddings": 1024}),
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
        **SHORT_WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": YARN, "num_hidden_layers": 3,
    }),
    "glm4_moe": ("Glm4Moe", {
        **ROUTED, "num_hidden_layers": 3, "head_dim": 16, "routed_scaling_factor": 1.7, "use_qk_norm": True,
        "attention_bias": True, "n_shared_experts": 2, "pad_token_id": 0,
    }),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
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
    "llama4_text": ("Llama4", {
        "num_hidden_layers": 5, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 64, "num_local_experts": 5,
        "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "rope_parameters": LLAMA3_ROPE,
    }),
    "qwen3_next": ("Qwen3Next", {
        **HYBRID, **EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "tie_word_embeddings": True,
    }),
    "qwen3_5_text": ("Qwen3_5", {**HYBRID, "linear_num_key_heads": 1}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 8}),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        **MAMBA, **GRANITE, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3, "num_local_experts": 5,
        "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 48, "position_embedding_type": "nope",
    }),
    "granitemoehybrid/rope": ("GraniteMoeHybrid", {
        **MAMBA, **GRANITE, "layer_types": ["full_attention", "linear_attention"], "num_local_experts": 0, "num_experts_per_tok": 0,
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
        **MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": False,
    }),
    "nemotron_h": ("NemotronH", {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron_h/experts": ("NemotronH", {
        **NEMOTRON, **ROUTED, "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "routed_scaling_factor": 1.7,
        "moe_shared_expert_intermediate_size": 48,
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
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"],
    }),
}  # fmt: skip


class GELUFromTable(TorchDispatchMode):
    """GELU as llama.cpp computes it on a CPU: between -10 and 10 from a table in float16."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.gelu.default:
            return found
        return torch.where(args[0].abs() < 10, func(args[0].half().float(), **(kwargs or {})).half().float(), found)


def ask(server: LlamaServer, ids: list[int]) -> list[dict[str, Any]]:
    """The candidates for the token after `ids`, the likeliest first; empty if that token ends within a letter."""
    body = {"prompt": ids, "n_predict": 1, "temperature": 0.0, "n_probs": 1000, "cache_prompt": False}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer).get("completion_probabilities") or [{"top_logprobs": []}]
    return found[0]["top_logprobs"]


def tolerance(case: str) -> float:
    return 5e-3 if "gemma" in case else 1e-3


@torch.no_grad()
def assert_same_log_probs(
    logits: Callable[[torch.Tensor], torch.Tensor],
    server: LlamaServer,
    tolerance: float,
    num_tokens: int = NUM_GREEDY,
    at_least: int = NUM_GREEDY // 2,
) -> None:
    """Greedy tokens and their candidates' log-probabilities equal those from `logits` of ids (1, T)."""
    ids, num_compared = list(range(5, 40)), 0
    for _ in range(num_tokens):
        with GELUFromTable():
            expected = logits(torch.tensor([ids]))[0, -1].log_softmax(-1)
        found = ask(server, ids)
        if found:
            num_compared += 1
            assert found[0]["id"] == int(expected.argmax())
            assert len(found) > 300
            for one in found:
                assert one["logprob"] == pytest.approx(expected[one["id"]].item(), abs=tolerance)
        ids.append(int(expected.argmax()))
    assert num_compared >= at_least


def test_every_family_has_a_case():
    assert {case.partition("/")[0] for case in CASES} == GGUF_FAMILIES.keys() | GGUF_MIXTURES.keys()


def test_fields_that_config_json_leaves_out(make_model_folder, tmp_path):
    source = make_model_folder("Granite", tokenizer=qwen_tokenizer(), **GRANITE)
    config = json.loads((source / "config.json").read_text())
    del config["logits_scaling"]
    (source / "config.json").write_text(json.dumps(config))
    export_gguf(source, tmp_path / "model.gguf", "f32")


# EXAONE 4 has windows only with 64 layers.
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.long] * (c == "exaone4")) for c in CASES])
def test_llama_cpp_computes_the_same(case, make_model_folder, tmp_path):
    family, (name, settings) = case.partition("/")[0], CASES[case]
    source = make_model_folder(name, tokenizer=qwen_tokenizer(), **settings)
    export_gguf(source, tmp_path / "model.gguf", "f32")
    model, server = load_model(source), LlamaServer(tmp_path / "model.gguf")
    assert model.source.config["model_type"] == family
    assert_same_log_probs(model, server, tolerance(case))


@pytest.mark.parametrize(("kind", "bound"), [("f32", 1e-3), ("q8_0", 0.25), ("q4_k_m", 1.0)])
@torch.no_grad()
def test_the_embedded_trained_model(kind, bound, tmp_path):
    """The likeliest tokens of answers that it was trained on, in bits that lose something too."""
    export_gguf("tiny", tmp_path / "model.gguf", kind)
    model, tokenizer, server = load_model("tiny"), load_tokenizer("tiny"), LlamaServer(tmp_path / "model.gguf")
    chat = [{"role": "user", "content": "Which city is the capital of Zanemar?"}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    for _ in range(12):
        expected = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        found = ask(server, ids)
        assert found[0]["id"] == int(expected.argmax())
        for one in found[:3]:
            assert one["logprob"] == pytest.approx(expected[one["id"]].item(), abs=bound)
        ids.append(int(expected.argmax()))
        if ids[-1] == tokenizer.eos_id:
            break


def in_8_bits(x: torch.Tensor, block: int) -> torch.Tensor:
    """The inputs of a quantized matrix as llama.cpp rounds them: in blocks of 256 for k kinds, otherwise of 32."""
    blocks = x.unflatten(-1, (-1, block))
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = -extreme / 127 if block == 256 else extreme.abs() / 127
    stored = scale if block == 256 else scale.half().float()
    return ((blocks / scale).round().clamp(max=127) * stored).flatten(-2)


def round_inputs(model: torch.nn.Module, file: Path) -> None:
    """Let the layers round their inputs as llama.cpp does for the kinds of the file's tensors."""
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (kind := kinds[f"{names.get_name(name)}.weight"]) != "F16":
            block = 256 if kind.endswith("_K") else 32
            module.register_forward_pre_hook(lambda module, inputs, block=block: (in_8_bits(inputs[0], block),))


@pytest.mark.parametrize(("kind", "hidden_size"), [
    *((kind, 256) for kind in ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl", "mxfp4")), ("q4_k_m", 96), ("q5_k_m", 96),
])  # fmt: skip
def test_llama_cpp_reads_quantized_weights(kind, hidden_size, make_model_folder, tmp_path):
    """Its log-probabilities are those of the dequantized weights, up to a few inputs that round the other way."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    source, file = make_model_folder("Llama", tokenizer=qwen_tokenizer(), **sizes), tmp_path / "model.gguf"
    export_gguf(source, file, kind)
    whole, model, server, differences = load_model(source), load_model(file), LlamaServer(file), []
    round_inputs(model, file)
    for length in range(5, 30):
        ids = [(7 * i + i * i) % 390 + 5 for i in range(length)]
        found = ask(server, ids)
        if found:
            tokens, of_server = [one["id"] for one in found], torch.tensor([one["logprob"] for one in found])
            with torch.no_grad():
                expected = [one(torch.tensor([ids]))[0, -1].log_softmax(-1)[tokens] for one in (model, whole)]
            differences.append([(of_server - one).square().mean().sqrt() for one in expected])
    of_model, of_source = torch.tensor(differences).mean(0).tolist()
    assert of_model < min(0.08, 0.2 * of_source)
