"""Products of few rows on a CPU in 16 bits, with and without packed weights."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lean_ft import torch_private
from lean_ft.generation import Sampling, decoding, sample
from lean_ft.models import FewRows, few_rows, load_model, pack_in_place
from lean_ft.peft import apply_lora
from lean_ft.peft.layers import LoRALinear
from lean_ft.settings import LoRAConfig
from tests.models.conftest import make_checkpoint

__all__ = ["make_checkpoint"]


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize("most_bytes", [0, 10_000, 1e9])
@pytest.mark.parametrize("case", ["qwen2", "llama_biases", "llama_wide_heads_tied"])
def test_products_are_the_models(make_checkpoint, monkeypatch, case: str, most_bytes: float) -> None:
    model: Any = load_model(make_checkpoint(case)[0], dtype=torch.bfloat16)
    before, calls = [dict(vars(module)) for module in model.modules()], []
    original: Any = torch_private.packed_linear
    monkeypatch.setattr(
        torch_private, "packed_linear", lambda *args: calls.append(args) or original(*args), raising=False
    )
    for factor in (1.0, -2.0):
        model.layers[0].mlp.down_proj.weight.mul_(factor)  # copies are made anew
        for shape in ((1, 1), (3, 1), (8, 1), (5, 9)):
            ids = torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(0))
            expected, few = model(ids), FewRows(model, most_bytes)
            calls.clear()
            with few:
                torch.testing.assert_close(model(ids), expected, atol=0.1, rtol=0.1)
            packs = most_bytes == 1e9 and few_rows._can_pack(torch.bfloat16)  # oneDNN cannot on a CPU with AVX2 alone
            assert len(calls) == (7 * len(model.layers) + 1 if packs else 0)
    assert [dict(vars(module)) for module in model.modules()] == before and not few_rows._packed


def test_only_long_generation_packs_weights(make_checkpoint, monkeypatch) -> None:
    model, asked = load_model(make_checkpoint("llama")[0], dtype=torch.bfloat16), []
    monkeypatch.setattr(decoding, "FewRows", lambda model, most=0: asked.append(most) or FewRows(model, most))
    for tokens, compile in ((31, False), (32, False), (32, True)):
        monkeypatch.setattr(decoding, "CompiledLayers", lambda model: nullcontext())
        sample(model, [[1, 2], [3]], Sampling(tokens), compile=compile)
    assert [most > 2**20 for most in asked] == [False, True, False]


@pytest.mark.first(2)
@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen2", "llama_wide_heads_tied", "phimoe", "deepseek_v3", "gemma4_text", "bamba"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_packed_in_place_generates_the_same_and_keeps_no_second_copy(
    make_checkpoint, case: str, adapter: bool
) -> None:
    if not few_rows._can_pack(torch.bfloat16):
        pytest.skip("oneDNN cannot on a CPU with AVX2 alone")
    model: Any = load_model(make_checkpoint(case)[0], dtype=torch.bfloat16)
    if adapter:
        apply_lora(model, LoRAConfig(rank=2, targets=["o_proj"]))
        for one in model.modules():
            if isinstance(one, LoRALinear):
                one.lora_B.normal_(generator=torch.Generator().manual_seed(0))
    prompts, ids = [[1, 5, 7, 9, 3], [2, 4]], torch.arange(1, 13).view(2, 6)
    expected, asked = model(ids), Sampling(8, temperature=0.0)
    first = sample(model, prompts, asked)
    linear = {name: weakref.ref(m.weight) for name, m in model.model.named_modules() if type(m) is nn.Linear}
    is_tied, num_bytes = model.head is None, sum(weight.nbytes for weight in model.parameters())
    pack_in_place(model, 1e9)
    torch.testing.assert_close(model(ids), expected, atol=0.02, rtol=0.02)
    for before, after in zip(first, sample(model, prompts, asked), strict=True):
        assert before.log_probs[0] == pytest.approx(after.log_probs[0], abs=0.02)
    kept = {name.rpartition(".")[2] for name, weight in linear.items() if weight() is not None}
    assert kept == set(["kv_b_proj"] * (case == "deepseek_v3") + ["base_layer"] * adapter)
    assert model.head.weight.is_mkldnn
    copies = model.head.weight.nbytes if is_tied else 0
    assert sum(weight.nbytes for weight in model.parameters()) == num_bytes + copies
    with torch.enable_grad(), pytest.raises((RuntimeError, NotImplementedError)):
        model(ids)


def test_a_tied_embedding_is_copied_only_if_memory_allows(make_checkpoint) -> None:
    model: Any = load_model(make_checkpoint("llama_wide_heads_tied")[0], dtype=torch.bfloat16)
    pack_in_place(model, model.output_weight.nbytes - 1)
    assert model.head is None and not model.output_weight.is_mkldnn


@torch.no_grad()
@pytest.mark.parametrize("dtype", few_rows.DTYPES)
@pytest.mark.parametrize("has_amx", [False, True])
def test_only_a_cpu_with_amx_multiplies_by_transposed_rows(monkeypatch, has_amx: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(few_rows, "_HAS_AMX", has_amx)
    weight, bias = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype)
    plain, shapes = nn.functional.linear, list[int]()
    monkeypatch.setattr(few_rows.F, "linear", lambda x, *rest: shapes.append(x.shape[0]) or plain(x, *rest))
    for rows in (1, 2, 8, 32, 33):
        x = torch.randn(rows, 32).to(dtype)
        found = few_rows.few_rows_linear(x, weight, bias)
        torch.testing.assert_close(found, plain(x, weight, bias), atol=0.05, rtol=0.05)
    assert shapes == ([1, 33] if has_amx else [1, 2, 8, 32, 33])
