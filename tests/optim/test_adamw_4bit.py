"""4-bit AdamW against torchao's, and against float32 where neither rounds."""

import pytest
import torch
from torch import nn

from lean_ft.optim.adamw_4bit import SIGNED_VALUES
from tests.optim.tiny_training import build

pytest.importorskip("torchao.optim")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step, which is as long as the rest of these tests together."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_the_codes_stand_for_torchaos_values() -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    torch.testing.assert_close(torch.tensor(SIGNED_VALUES), torch.tensor(create_dynamic_map(True, 3, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_states_are_torchaos(uncompiled: None, dtype: torch.dtype) -> None:
    from torchao.optim import AdamW4bit

    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(64, 128).to(dtype))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = build(nn.ParameterList([ours]), {"name": "adamw_4bit", "weight_decay": 0.1})
    expected = AdamW4bit([theirs], lr=1e-2, weight_decay=0.1)
    optimizer.set_lr(1e-2)
    for _ in range(5):
        ours.grad = (torch.randn(64, 128) * torch.rand(128)).to(dtype)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    close = torch.isclose(ours.float(), theirs.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert close.double().mean() > 0.999  # a number halfway between two codes may be rounded to the other one
    state, theirs_state = optimizer.state_dict(), expected.state[theirs]
    for key in ("exp_avg", "exp_avg_sq"):
        assert (state[f"0.{key}"] == theirs_state[key].codes).double().mean() > 0.999
        torch.testing.assert_close(state[f"0.{key}_scale"], theirs_state[key].scale, rtol=1e-2, atol=1e-9)


def test_a_last_block_that_is_not_full_is_updated_as_the_others_are() -> None:
    """Gradients of equal size in a block are kept exactly, so that the update is float32 AdamW's."""
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(1, 4096 + 57))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = build(nn.ParameterList([ours]), {"name": "adamw_4bit", "weight_decay": 0.0})
    expected = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0)
    optimizer.set_lr(1e-2)
    for size in (1.0, 3.0, 0.5):
        ours.grad = torch.full_like(ours, size)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bytes_of_state() -> None:
    matrix = nn.Linear(256, 64, bias=False).bfloat16()
    assert build(matrix, {"name": "adamw_4bit"}).state_bytes == (1 + 8 / 128) * 256 * 64
