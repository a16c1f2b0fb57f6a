"""Adafactor against transformers', with relative steps and parameter scaling off, as its Trainer uses it."""

import pytest
import torch
from torch import nn

from tests.optim.tiny_training import build

transformers = pytest.importorskip("transformers")
SHAPES = [(700, 300), (3, 40, 50), (37,), (1, 9), (9, 1)]


def reference(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=False, weight_decay=0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape).to(dtype))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer, expected = build(nn.ParameterList([ours]), {"name": "adafactor"}), reference([theirs])
    optimizer.set_lr(1e-2)
    for scale in (1.0, 0.1, 20.0, 1.0):  # an update over the largest RMS among them
        ours.grad = (scale * torch.randn(shape) * torch.rand(shape[-1:])).to(dtype)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    ulp = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=ulp, atol=1e-5)
    state = optimizer.state_dict()
    for key, value in expected.state[theirs].items():
        if isinstance(value, torch.Tensor) and value.ndim:
            torch.testing.assert_close(state[f"0.{key}"], value.float(), rtol=1e-4, atol=1e-8)


def test_only_matrices_decay_and_by_the_learning_rate() -> None:
    model = nn.Linear(4, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = build(model, {"name": "adafactor", "weight_decay": 0.5})
    optimizer.set_lr(0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((3, 4), 0.95))
    assert torch.equal(model.bias.detach(), torch.ones(3))
