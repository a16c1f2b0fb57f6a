"""Quantized GGUF kinds against llama.cpp's quantizer and the `gguf` package, and files against transformers."""

import ctypes
import re
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers

from lean_ft.export import GGUF_KINDS, export_gguf
from lean_ft.gguf.quantize import FORMATS, Mix, num_bytes, quantize
from tests.export.conftest import qwen_tokenizer

RANDOM = np.random.default_rng(0)
ROWS = [torch.from_numpy(0.02 * rows).float() for rows in (RANDOM.normal(size=(16, 1024)),
    RANDOM.standard_t(3, size=(16, 1024)))]  # fmt: skip
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 64}


def dequantized(stored: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()]))


def quantized_by_llama_cpp(rows: torch.Tensor, kind: str) -> np.ndarray:
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    function = getattr(ctypes.CDLL(xllamacpp.xllamacpp.__file__), f"quantize_{kind.replace('_k', '_K')}")
    stored = np.zeros((len(rows), num_bytes(kind, rows.shape[1:])), np.uint8)
    pointers = [ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(stored.ctypes.data)]
    function(*pointers, *map(ctypes.c_int64, rows.shape), None)
    return stored


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", ROWS, ids=["normal", "heavy_tailed"])
def test_errors_are_not_above_llama_cpp(kind, rows):
    ours, theirs = quantize(rows, kind).numpy(), quantized_by_llama_cpp(rows, kind)
    errors = [(dequantized(stored, kind) - rows).norm() for stored in (ours, theirs)]
    assert errors[0] <= 1.02 * errors[1]
    if kind in ("q8_0", "mxfp4", "q4_0", "q5_0", "q5_1"):
        np.testing.assert_array_equal(ours, theirs)  # nothing is searched
    if kind in ("iq4_nl", "q6_k"):  # the same search, with sums in another order
        assert (ours == theirs).mean() > 0.97


@pytest.mark.parametrize("kind", FORMATS)
def test_unusual_rows(kind):
    rows = torch.zeros(5, 512)
    rows[1], rows[2, :256], rows[3, ::32], rows[4, 8:16] = 0.5, 1e-38, 1e4, -0.25
    stored = quantize(rows, kind)
    assert stored.numel() == num_bytes(kind, tuple(rows.shape))
    found = dequantized(stored.numpy(), kind)
    assert not found[0].any()
    assert ((found - rows).abs().amax(1) <= 0.2 * rows.abs().amax(1) + 1e-30).all()
    columns = ROWS[0].view(256, 64)
    assert torch.equal(quantize(columns.T, kind), quantize(columns.T.contiguous(), kind))
    assert torch.equal(quantize(torch.stack(ROWS), kind), torch.stack([quantize(rows, kind) for rows in ROWS]))


LAYERS = set(range(24))
MORE_BITS, FIRST = {0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23}, {0, 1, 2}


