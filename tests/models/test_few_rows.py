"""Products of few rows on a CPU in 16 bits, with and without packed weights."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lean_ft import torch_private
from lean_ft.generation import Sampling, decoding, sample
from lean_ft.models import FewRows, few_rows, load_model
from tests.models.conftest import make_checkpoint

__all__ = ["make_checkpoint"]


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
