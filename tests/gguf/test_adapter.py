"""Adapters as GGUF files: llama.cpp with its own file of the base model computes what PEFT computes."""

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from lean_ft.export import export_gguf, export_gguf_adapter
from lean_ft.gguf.open import GGUF_FAMILIES
from lean_ft.models import load_model
from lean_ft.peft import apply_lora, save_adapter
from lean_ft.settings import LoRAConfig
from tests.export.conftest import qwen_tokenizer
from tests.gguf.cases import CASES as MODELS
from tests.gguf.cases import GRANITE
from tests.gguf.llama_server import LlamaServer
from tests.gguf.test_llama_cpp import assert_same_log_probs, tolerance
from tests.peft.conftest import randomize
from tests.peft.test_expert_pairs import write_adapter

UNEVEN = {"r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}}
ALL = {"target_modules": "all linear layers"}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
# Linear layers to which llama.cpp or PEFT applies no adapter
_LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
WITHOUT = {
    **{family: {*_LATENT, "lm_head"} for family in ("deepseek_v3", "mistral4")},
    "youtu": _LATENT,
    "deepseek_v2": {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head"},
    "minicpm3": _LATENT,
    "gemma3n_text": {"per_layer_model_projection", "modality_router", "0", "1", "2"},  # numbers of streams' projections
    "gemma4_text": {"per_layer_model_projection"},
    "llama4_text": {"router"},
    **{family: {"out_proj"} for family in ("falcon_h1", "nemotron_h")},
}
# Name -> transformers' name of the family, settings, PEFT's settings, how numbers are stored
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    **{family: (*case, ALL, "f32") for family, case in MODELS.items() if "/" not in family},
    "llama/f16": ("Llama", {"tie_word_embeddings": True}, ALL, "f16"),
    "qwen2/uneven": ("Qwen2", {}, ALL | UNEVEN, "f32"),
    "qwen2/rslora": ("Qwen2", {}, ALL | UNEVEN | {"use_rslora": True}, "f32"),
    "qwen3_moe/experts": (*MODELS["qwen3_moe"], EXPERTS, "f32"),
    "granite/tables": ("Granite", GRANITE, {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}, "f32"),
}


QUICK = ("llama", "phi3", "gemma2", "qwen2/uneven", "qwen2/rslora", "granite/tables", "qwen3_moe/experts")
MARKED = [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_llama_cpp_computes_what_peft_computes(case, make_model_folder, tmp_path):
    family, settings, adapter, kind = CASES[case]
    source = make_model_folder(family, tokenizer=qwen_tokenizer(), **settings)
    base = transformers.AutoModelForCausalLM.from_pretrained(source)
    if adapter["target_modules"] == ALL["target_modules"]:
        tied = {"lm_head"} if base.config.tie_word_embeddings else set()
        linear = {
            name.rpartition(".")[2]
            for name, module in base.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D)
        }
        adapter = adapter | {"target_modules": linear - tied - WITHOUT.get(case, set())}
    reference = peft.get_peft_model(base, peft.LoraConfig(**adapter))
    randomize(reference)
    reference.save_pretrained(tmp_path / "adapter")
    exported = export_gguf_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", kind)
    export_gguf(source, tmp_path / "base.gguf", "f32")
    assert f"{kind}," in str(exported)
    with pytest.raises(ValueError, match="is an adapter for llama.cpp"):
        load_model(tmp_path / "adapter.gguf")
    server = LlamaServer(tmp_path / "base.gguf", tmp_path / "adapter.gguf")
    allowed = tolerance(case) if kind == "f32" else 5e-2
    assert_same_log_probs(lambda ids: reference(ids).logits, server, allowed, num_tokens=8, at_least=1)


def test_llama_cpp_computes_what_pairs_per_expert_do(make_model_folder, tmp_path):
    family, settings = MODELS["qwen3_moe"]
    source = make_model_folder(family, tokenizer=qwen_tokenizer(), **settings)
    adapter, merged = write_adapter(source, tmp_path / "adapter", even=False)
    export_gguf_adapter(adapter, tmp_path / "adapter.gguf", "f32")
    export_gguf(source, tmp_path / "base.gguf", "f32")
    server = LlamaServer(tmp_path / "base.gguf", tmp_path / "adapter.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    allowed = tolerance("qwen3_moe/experts")
    assert_same_log_probs(lambda ids: reference(ids).logits, server, allowed, num_tokens=8, at_least=1)


@pytest.mark.parametrize(
    ("family", "names"), [(family, names) for family, names in WITHOUT.items() if family != "llama4_text"]
)
def test_layers_to_which_llama_cpp_applies_no_adapter(family, names, make_model_folder, tmp_path):
    name, settings = MODELS[family]
    source = make_model_folder(name, **settings)
    for target in names - ({"out_proj"} if family in ("falcon_h1", "nemotron_h") else set()):
        model = load_model(source)
        target = f"altup_projections.{target}" if target.isdigit() else target
        apply_lora(model, LoRAConfig(rank=2, targets=[target]))
        save_adapter(model, tmp_path / "adapter")
        with pytest.raises(ValueError, match=rf"adapts .*{target}, to which llama.cpp applies no adapter"):
            export_gguf_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", "f32")


@pytest.mark.parametrize(("lora", "message"), [
    ({"dora": True}, "the magnitudes of DoRA, which llama.cpp does not read.*--merge instead of --adapter"),
    ({"rank": 2}, r"--gguf is 'q8_0'; expected f32, f16, bf16 with --adapter"),
])  # fmt: skip
def test_what_llama_cpp_cannot_apply(lora, message, qwen_folder, tmp_path):
    model = load_model(qwen_folder)
    apply_lora(model, LoRAConfig(**lora))
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        export_gguf_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", "f16" if "dora" in lora else "q8_0")
    assert not Path(tmp_path / "adapter.gguf").exists()


def test_the_table_of_the_documentation_has_every_family():
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == GGUF_FAMILIES.keys()
    assert "| fails |" not in page
