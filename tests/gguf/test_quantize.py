"""Quantized GGUF kinds against llama.cpp's quantizer and the `gguf` package, and files against transformers."""

import ctypes
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers

from lean_ft.export import GGUF_KINDS, export_gguf
from lean_ft.gguf.quantize import FORMATS, Mix, num_bytes, quantize, read_imatrix
from tests.export.conftest import qwen_tokenizer

RANDOM = np.random.default_rng(0)
ROWS = [torch.from_numpy(0.02 * rows).float() for rows in (RANDOM.normal(size=(16, 1024)), RANDOM.standard_t(3, size=(16, 1024)))]  # fmt: skip
IMPORTANCE = torch.from_numpy(RANDOM.lognormal(0, 2, size=1024)).float()
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 64}
IDS = [[(7 * i + j * j) % 400 for j in range(5, 5 + length)] for i, length in enumerate((40, 9, 25))]


def dequantized(stored: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()]))


def quantized_by_llama_cpp(rows: torch.Tensor, kind: str, importance: torch.Tensor | None) -> np.ndarray:
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    function = getattr(ctypes.CDLL(xllamacpp.xllamacpp.__file__), f"quantize_{kind.replace('_k', '_K')}")
    stored = np.zeros((len(rows), num_bytes(kind, rows.shape[1:])), np.uint8)
    pointers = [ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(stored.ctypes.data)]
    weights = None if importance is None else ctypes.c_void_p(importance.data_ptr())
    function(*pointers, *map(ctypes.c_int64, rows.shape), weights)
    return stored


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("importance", [None, IMPORTANCE], ids=["plain", "weighted"])
@pytest.mark.parametrize("rows", ROWS, ids=["normal", "heavy_tailed"])
def test_errors_are_not_above_llama_cpp(kind, importance, rows):
    weight = torch.ones(1024) if importance is None else importance
    ours, theirs = quantize(rows, kind, importance).numpy(), quantized_by_llama_cpp(rows, kind, importance)
    errors = [(weight * (dequantized(stored, kind) - rows) ** 2).sum().sqrt() for stored in (ours, theirs)]
    assert errors[0] <= 1.02 * errors[1]
    if kind in ("q8_0", "mxfp4") or (importance is None and kind in ("q4_0", "q4_1", "q5_0", "q5_1")):
        np.testing.assert_array_equal(ours, theirs)  # nothing is searched
    if kind in ("iq4_nl", "q6_k"):  # the same search, with sums in another order
        assert (ours == theirs).mean() > 0.97


@pytest.mark.parametrize("kind", FORMATS)
def test_unusual_rows(kind):
    rows = torch.zeros(5, 512)
    rows[1], rows[2, :256], rows[3, ::32], rows[4, 8:16] = 0.5, 1e-38, 1e4, -0.25
    stored = quantize(rows, kind, torch.zeros(512))
    assert stored.numel() == num_bytes(kind, tuple(rows.shape))
    found = dequantized(stored.numpy(), kind)
    assert not found[0].any()
    assert ((found - rows).abs().amax(1) <= 0.2 * rows.abs().amax(1) + 1e-30).all()
    columns = ROWS[0].view(256, 64)
    assert torch.equal(quantize(columns.T, kind), quantize(columns.T.contiguous(), kind))
    experts, each = torch.stack(ROWS), torch.stack([IMPORTANCE, IMPORTANCE.flip(0)])
    expected = [quantize(expert, kind, one) for expert, one in zip(experts, each, strict=True)]
    assert torch.equal(quantize(experts, kind, each), torch.stack(expected))


LAYERS = set(range(24))
MORE_BITS, FIRST = {0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23}, {0, 1, 2}


