"""AdamW with torchao's 8-bit states against torchao's own optimizer."""

import pytest
import torch
from torch import nn

from lean_ft.optim import slices
from tests.optim.tiny_training import build

pytest.importorskip("torchao.optim")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256), (63, 130), (17,)], ids=["codes", "no whole blocks", "small"])
def test_weights_and_states_are_torchaos(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(slices, "CPU_SLICE", 1024)
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape).to(dtype))
    theirs = nn.Parameter(ours.detach().clone())
    # torchao decays vectors too
    decay = 0.1 if len(shape) == 2 else 0.0
    optimizer = build(nn.ParameterList([ours]), {"name": "adamw_8bit_torchao", "weight_decay": decay})
    expected = AdamW8bit([theirs], lr=1e-2, weight_decay=decay)
    optimizer.set_lr(1e-2)
    for _ in range(5):
        ours.grad = (torch.randn(shape) * torch.rand(shape[-1])).to(dtype)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    close = torch.isclose(ours.float(), theirs.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert close.double().mean() > 0.999
    if shape == (64, 256):
        state, theirs_state = optimizer.state_dict(), expected.state[theirs]
        for key in ("exp_avg", "exp_avg_sq"):
            assert (state[f"0.{key}"] == theirs_state[key].codes).double().mean() > 0.999
            torch.testing.assert_close(state[f"0.{key}_scale"], theirs_state[key].scale, rtol=1e-2, atol=1e-9)
        assert optimizer.state_bytes == (2 + 8 / 256) * 64 * 256


def test_the_compiled_update_is_the_plain_one() -> None:
    weights = []
    for compile in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 256))
        optimizer = build(nn.ParameterList([weight]), {"name": "adamw_8bit_torchao"}, compile=compile)
        optimizer.set_lr(1e-2)
        for _ in range(3):
            weight.grad = torch.randn(64, 256)
            optimizer.step()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-4)
