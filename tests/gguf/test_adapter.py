"""Adapters as GGUF files: llama.cpp with its own file of the base model computes what PEFT computes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
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
from tests.gguf.cases import GRANITE, QUICK
from tests.gguf.converter import WHOLES, write_folder
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


MARKED = [pytest.param(case, marks=[pytest.mark.long] * (case != "qwen2/uneven")) for case in CASES]


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


# Without layers to which llama.cpp applies no adapter.
_IN_WHOLES = [case for case in WHOLES if case not in ("mistral3/mistral4", "llama4")]


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [case if case == "qwen3_vl" else pytest.param(case, marks=pytest.mark.long) for case in _IN_WHOLES]
)
def test_llama_cpp_computes_an_adapter_of_a_model_that_reads_images(case, tmp_path):
    """The base's file and the adapter's have one architecture."""
    source = write_folder(case, tmp_path / "model")
    model = load_model(source)
    apply_lora(model, LoRAConfig(rank=2))
    randomize(model)
    save_adapter(model, tmp_path / "adapter")
    export_gguf_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", "f32", base=source)
    export_gguf(source, tmp_path / "base.gguf", "f32")
    server = LlamaServer(tmp_path / "base.gguf", tmp_path / "adapter.gguf")
    assert_same_log_probs(model, server, tolerance(case), num_tokens=8, at_least=1)


@pytest.mark.long
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP is not set to a folder of llama.cpp's sources")
@pytest.mark.parametrize("case", ["llama", "gemma3", "paddleocr_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_an_adapter_equals_the_converters(case, tmp_path):
    """Of llama.cpp's convert_lora_to_gguf.py: the architecture, the metadata beside names, and the tensors."""
    source = write_folder(case, tmp_path / "model")
    model = load_model(source)
    apply_lora(model, LoRAConfig(rank=2, targets=["q_proj", "k_proj", "v_proj", "o_proj"]))
    randomize(model)
    save_adapter(model, tmp_path / "adapter")
    export_gguf_adapter(tmp_path / "adapter", tmp_path / "own.gguf", "f32", base=source)
    script = Path(os.environ["LLAMA_CPP"]) / "convert_lora_to_gguf.py"
    arguments = [tmp_path / "adapter", "--base", source, "--outfile", tmp_path / "theirs.gguf", "--outtype", "f32"]
    subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True)
    own, theirs = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("own", "theirs"))
    for key in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"):
        assert own.get_field(key).contents() == theirs.get_field(key).contents(), key
    tensors = [{one.name: one.data for one in reader.tensors} for reader in (own, theirs)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, values in tensors[0].items():
        np.testing.assert_allclose(values, tensors[1][name], atol=1e-6, err_msg=name)


@pytest.mark.long
def test_llama_cpp_computes_what_pairs_per_expert_do(exported, tmp_path):
    source, file = exported("qwen3_moe")
    adapter, merged = write_adapter(source, tmp_path / "adapter", even=False)
    export_gguf_adapter(adapter, tmp_path / "adapter.gguf", "f32")
    server = LlamaServer(file, tmp_path / "adapter.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    allowed = tolerance("qwen3_moe/experts")
    assert_same_log_probs(lambda ids: reference(ids).logits, server, allowed, num_tokens=8, at_least=1)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("family", "names"),
    [(family, WITHOUT[family]) for family in sorted(WITHOUT, key=[*QUICK, *MODELS].index) if family != "llama4_text"],
)
def test_layers_to_which_llama_cpp_applies_no_adapter(family, names, exported, tmp_path):
    source, _ = exported(family)
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
    table = page.partition("<!-- end of table -->")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == GGUF_FAMILIES.keys()
    assert "| fails |" not in page