@pytest.mark.parametrize(("kind", "part", "facts", "expected"), [
    ("q4_k_m", "attn_q", {}, {"q4_k": LAYERS}),
    ("q4_k_m", "attn_v", {}, {"q6_k": MORE_BITS, "q4_k": LAYERS - MORE_BITS}),
    ("q4_k_m", "attn_v", {"num_layers": 80, "heads_per_group": 8},
        {"q6_k": {*range(10), 12, 15, 18, 21}, "q5_k": {10, 11, 13, 14, 16, 17, 19, 20, 22, 23}}),
    ("q5_k_m", "ffn_down", {}, {"q6_k": MORE_BITS, "q5_k": LAYERS - MORE_BITS}),
    ("q5_k_m", "ffn_down_exps", {"num_experts": 128}, {"q6_k": MORE_BITS, "q5_k": LAYERS - MORE_BITS}),
    ("q4_k_m", "attn_v", {"num_experts": 8}, {"q8_0": LAYERS}),
    ("q4_k_m", "attn_k", {"num_experts": 8}, {"q8_0": LAYERS}),
    ("q4_k_m", "attn_output", {"num_experts": 8}, {"q5_k": LAYERS}),
    ("q4_k_m", "attn_v", {"columns": 896}, {"q8_0": MORE_BITS, "q5_0": LAYERS - MORE_BITS}),
    ("q5_k_m", "attn_q", {"columns": 896}, {"q5_1": LAYERS}),
    ("q4_k_m", "attn_q", {"columns": 80}, {"f16": LAYERS}),
    ("q4_0", "ffn_down", {}, {"q4_0": LAYERS}),
    ("iq4_nl", "ffn_down", {}, {"q5_k": FIRST, "iq4_nl": LAYERS - FIRST}),
    ("iq4_nl", "attn_v", {"heads_per_group": 4}, {"q5_k": LAYERS}),
    ("mxfp4", "attn_q", {}, {"mxfp4": LAYERS}),
    ("mxfp4", "attn_q", {"num_experts": 128}, {"q8_0": LAYERS}),
    ("mxfp4", "ffn_up_exps", {"num_experts": 128, "rows": (128, 64)}, {"mxfp4": LAYERS}),
    ("q4_k_m", "shortconv.in_proj", {}, {"q4_k": LAYERS}),
    ("q4_k_m", "ffn_gate_inp", {"num_experts": 128}, {"f32": LAYERS}),
    ("bf16", "attn_q", {}, {"bf16": LAYERS}),
    ("q8_0", "shortconv.in_proj", {}, {"q8_0": LAYERS}),
    ("q8_0", "shortconv.conv", {}, {"f32": LAYERS}),
    ("q4_k_m", "laurel_l", {}, {"f16": LAYERS}),
    ("q4_k_m", "altup_predict_coef", {}, {"f32": LAYERS}),
])  # fmt: skip
def test_kinds_of_a_file_are_llama_cpps(kind, part, facts, expected):
    columns, rows = facts.pop("columns", 512), facts.pop("rows", (64,))
    heads, mixture = facts.pop("heads_per_group", 1), SimpleNamespace(num_experts=facts.pop("num_experts", 0))
    config = {"num_layers": 24, "num_heads": heads, "num_kv_heads": 1, "mixture": mixture, "tied_embeddings": False}
    mix = Mix(kind, "llama", SimpleNamespace(**{**config, **facts}))
    found = [mix.kind_of(f"blk.{layer}.{part}.weight", (*rows, columns)) for layer in range(24)]
    assert {one: {layer for layer in LAYERS if found[layer] == one} for one in found} == expected


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "tied", "embedding", "output"), [
    ("q4_k_m", False, "q4_k", "q6_k"), ("q4_k_m", True, "q6_k", None), ("q4_0", False, "q4_0", "q6_k"),
    ("q8_0", True, "q8_0", None), ("mxfp4", False, "q8_0", "q8_0"), ("iq4_nl", True, "q6_k", None),
])  # fmt: skip
def test_files_hold_their_kinds(kind, tied, embedding, output, make_model_folder, tmp_path):
    source = make_model_folder("Qwen2", tokenizer=qwen_tokenizer(), tie_word_embeddings=tied, **SIZES)
    exported = str(export_gguf(source, tmp_path / "model.gguf", kind))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == embedding
    assert kinds.get("output.weight") == output
    assert {kinds[name] for name in ("output_norm.weight", "blk.0.attn_q.bias", "blk.1.attn_norm.weight")} == {"f32"}
    assert reader.get_field("general.file_type").contents() == GGUF_KINDS[kind]
    weights = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    stored = reader.tensors[[t.name for t in reader.tensors].index("blk.2.ffn_down.weight")]
    error = dequantized(stored.data, stored.tensor_type.name) - weights["model.layers.2.mlp.down_proj.weight"]
    printed = re.search(rf"{stored.tensor_type.name.lower()} ([\d.]+)%", exported)
    assert float(printed[1]) == pytest.approx(100 * float(error.norm() / weights["model.layers.2.mlp.down_proj.weight"].norm()), rel=0.1)  # fmt: skip  # noqa: E501


def test_an_unknown_kind_leaves_no_file(make_model_folder, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="Did you mean 'q4_k_m'"):
        export_gguf(make_model_folder(tokenizer=qwen_tokenizer()), tmp_path / "out" / "model.gguf", "q4_k")
    assert not list((tmp_path / "out").iterdir())


def test_weights_above_float16_scales(make_model_folder, tmp_path):
    source = make_model_folder(tokenizer=qwen_tokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e8
    model.save_pretrained(source)
    with pytest.raises(ValueError, match="too large for the float16 scales"):
        export_gguf(source, tmp_path / "out" / "model.gguf", "q4_0")
    assert not list((tmp_path / "out").iterdir())
