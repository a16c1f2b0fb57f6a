"""Exported files in llama.cpp: its log-probabilities and greedy tokens equal ours."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_ft.export import export_gguf
from lean_ft.export.gguf_families import GGUF_FAMILIES
from lean_ft.models import load_model
from tests.export.conftest import qwen_tokenizer

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")

NUM_GREEDY = 32
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
# model_type -> transformers' name of the family, and settings
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "granite": ("Granite", GRANITE),
}
# llama.cpp reads gelu from a table in float16.
TOLERANCES = {"gemma": 2e-2}


def ask(server: Any, ids: list[int]) -> list[dict[str, Any]]:
    """The candidates for the token after `ids`, the likeliest first; empty if that token ends within a letter."""
    body = {"prompt": ids, "n_predict": 1, "temperature": 0.0, "n_probs": 1000, "cache_prompt": False}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer).get("completion_probabilities") or [{"top_logprobs": []}]
    return found[0]["top_logprobs"]


def serve(file: Path) -> Any:
    """A server of llama.cpp that keeps keys and values in float32."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.port = str(file), 128, False, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def test_every_family_has_a_case():
    assert CASES.keys() == GGUF_FAMILIES.keys()


def test_fields_that_config_json_leaves_out(make_model_folder, tmp_path):
    source = make_model_folder("Granite", tokenizer=qwen_tokenizer(), **GRANITE)
    config = json.loads((source / "config.json").read_text())
    del config["logits_scaling"]
    (source / "config.json").write_text(json.dumps(config))
    export_gguf(source, tmp_path / "model.gguf", "f32")


@pytest.mark.parametrize("family", CASES)
def test_llama_cpp_computes_the_same(family, make_model_folder, tmp_path):
    name, settings = CASES[family]
    source = make_model_folder(name, tokenizer=qwen_tokenizer(), **settings)
    export_gguf(source, tmp_path / "model.gguf", "f32")
    model, server = load_model(source), serve(tmp_path / "model.gguf")
    assert model.source.config["model_type"] == family
    ids, num_compared, tolerance = list(range(5, 40)), 0, TOLERANCES.get(family, 1e-3)
    for _ in range(NUM_GREEDY):
        with torch.no_grad():
            expected = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        found = ask(server, ids)
        if found:
            num_compared += 1
            assert found[0]["id"] == int(expected.argmax())
            assert len(found) > 300
            for one in found:
                assert one["logprob"] == pytest.approx(expected[one["id"]].item(), abs=tolerance)
        ids.append(int(expected.argmax()))
    assert num_compared > NUM_GREEDY // 2
