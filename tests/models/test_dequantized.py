"""Weights in fp8 and mxfp4, whole and in parts, equal those that transformers dequantizes."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lean_ft.models import dequantized as module
from lean_ft.models import load_model, save_model
from lean_ft.models.dequantized import FourBitStack, ScaledTensor
from lean_ft.models.frozen_weight import quantized_weights
from lean_ft.models.safetensors_file import read_header
from lean_ft.peft.lora import quantize_as_loaded
from lean_ft.system.shards import Part
from lean_ft.training.summary import describe_model

BLOCK = [16, 8]
SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def numbers_of_8_bits(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (200 * torch.randn(shape, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)


def bytes_of_4_bits(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture(params=[2**18, 64], ids=["few strips", "many strips"])
def strips(request, monkeypatch):
    monkeypatch.setattr(module, "_STRIP_NUMBERS", request.param)


def edit(folder, replace, quantization) -> dict[str, torch.Tensor]:
    """Replace tensors of a folder by quantized tensors, and return transformers' dequantized values by name."""
    stored, expected = load_file(folder / "model.safetensors"), {}
    for name in list(stored):
        pieces, meant = replace(name, stored[name])
        if meant is not None:
            del stored[name]
            stored |= pieces
            expected[name] = meant
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    assert expected
    return expected


