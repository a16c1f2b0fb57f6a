"""Adafactor equals transformers' with relative steps and parameter scaling off."""

import pytest
import torch

from tests.optim.tiny_training import train_both

transformers = pytest.importorskip("transformers")
SHAPES = [(700, 300), (3, 40, 50), (37,), (1, 9), (9, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from transformers.optimization import Adafactor

    torch.manual_seed(0)
    scales = (1.0, 0.1, 20.0, 1.0)  # one of the updates exceeds the largest RMS
    ours, theirs, state, expected = train_both(
        torch.randn(shape).to(dtype),
        {"name": "adafactor"},
        lambda params: Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=False, weight_decay=0.0),
        [scale * torch.randn(shape) * torch.rand(shape[-1:]) for scale in scales],
    )
    torch.testing.assert_close(ours, theirs, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            torch.testing.assert_close(state[key], value.float(), rtol=1e-4, atol=1e-8)
