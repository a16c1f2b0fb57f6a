"""The weights for a sampling engine are the folder's, those of PEFT's merge, and compute what the policy does."""

import copy
import shutil

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file

from lean_ft import load_model
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models.frozen_weight import quantized_weights
from lean_ft.models.safetensors_file import write_file
from lean_ft.models.source import parts_on_disk
from lean_ft.peft import apply_lora, experts, load_adapter, published_parts, quantize_as_loaded, save_adapter
from lean_ft.settings import LoRAConfig
from lean_ft.system.shards import ALONE
from tests.models.conftest import whole_model
from tests.models.family_cases import with_all_experts
from tests.models.test_dequantized import BLOCK, edit, in_4_bits, in_8_bits
from tests.peft.conftest import IDS, randomize
from tests.peft.test_experts import SIZES

peft = pytest.importorskip("peft")


def published(model, folder):
    """The tensors in the files that are written for an engine, by name."""
    folder.mkdir()
    for layer, parts in published_parts(model, ALONE):
        write_file(folder / f"{layer}.safetensors", parts, {"format": "pt"})
    found = [pair for file in folder.iterdir() for pair in load_file(file).items()]
    assert len(found) == len(dict(found)) > 0, "a tensor is in two files"
    return dict(found)


def merged_by_peft(base, adapter, folder):
    """The tensors of transformers' folder after PEFT has merged the adapter into `base`."""
    peft.PeftModel.from_pretrained(copy.deepcopy(base), adapter).merge_and_unload().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_close(found, expected, of_dtype=0.0):
    """Within a few roundings of float32, or `of_dtype` epsilons of the published dtype."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = max(1e-5, of_dtype * torch.finfo(found[name].dtype).eps)
        torch.testing.assert_close(
            found[name].float(), tensor.float(), rtol=bound, atol=1e-5, msg=lambda text, name=name: name + text
        )


FOLDERS = ["llama_biases", "qwen3_moe", "gpt_oss", "gpt2", "gemma2", "mixtral"]


@pytest.mark.first(3)
@pytest.mark.parametrize("family", FOLDERS)
def test_a_model_without_an_adapter_has_the_tensors_of_its_folder(family, make_checkpoint, tmp_path):
    """Tied, stacked, split and transposed as there; and transposed stacks and other names in multimodal folders."""
    folder, _ = make_checkpoint(family)
    found, stored = published(load_model(folder), tmp_path / "files"), load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


@pytest.mark.long
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3VLMoe", "with its tower"])
def test_a_part_of_a_multimodal_model_has_the_names_of_the_whole(name, tmp_path):
    """Of its language model alone, which is what was loaded, or with the vision tower."""
    if name == "with its tower":
        folder = resolve_model_path("tiny-images")
        found = published(load_model(folder, images="frozen", dtype=torch.bfloat16), tmp_path / "files")
    else:
        whole_model(name).save_pretrained(folder := tmp_path / "model")
        found = published(load_model(folder), tmp_path / "files")
    stored = load_file(folder / "model.safetensors")
    expected = {key for key in stored if name == "with its tower" or "language_model" in key or "lm_head" in key}
    assert found.keys() == expected
    assert all(torch.equal(found[key], stored[key]) for key in expected)


ADAPTERS = [
    ("llama_biases", {}),
    ("llama_biases", {"dora": True, "targets": ["all-linear", "lm_head", "embed_tokens"]}),
    ("llama_biases", {"init": "pissa", "rslora": True}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    ("gpt2", {"dora": True}),
    ("mixtral", {"targets": ["gate", "q_proj", "experts.down_proj"]}),
]


@pytest.mark.first(3)
@pytest.mark.parametrize(("family", "settings"), ADAPTERS, ids=str)
def test_adapters_are_merged_as_peft_merges_them(family, settings, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family, **with_all_experts(family))
    torch.manual_seed(0)
    model = load_model(folder)
    apply_lora(model, LoRAConfig(**{"rank": 4, "alpha": 5, **settings}))
    randomize(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = published(model, tmp_path / "files")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    save_adapter(model, tmp_path / "adapter")
    assert_close(found, merged_by_peft(base, tmp_path / "adapter", tmp_path / "merged"))
    plain = load_model(folder)
    for name, part in parts_on_disk(plain, as_read=True).items():
        part.values.copy_(found[name])
    torch.testing.assert_close(plain(IDS), model(IDS), atol=5e-4, rtol=5e-4)


MXFP4 = in_4_bits, {"quant_method": "mxfp4"}
FP8 = in_8_bits(BLOCK), {"quant_method": "fp8", "weight_block_size": BLOCK}
QUANTIZED = {  # the case, how its folder is quantized, lora.quantize, and the model's dtype
    "nf4": ("qwen3", None, "nf4", torch.bfloat16),
    "nf4 in float32": ("qwen3", None, "nf4", torch.float32),
    "experts in nf4": ("qwen3_moe", None, "nf4", torch.bfloat16),
    "mxfp4": ("gpt_oss", MXFP4, "auto", torch.bfloat16),
    "mxfp4 in float32": ("gpt_oss", MXFP4, "auto", torch.float32),
    "float8": ("qwen3_moe", FP8, "as_stored", torch.bfloat16),
}


@pytest.mark.first(1)
@pytest.mark.parametrize(("family", "stored", "quantize", "dtype"), QUANTIZED.values(), ids=QUANTIZED)
def test_an_adapter_is_merged_into_the_dequantized_weights(
    family, stored, quantize, dtype, make_checkpoint, tmp_path, monkeypatch
):
    """Dequantized by bitsandbytes or transformers, and merged by PEFT in float32. Weights without an adapter have the
    same bits."""
    monkeypatch.setattr(experts, "_MERGED_NUMBERS", 3 * 64 * 32)  # some experts, and then the others
    folder, base = make_checkpoint(family, dtype=torch.bfloat16, **SIZES)
    plain = load_file(folder / "model.safetensors")
    if stored is not None:
        shutil.copytree(folder, dense := tmp_path / "dense")
        save_file({**plain, **edit(folder, *stored)}, dense / "model.safetensors", {"format": "pt"})
        base = type(base).from_pretrained(dense)  # in bfloat16
    model, base = load_model(folder, dtype=dtype, quantize=quantize_as_loaded(quantize)), base.float()
    for name, weight in quantized_weights(model).items() if quantize == "nf4" else ():
        values = base.get_parameter(name).data.to(dtype)
        # Flat, because the library's kernel for CPUs is wrong if a block of values crosses the end of a row.
        numbers, state = quantize_4bit(values.flatten(), quant_type="nf4", compress_statistics=True)
        base.get_parameter(name).data = dequantize_4bit(numbers, state).view(values.shape).float()
        assert weight.form.kind == "nf4"
    apply_lora(model, LoRAConfig(rank=4, targets=["q_proj", "down_proj"]))
    randomize(model)
    save_adapter(model, tmp_path / "adapter")
    found = published(model, tmp_path / "files")
    expected = merged_by_peft(base, tmp_path / "adapter", tmp_path / "merged")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert_close(found, expected, of_dtype=0.5)
    for name, tensor in expected.items():
        if "q_proj.weight" not in name and "down_proj" not in name:
            assert torch.equal(found[name], tensor.to(dtype)), name


def test_an_adapter_that_is_read_is_published(make_checkpoint, tmp_path):
    """Two adapters, summed as PEFT sums them."""
    folder, base = make_checkpoint("llama_biases")
    theirs = copy.deepcopy(base)
    for number in range(2):
        model = load_model(folder)
        apply_lora(model, LoRAConfig(rank=2 + number, alpha=3.0 + number, targets=["q_proj", "up_proj"]))
        randomize(model, seed=number)
        save_adapter(model, tmp_path / str(number))
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / str(number)).merge_and_unload()
    theirs.save_pretrained(tmp_path / "merged")
    model = load_model(folder)
    load_adapter(model, tmp_path / "0", tmp_path / "1")
    assert_close(published(model, tmp_path / "files"), load_file(tmp_path / "merged" / "model.safetensors"))
