"""Products of quantized weights against torchao's, and folders of `leanft quantize` opened for generation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from lean_ft.generation import generate, open_model
from lean_ft.models import load_model
from lean_ft.quantize import cpu_linear, quantize, save_quantized
from lean_ft.quantize.cpu_linear import FewRowsLinear, Int8Linear, fast_linear
from lean_ft.quantize.torchao_kinds import torchao_config
from lean_ft.tokenizers import load_tokenizer

KINDS = ("int8", "int4", "float8", "int8_dynamic_int8_weight", "int8_dynamic_int4_weight")
has_products = pytest.mark.skipif(not cpu_linear.has_int8_products(), reason="this CPU's 8-bit products overflow")


@has_products
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 48, True), (33, 70, False), (256, 1000, True)])
def test_products_are_torchaos_and_do_not_depend_on_the_batch(dtype, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    theirs: Any = nn.Linear(inputs, outputs, bias).to(dtype)
    quantize_(theirs, Int8DynamicActivationInt8WeightConfig())
    ours = Int8Linear(theirs.weight.qdata, theirs.weight.scale, theirs.bias)
    x = torch.randn(3, 7, inputs) * torch.logspace(-3, 0, 7)[:, None]
    x[1, 2] = 0
    x = x.to(dtype)
    found, expected = ours(x), theirs(x)
    assert found.dtype == dtype and found.shape == (3, 7, outputs)
    error = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-9)
    assert error.max() < {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert torch.equal(ours(x[1]), found[1]) and torch.equal(ours(x[2, 3]), found[2, 3])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 48, True), (96, 70, False), (256, 1000, True)])
def test_products_of_few_rows_are_torchaos(kind: str, dtype, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Linear(inputs, outputs, bias).to(dtype)
    quantize_(theirs, torchao_config(kind, 32))
    ours = fast_linear(theirs, kind, 32)
    assert isinstance(ours, FewRowsLinear) == (kind == "int8" or outputs % 16 == 0)
    for shape in ((1, 1), (4, 8), (3, 11)):
        x = torch.randn(*shape, inputs).to(dtype)
        found, expected = ours(x), theirs(x)
        assert found.dtype == dtype and found.shape == (*shape, outputs)
        assert (found - expected).norm() <= max(1e-6, 2 * torch.finfo(dtype).eps) * expected.norm()
        assert shape != (3, 11) or torch.equal(found, expected)


def written(kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16):
    """A quantized `tiny`, and its folder."""
    model = load_model("tiny", dtype=dtype)
    quantize(model, kind)
    folder.mkdir()
    save_quantized(model, load_tokenizer("tiny"), folder, kind, 32)
    return model


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_folder_is_opened_and_generates(kind: str, tmp_path: Path) -> None:
    expected = written(kind, tmp_path / "q", torch.float32)
    model, tokenizer = open_model(tmp_path / "q", device="cpu", dtype="float32")
    ids = torch.arange(48).reshape(2, 24) * 13 % 768
    fast = [type(module) for module in model.modules() if isinstance(module, FewRowsLinear | Int8Linear)]
    rounds = kind == "int8_dynamic_int8_weight" and cpu_linear.has_int8_products()
    assert fast == 28 * ([Int8Linear] if rounds else [FewRowsLinear] if kind in ("int8", "int4") else [])
    with torch.inference_mode():
        # Sums in another order can round to the neighboring step.
        assert (model(ids) - expected(ids)).norm() < (0.03 if rounds else 1e-5) * expected(ids).norm()
    question = "What is the capital of Zanemar?"
    answer = generate(model, question, tokenizer, max_new_tokens=33)
    assert answer[0] and (rounds or answer == generate(expected, question, tokenizer, max_new_tokens=33))
    written(kind, tmp_path / "q16")
    model, _ = open_model(tmp_path / "q16", device="cpu")
    assert all(generate(model, [question, "Hello"], tokenizer, max_new_tokens=33))


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "q"
    written("int8", folder)
    return folder


def _without_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({"model.norm.weight": load_file(file)["model.norm.weight"]}, file, {"format": "pt"})


def _with_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


def _with_other_scales(folder: Path) -> None:
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj._weight_scale"
    save_file({**tensors, name: tensors[name].expand(-1, 2).contiguous()}, file, metadata)


def _with_another_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"] | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (_without_a_tensor, {}, "has no weights of torchao"),
        (_with_other_scales, {}, r"up_proj.weight does not fit config.json: .*_scale is F32 of the shape \[.*, 2\]"),
        (_with_another_kind, {}, "quant_type is .*Int4WeightOnlyConfig.*; expected that of a model"),
        (_with_another_size, {}, "gate_proj.weight does not fit config.json"),
        (None, {"dtype": "float32"}, "was quantized in bfloat16. Set dtype to bfloat16"),
        (None, {"adapter": "adapter"}, "adapters need an unquantized model"),
    ],
    ids=("a missing tensor", "other scales", "another kind", "another size", "another dtype", "an adapter"),
)
def test_what_cannot_be_opened_is_refused(damage, settings, message: str, int8: Path, tmp_path, monkeypatch) -> None:
    shutil.copytree(int8, tmp_path / "q")
    monkeypatch.setattr("lean_ft.generation.texts.find_finished", lambda name, *_, **__: Path(name))
    if damage is not None:
        damage(tmp_path / "q")
    with pytest.raises(ValueError, match=message):
        open_model(tmp_path / "q", **{"device": "cpu", **settings})