def in_8_bits(block):
    """For `edit`: projections in fp8, with a scale per block or per matrix."""

    def replace(name, weight):
        if not name.endswith("proj.weight"):
            return {}, None
        numbers = numbers_of_8_bits(*weight.shape, seed=len(name))
        grid = [-(-n // size) for n, size in zip(weight.shape, block or weight.shape, strict=True)]
        scales = 1e-3 * torch.rand(grid, generator=torch.Generator().manual_seed(1)) + 1e-4
        # transformers dequantizes whole blocks only: fill up the last ones.
        filled = torch.zeros([n * size for n, size in zip(grid, block or weight.shape, strict=True)]).to(numbers.dtype)
        filled[: len(weight), : weight.shape[1]] = numbers
        meant = Fp8Dequantize(None)._dequantize_one(filled, scales, torch.bfloat16)[: len(weight), : weight.shape[1]]
        scales = scales.view(()) if block is None else scales
        own = {name: numbers, f"{name}_scale_inv": scales}
        return {**own, name.replace("weight", "activation_scale"): torch.ones(())}, meant

    return replace


@pytest.mark.first(2)
@pytest.mark.parametrize("block", [BLOCK, None, [20, 12]], ids=["blocks", "one scale", "blocks that do not divide"])
def test_fp8_is_read_as_transformers_reads_it_and_saved_in_bfloat16(block, make_checkpoint, tmp_path, strips):
    folder, _ = make_checkpoint("qwen3_moe", dtype=torch.bfloat16, **SIZES)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block, "activation_scheme": "dynamic"}
    expected = edit(folder, in_8_bits(block), quantization)
    model = load_model(folder, dtype=torch.bfloat16)
    assert "loaded from fp8 weights and saved in bfloat16" in describe_model(model)
    save_model(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert len(expected) == 2 * (4 + 3 * 4)
    for name, meant in expected.items():
        assert torch.equal(saved[name], meant), name
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not load_model(tmp_path).source.quantization
    kept = load_model(folder, dtype=torch.bfloat16, quantize=quantize_as_loaded("auto"))
    matrices = {name: weight.frozen for name, weight in quantized_weights(kept).items()}
    assert len(matrices) == 2 * (4 + 2) and {frozen.form.kind for frozen in matrices.values()} == {"float8"}
    for name, frozen in matrices.items():
        assert torch.equal(frozen.whole(), model.get_parameter(name)), name


def in_4_bits(name, weight, low=115, high=123):
    """For `edit`: experts in mxfp4, with exponents from `low` to `high`."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {}, None
    num_experts, size, num_rows = weight.shape
    blocks = bytes_of_4_bits(num_experts, num_rows, size // 32, 16, seed=len(name))
    scales = bytes_of_4_bits(num_experts, num_rows, size // 32, low=low, high=high)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def test_mxfp4_is_read_as_transformers_reads_it(make_checkpoint, strips):
    folder, _ = make_checkpoint("gpt_oss", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    replace = partial(in_4_bits, low=0, high=230)
    expected = edit(folder, replace, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    model = load_model(folder, dtype=torch.bfloat16)
    for name, meant in expected.items():
        assert torch.equal(model.get_parameter(name), meant), name


def test_parts_are_those_of_the_whole(tmp_path, strips):
    """Rows, columns and matrices, as ranks of a sharded model read them."""
    file = tmp_path / "a.safetensors"
    save_file({"w": numbers_of_8_bits(48, 20), "s": torch.rand(3, 3)}, file)
    stored = read_header(file)
    matrix = ScaledTensor(stored["w"], stored["s"], (16, 8))
    whole, rows, columns = torch.empty(48, 20), torch.empty(17, 20), torch.empty(48, 5)
    matrix.read_part(Part(whole, (48, 20)))
    matrix.read_part(Part(rows, (48, 20), 9 * 20))
    matrix.read_part(Part(columns, (48, 20), 6, run=5, stride=20))
    assert torch.equal(rows, whole[9:26]) and torch.equal(columns, whole[:, 6:11]) and whole.std() > 0

    save_file({"b": bytes_of_4_bits(3, 8, 2, 16), "s": bytes_of_4_bits(3, 8, 2, low=120, high=130)}, file)
    stored = read_header(file)
    stack = FourBitStack(stored["b"], stored["s"])
    whole, one = torch.empty(3, 64, 8), torch.empty(1, 64, 8)
    stack.read_part(Part(whole, stack.shape))
    stack.read_part(Part(one, stack.shape, 2 * 64 * 8))
    assert torch.equal(one[0], whole[2]) and whole.std() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [16, 16]}, r"scales of .*proj.weight .* weight_block_size is \[16, 16\]"),
        ({"weight_block_size": "large"}, "weight_block_size is 'large'"),
        ({"fmt": "e5m2"}, r"quantized \(fp8\); expected"),
        ({"quant_method": "gptq"}, r"quantized \(gptq\); expected"),
    ],
    ids=str,
)
def test_scales_and_formats_that_do_not_fit_are_refused(change, message, make_checkpoint):
    folder, _ = make_checkpoint("qwen3_moe", dtype=torch.bfloat16, **SIZES)

    def replace(name, weight):
        grid = [n // size for n, size in zip(weight.shape, BLOCK, strict=False)]
        is_projection = name.endswith("proj.weight")
        pieces = {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(grid)} if is_projection else {}
        return pieces, weight if is_projection else None

    edit(folder, replace, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK, **change})
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def without_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., : tensor.shape[-1] // 2].contiguous()


# The end of a name, what replaces each of these tensors (None: nothing), and the error.
MISFITS = {
    "mxfp4": [
        ("_blocks", without_last,
            r"down_proj_blocks has the shape \[5, .*, 8\]; expected experts, rows, and groups of 16 bytes"),
        ("_blocks", lambda pieces: pieces.flatten(2), "expected experts, rows, and groups"),
        ("_blocks", lambda pieces: pieces.to(torch.int16), "_blocks is I16 of the shape .*; expected U8"),
        ("_blocks", lambda pieces: pieces.float(), "_blocks is F32"),
        ("_blocks", lambda pieces: pieces[:, :0], "expected U8 values"),
        ("_scales", lambda pieces: pieces.to(torch.float8_e8m0fnu), "_scales is F8_E8M0 of the shape .*; expected U8"),
        ("_scales", lambda pieces: pieces[:, :1].contiguous(), "scales of .* do not fit|scales of .* have the shape"),
        ("_scales", lambda pieces: None, "lack .*_scales"),
    ],
    "fp8": [
        ("proj.weight", lambda pieces: pieces[None], r"is in float8 and has the shape \[1, .*; expected a matrix"),
        ("proj.weight", lambda pieces: pieces.flatten(), "expected a matrix"),
        ("proj.weight", lambda pieces: pieces[:0], "expected F8_E4M3 values"),
        ("proj.weight", lambda pieces: pieces.to(torch.bfloat16),
            "scales of a weight that is stored as BF16; expected F8_E4M3"),
        ("proj.weight", lambda pieces: None, "scales of a weight that is missing"),
        ("_scale_inv", lambda pieces: pieces[..., None], "scales of .* have the shape"),
        ("_scale_inv", without_last, "scales of .* have the shape"),
        ("_scale_inv", lambda pieces: pieces.to(torch.float8_e8m0fnu),
            "_scale_inv is F8_E8M0 of the shape .*; expected F32 or"),
        ("_scale_inv", lambda pieces: pieces.to(torch.uint8), "_scale_inv is U8"),
        ("_scale_inv", lambda pieces: pieces.to(torch.complex64), "_scale_inv is C64"),
    ],
}  # fmt: skip


@pytest.mark.first(12)
@pytest.mark.parametrize(
    ("method", "end", "change", "message"),
    [(method, *case) for method, cases in MISFITS.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pieces_of_another_dtype_or_shape_are_refused_before_they_are_read(
    method, end, change, message, make_checkpoint
):
    case, replace, block = ("gpt_oss", in_4_bits, {}) if method == "mxfp4" else ("qwen3_moe", in_8_bits(BLOCK), BLOCK)
    sizes = {"hidden_size": 64, "intermediate_size": 96} if method == "mxfp4" else SIZES
    folder, _ = make_checkpoint(case, dtype=torch.bfloat16, **sizes)
    edit(folder, replace, {"quant_method": method, "weight_block_size": block})
    stored = load_file(folder / "model.safetensors")
    changed = {name: change(tensor) if name.endswith(end) else tensor for name, tensor in stored.items()}
    assert any(name.endswith(end) for name in stored)
    save_file({name: t for name, t in changed.items() if t is not None}, folder / "model.safetensors")
    for quantize in (None, quantize_as_loaded("auto")):
        with pytest.raises(ValueError, match=message):
            load_model(folder, quantize=quantize)