@pytest.mark.parametrize(("kind", "part", "facts", "expected"), [
    ("q4_k_m", "attn_q", {}, {"q4_k": LAYERS}),
    ("q4_k_m", "attn_v", {}, {"q6_k": MORE_BITS, "q4_k": LAYERS - MORE_BITS}),
    ("q4_k_m", "attn_v", {"num_layers": 80, "heads_per_group": 8}, {"q6_k": {*range(10), 12, 15, 18, 21}, "q5_k": {10, 11, 13, 14, 16, 17, 19, 20, 22, 23}}),
    ("q5_k_m", "ffn_down", {}, {"q6_k": MORE_BITS, "q5_k": LAYERS - MORE_BITS}),
    ("q5_k_m", "ffn_down_exps", {"num_experts": 128}, {"q6_k": MORE_BITS, "q5_k": LAYERS - MORE_BITS}),
    ("q4_k_m", "attn_v", {"num_experts": 8}, {"q8_0": LAYERS}),
    ("q4_k_m", "attn_k", {"num_experts": 8}, {"q8_0": LAYERS}),
    ("q4_k_m", "attn_output", {"num_experts": 8}, {"q5_k": LAYERS}),
    ("q4_k_m", "attn_v", {"columns": 896}, {"q8_0": MORE_BITS, "q5_0": LAYERS - MORE_BITS}),
    ("q5_k_m", "attn_q", {"columns": 896}, {"q5_1": LAYERS}),
    ("q4_k_m", "attn_q", {"columns": 80}, {"f16": LAYERS}),
    ("q4_0", "ffn_down", {}, {"q4_0": LAYERS}),
    ("q4_0", "ffn_down", {"has_importance": True}, {"q4_1": FIRST, "q4_0": LAYERS - FIRST}),
    ("iq4_nl", "ffn_down", {}, {"q5_k": FIRST, "iq4_nl": LAYERS - FIRST}),
    ("iq4_nl", "ffn_down", {"has_importance": True}, {"iq4_nl": LAYERS}),
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
    mix = Mix(kind, "llama", SimpleNamespace(**{**config, **facts}), facts.get("has_importance", False))
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
    assert float(printed[1]) == pytest.approx(100 * float(error.norm() / weights["model.layers.2.mlp.down_proj.weight"].norm()), rel=0.1)  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(make_model_folder) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model, and by the name in the file the sums of squared inputs, from transformers."""
    source = make_model_folder("Llama", tokenizer=qwen_tokenizer(), **SIZES)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    sums = dict[str, torch.Tensor]()

    def watch(name: str) -> Callable[..., None]:
        def add(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].flatten(0, -2).square().sum(0)

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(f"{names.get_name(name)}.weight"))
    with torch.no_grad():
        for ids in IDS:
            model(torch.tensor([ids]))
    return source, sums


def write_imatrix(file: Path, sums: dict[str, torch.Tensor], count: float = float(sum(map(len, IDS)))) -> Path:
    writer = gguf.GGUFWriter(file, "")
    writer.add_type("imatrix")
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values.numpy())
        writer.add_tensor(f"{name}.counts", np.full(1, count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_legacy(file: Path, sums: dict[str, torch.Tensor]) -> Path:
    entries = [
        struct.pack("<i", len(name)) + name.encode() + struct.pack("<2i", 3, values.numel()) + (3 * values).numpy().tobytes()
        for name, values in sums.items()
    ]  # fmt: skip
    file.write_bytes(struct.pack("<i", len(sums)) + b"".join(entries) + struct.pack("<2i", 3, 4) + b"data")
    return file


ENTRY = struct.pack("<i4s2i4f", 4, b"blk.", 3, 4, 1, 2, 3, 4)


@pytest.mark.parametrize("content", [
    struct.pack("<i", -1), struct.pack("<4i", 2**31 - 1, -12, 0, 0), struct.pack("<5i", 2**31 - 1, -4, 5, 0, 0),
    struct.pack("<i", 2) + ENTRY * 2, struct.pack("<i", 2) + ENTRY, struct.pack("<i", 1) + ENTRY[:12] + struct.pack("<i", -4) + ENTRY[16:],
    struct.pack("<i", 1) + ENTRY[:8] + struct.pack("<i", -3) + ENTRY[12:], struct.pack("<2i", 2**31 - 1, 0) + bytes(10**6),
])  # fmt: skip
def test_wrong_counts_of_an_importance_matrix_are_refused_at_once(content, tmp_path):
    """Negative and huge counts and lengths, a missing entry, and a matrix given twice."""
    (tmp_path / "whole").write_bytes(struct.pack("<i", 1) + ENTRY)
    assert read_imatrix(tmp_path / "whole")["blk."].tolist() == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
    (tmp_path / "wrong").write_bytes(content)
    started = time.process_time()
    with pytest.raises(ValueError, match="wrong is damaged, or not an importance matrix"):
        read_imatrix(tmp_path / "wrong")
    assert time.process_time() - started < 2


@pytest.mark.long
def test_importance_from_either_format_makes_the_errors_of_inputs_smaller(calibrated, tmp_path):
    source, sums = calibrated
    files = [tmp_path / f"{name}.gguf" for name in ("plain", "file", "legacy")]
    imatrix, legacy = write_imatrix(tmp_path / "imatrix.gguf", sums), write_legacy(tmp_path / "imatrix.dat", sums)
    for file, option in zip(files, [{}, {"imatrix": imatrix}, {"imatrix": legacy}], strict=True):
        export_gguf(source, file, "q4_k_m", **option)
    plain, of_file, of_legacy = (np.fromfile(file, np.uint8)[-200_000:] for file in files)
    assert (of_file != plain).mean() > 0.1 and (of_legacy != of_file).mean() < 0.001
    weights = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    name, errors = "blk.1.ffn_down.weight", []
    for file in files[:2]:
        (stored,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)
        difference = dequantized(stored.data, stored.tensor_type.name) - weights["model.layers.1.mlp.down_proj.weight"]
        errors.append((difference.square() * sums[name]).sum())
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.long
def test_keys_of_layers_that_share_others_need_no_importance(exported, tmp_path):
    source, file = exported("gemma3n_text")
    found = {tensor.name: int(tensor.shape[0]) for tensor in gguf.GGUFReader(file).tensors}
    sums = {
        name: torch.ones(size)
        for name, size in found.items()
        if re.match(r"blk\.(1?\d\.|.*attn_[qo]|.*ffn|.*inp_gate|.*proj)", name)
    }
    assert not {"blk.20.attn_k.weight", "blk.22.attn_v.weight"} & sums.keys()
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", sums)
    export_gguf(source, tmp_path / "other.gguf", "q4_0", imatrix=imatrix)
    del sums["blk.19.attn_k.weight"]
    with pytest.raises(ValueError, match="lacks 1 of the .*, such as blk.19.attn_k.weight"):
        export_gguf(source, tmp_path / "third.gguf", "q4_0", imatrix=write_imatrix(imatrix, sums))


@pytest.mark.parametrize(("kind", "make", "message"), [
    ("q4_k", lambda folder, rows, sums: {}, "Did you mean 'q4_k_m'"),
    ("q8_0", lambda folder, rows, sums: {"imatrix": rows}, "--imatrix has no effect on q8_0"),
    ("f16", lambda folder, rows, sums: {"imatrix": rows}, "--imatrix has no effect on f16"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": folder / "nowhere.gguf"}, "no such file: .*nowhere.gguf"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": rows}, "is damaged, or not an importance matrix"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": cut(write_imatrix(folder / "i", sums))}, "is truncated"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": cut(write_legacy(folder / "i", sums))}, "is damaged, or not an"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": write_imatrix(folder / "i", dict(list(sums.items())[1:]))}, "lacks 1 of the 21 matrices to quantize, such as blk.0.attn_q.weight"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": write_imatrix(folder / "i", {n: v[:64] for n, v in sums.items()})}, "has 64 numbers for blk.0.attn_q.weight; expected 256"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": write_imatrix(folder / "i", {n: v / 0 for n, v in sums.items()})}, "negative or infinite"),
])  # fmt: skip
def test_bad_input_leaves_no_file(kind, make, message, calibrated, tmp_path):
    source, sums = calibrated
    (rows := tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        export_gguf(source, tmp_path / "out" / "model.gguf", kind, **make(tmp_path, rows, sums))
    assert not list((tmp_path / "out").iterdir())


def cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-2000])
    return file


def test_weights_above_float16_scales(make_model_folder, tmp_path):
    source = make_model_folder(tokenizer=qwen_tokenizer())
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e8
    model.save_pretrained(source)
    with pytest.raises(ValueError, match="too large for the float16 scales"):
        export_gguf(source, tmp_path / "out" / "model.gguf", "q4_0")
    assert not list((tmp_path / "out").iterdir())
