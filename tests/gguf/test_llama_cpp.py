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

from lean_ft.export import GGUF_KINDS, export_gguf
from lean_ft.gguf.open import GGUF_FAMILIES
from lean_ft.models import load_model
from lean_ft.tokenizers import load_tokenizer
from tests.export.conftest import qwen_tokenizer
from tests.gguf.cases import CASES, GRANITE
from tests.gguf.llama_server import LlamaServer

pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")

NUM_GREEDY = 32
WITH_GELU = {"starcoder2", "phi", "gpt_neox", "gpt2", "gpt_bigcode"}


class GELUFromTable(TorchDispatchMode):
    """GELU as llama.cpp computes it on a CPU, between -10 and 10 from a table in float16, and its deviation of
    gates."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.std.correction, torch.ops.aten.std_mean.correction):  # that of a sample
            return func(*args, **{**(kwargs or {}), "correction": 1})
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
    """Inputs of GELU that differ in the last bit may round to different entries of llama.cpp's table."""
    return 5e-3 if "gemma" in case or case.partition("/")[0] in WITH_GELU else 1e-3


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
    assert {case.partition("/")[0] for case in CASES} == GGUF_FAMILIES.keys()


def test_fields_that_config_json_leaves_out(make_model_folder, tmp_path):
    source = make_model_folder("Granite", tokenizer=qwen_tokenizer(), **GRANITE)
    config = json.loads((source / "config.json").read_text())
    del config["logits_scaling"]
    (source / "config.json").write_text(json.dumps(config))
    export_gguf(source, tmp_path / "model.gguf", "f32")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.long] * (c != "llama")) for c in CASES])
def test_llama_cpp_computes_the_same(case, exported):
    source, file = exported(case)
    model, server = load_model(source), LlamaServer(file)
    assert model.source.config["model_type"] == case.partition("/")[0]
    assert_same_log_probs(model, server, tolerance(case))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "/" not in c and c not in ("exaone4", "bamba", "gpt_oss", "minicpm3")]
    + ["exaone4/no_windows"],
)
@torch.no_grad()
def test_llama_cpp_reads_every_kind(case, exported, tmp_path):
    """Its log-probabilities are nearer to those of the rounded weights than to those of the model."""
    (source, _), file = exported(case), tmp_path / "model.gguf"
    for kind in GGUF_KINDS.keys() - {"f32", "f16", "bf16"}:
        export_gguf(source, file, kind, force=True)
        server, models, differences = LlamaServer(file), (load_model(file), load_model(source)), []
        for offset in range(6):
            ids = [(7 * i + i * i + offset) % 390 + 5 for i in range(5, 30)]
            if found := ask(server, ids):
                tokens, of_server = [one["id"] for one in found], torch.tensor([one["logprob"] for one in found])
                expected = [model(torch.tensor([ids]))[0, -1].log_softmax(-1)[tokens] for model in models]
                differences.append([(of_server - one).square().mean().sqrt() / one.std() for one in expected])
        rounded, whole = torch.tensor(differences).median(0).values.tolist()
        assert rounded < max(0.2, 0.4 * whole), kind  # llama.cpp rounds inputs to 8 bits too


@pytest.mark.long
@pytest.mark.parametrize(("kind", "bound"), [("q8_0", 0.25), ("f32", 1e-3), ("q4_k_m", 1.0)])
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


@pytest.mark.long
@pytest.mark.parametrize(("kind", "hidden_size"), [
    *((kind, 256) for kind in ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl", "mxfp4")), ("q4_k_m", 96),
    ("q5_k_m", 96),
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
