"""Quantized GGUF kinds against llama.cpp's quantizer and the `gguf` package, and files against transformers."""

import ctypes
import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from lean_ft.cli.main import run_command_line
from lean_ft.export import GGUF_KINDS, export_gguf
from lean_ft.gguf.check import gguf_family
from lean_ft.gguf.importance import calibrate, read_imatrix
from lean_ft.gguf.quantize import FORMATS, Mix, num_bytes, quantize
from lean_ft.models import load_model
from lean_ft.tokenizers import load_tokenizer
from tests.export.conftest import qwen_tokenizer
from tests.gguf.test_llama_cpp import CASES

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
])  # fmt: skip
def test_kinds_of_a_file_are_llama_cpps(kind, part, facts, expected):
    columns, rows = facts.pop("columns", 512), facts.pop("rows", (64,))
    values = {"architecture": "llama", "num_layers": 24, "heads_per_group": 1, "num_experts": 0, "is_tied": False}
    mix = Mix(kind, **{**values, "has_importance": False, **facts})
    found = [mix.kind_of(f"blk.{layer}.{part}.weight", (*rows, columns)) for layer in range(24)]
    assert {one: {layer for layer in LAYERS if found[layer] == one} for one in found} == expected


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
def calibrated(make_model_folder, tmp_path_factory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A model, rows of ids, and by the name in the file the sums of squared inputs, from transformers."""
    source = make_model_folder("Llama", tokenizer=qwen_tokenizer(), **SIZES)
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
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
    return source, rows, sums


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


def loss(model: torch.nn.Module) -> float:
    """The mean cross-entropy of the rows."""
    sums = [
        torch.nn.functional.cross_entropy(model(torch.tensor([ids]))[0, :-1], torch.tensor(ids[1:]), reduction="sum")
        for ids in IDS
    ]
    return float(sum(sums)) / sum(len(ids) - 1 for ids in IDS)


def test_importance_from_rows_and_from_files_is_the_same(calibrated, tmp_path):
    source, rows, sums = calibrated
    files = [tmp_path / f"{name}.gguf" for name in ("plain", "rows", "file", "legacy")]
    imatrix, legacy = write_imatrix(tmp_path / "imatrix.gguf", sums), write_legacy(tmp_path / "imatrix.dat", sums)
    options = [{}, {"data": str(rows)}, {"imatrix": imatrix}, {"imatrix": legacy}]
    told = [str(export_gguf(source, file, "q4_k_m", **option)) for file, option in zip(files, options, strict=True)]
    plain, of_rows, of_file, of_legacy = (np.fromfile(file, np.uint8)[-200_000:] for file in files)
    assert (of_rows != plain).mean() > 0.1
    assert (of_rows != of_file).mean() < 0.001 > (of_legacy != of_file).mean()

    # The inputs' errors are smaller with importance.
    weights = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    name, errors = "blk.1.ffn_down.weight", []
    for file in files[:2]:
        (stored,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)
        difference = dequantized(stored.data, stored.tensor_type.name) - weights["model.layers.1.mlp.down_proj.weight"]
        errors.append((difference.square() * sums[name]).sum())
    assert errors[1] < 0.97 * errors[0]

    before, after = map(float, re.search(r"perplexity on .*: ([\d.e+]+) before, ([\d.e+]+) after", told[1]).groups())
    with torch.no_grad():
        expected = [np.exp(loss(load_model(path))) for path in (source, files[1])]
    assert (before, after) == (pytest.approx(expected[0], rel=1e-3), pytest.approx(expected[1], rel=1e-3))
    assert before != pytest.approx(after, rel=1e-3)
    assert "perplexity" not in told[2]


def halves(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def interleaved(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[:, ::2].clamp(max=7.0), x[:, 1::2].clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1.0)


def tiled(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 3, 16).transpose(0, 1).flatten()  # of 2 key heads with 3 value heads each


class OneCase:
    """A model of a case and the rows of --calibrate."""

    def __init__(self, case: str, make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
        self.name, settings = CASES[case]
        untied = {"tie_word_embeddings": False} if case == "falcon_h1" else {}
        self.source, self.rows = make_model_folder(self.name, tokenizer=qwen_tokenizer(), **settings | untied), tmp_path / "rows.jsonl"  # fmt: skip
        self.rows.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
        self.model = load_model(self.source)
        self.family = gguf_family(self.model, self.source)

    def importance(self) -> dict[str, torch.Tensor]:
        return calibrate(self.model, self.family, load_tokenizer(self.source), str(self.rows)).importance

    def inputs(self, module: str) -> tuple[Any, list[tuple[torch.Tensor, ...]]]:
        """A module of transformers' model, and its inputs in a forward pass of each row."""
        theirs, inputs = getattr(transformers, f"{self.name}ForCausalLM").from_pretrained(self.source), []
        watched = theirs.get_submodule(module)
        watched.register_forward_pre_hook(
            lambda _, args, named: inputs.append((*args, *named.values())), with_kwargs=True
        )
        with torch.no_grad():
            for ids in IDS:
                theirs(torch.tensor([ids]))
        return watched, inputs


@pytest.mark.parametrize(("case", "layer", "place", "activation"), [
    ("qwen3_moe", 0, "mlp", halves), ("gpt_oss", 1, "mlp", interleaved), ("llama4_text", 1, "feed_forward", halves),
])  # fmt: skip
def test_importance_of_experts_is_that_of_the_tokens_they_see(
    case, layer, place, activation, make_model_folder, tmp_path
):
    one = OneCase(case, make_model_folder, tmp_path)
    found = one.importance()
    experts, inputs = one.inputs(f"model.layers.{layer}.{place}.experts")
    bias = getattr(experts, "gate_up_proj_bias", None)
    for expert, into in enumerate(experts.gate_up_proj.detach()):
        if case == "llama4_text":  # each expert gets all tokens, and zeros for tokens of other experts
            seen = torch.cat(
                [tokens.view(len(experts.gate_up_proj), -1, tokens.shape[-1])[expert] for (tokens,) in inputs]
            )
            seen = seen[seen.any(1)]
        else:
            seen = torch.cat([tokens.flatten(0, -2)[(chosen == expert).any(-1)] for tokens, chosen, *_ in inputs])
        inner = seen @ (into.T if case == "qwen3_moe" else into)
        inner = activation(inner if bias is None else inner + bias[expert].detach())
        for name, values in (("gate", seen), ("up", seen), ("down", inner)):
            expected = values.square().mean(0) if len(values) else torch.ones(values.shape[1])
            torch.testing.assert_close(
                found[f"blk.{layer}.ffn_{name}_exps.weight"][expert], expected, rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize(("case", "module", "matrix", "order"), [
    ("deepseek_v3", "1.self_attn.q_a_proj", "1.attn_q_a", lambda x: x),
    ("deepseek_v3", "1.self_attn.kv_b_proj", "1.attn_v_b", lambda x: x.expand(4, -1)),
    ("qwen3_5_moe_text", "1.linear_attn.out_proj", "1.ssm_out", tiled),
    ("falcon_h1", "1.feed_forward.down_proj", "1.ffn_down", lambda x: x),
])  # fmt: skip
def test_importance_of_matrices_that_the_file_changes(case, module, matrix, order, make_model_folder, tmp_path):
    one = OneCase(case, make_model_folder, tmp_path)
    _, inputs = one.inputs(f"model.layers.{module}")
    expected = order(torch.cat([values.flatten(0, -2) for (values,) in inputs]).square().mean(0))
    torch.testing.assert_close(one.importance()[f"blk.{matrix}.weight"], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "make", "message"), [
    ("q4_k", lambda folder, rows, sums: {}, "Did you mean 'q4_k_m'"),
    ("q8_0", lambda folder, rows, sums: {"data": str(rows)}, "--calibrate has no effect on q8_0"),
    ("f16", lambda folder, rows, sums: {"imatrix": rows}, "--imatrix has no effect on f16"),
    ("q4_k_m", lambda folder, rows, sums: {"data": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": folder / "nowhere.gguf"}, "no such file: .*nowhere.gguf"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": rows}, "is damaged, or not an importance matrix"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": cut(write_imatrix(folder / "i", sums))}, "is truncated"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": cut(write_legacy(folder / "i", sums))}, "is damaged, or not an"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": write_imatrix(folder / "i", dict(list(sums.items())[1:]))}, "lacks 1 of the 21 matrices to quantize, such as blk.0.attn_q.weight"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": write_imatrix(folder / "i", {n: v[:64] for n, v in sums.items()})}, "has 64 numbers for blk.0.attn_q.weight; expected 256"),
    ("q4_k_m", lambda folder, rows, sums: {"imatrix": write_imatrix(folder / "i", {n: v / 0 for n, v in sums.items()})}, "negative or infinite"),
])  # fmt: skip
def test_bad_input_leaves_no_file(kind, make, message, calibrated, tmp_path):
    source, rows, sums = calibrated
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


@pytest.mark.parametrize(("options", "message"), [
    (["--calibrate", "rows.jsonl"], "--calibrate is only used with --gguf"),
    (["--gguf", "q4_0", "--imatrix", "a.gguf", "--calibrate", "rows.jsonl"], "--imatrix cannot be combined with --calibrate"),
])  # fmt: skip
def test_options_that_do_not_fit(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command_line(["export", "tiny", str(tmp_path / "model.gguf"), *options])
    assert message in " ".join(capsys.readouterr().err.split())
