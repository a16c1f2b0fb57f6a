"""AdamW with torchao's 8-bit and 4-bit states against torchao's optimizers."""

import pytest
import torch
from torch import nn

from lean_ft.optim import slices
from lean_ft.optim.adamw_4bit import SIGNED_VALUES
from tests.optim.tiny_training import build

torchao = pytest.importorskip("torchao.optim")

# Optimizer name, torchao's class, shape, and bytes of state per parameter (None: not quantized).
CASES = [
    ("adamw_8bit_torchao", "AdamW8bit", (64, 256), 2 + 8 / 256),
    ("adamw_8bit_torchao", "AdamW8bit", (63, 130), None),  # incomplete last block
    ("adamw_8bit_torchao", "AdamW8bit", (17,), None),
    ("adamw_4bit", "AdamW4bit", (64, 128), 1 + 8 / 128),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "reference", "shape", "bytes_per_parameter"), CASES, ids=str)
def test_weights_and_states_equal_torchao(monkeypatch, name, reference, shape, bytes_per_parameter, dtype):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao compiles its step, which is slow
    monkeypatch.setattr(slices, "CPU_SLICE", 1024)
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape).to(dtype))
    theirs = nn.Parameter(ours.detach().clone())
    decay = 0.1 if len(shape) == 2 else 0.0  # torchao also decays vectors
    optimizer = build(nn.ParameterList([ours]), {"name": name, "weight_decay": decay})
    expected = getattr(torchao, reference)([theirs], lr=1e-2, weight_decay=decay)
    optimizer.set_lr(1e-2)
    for _ in range(5):
        ours.grad = (torch.randn(shape) * torch.rand(shape[-1])).to(dtype)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    close = torch.isclose(ours.float(), theirs.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert close.double().mean() > 0.999  # a number halfway between two codes may round either way
    if bytes_per_parameter is not None:
        state, theirs_state = optimizer.state_dict(), expected.state[theirs]
        for key in ("exp_avg", "exp_avg_sq"):
            assert (state[f"0.{key}"] == theirs_state[key].codes).double().mean() > 0.999
            torch.testing.assert_close(state[f"0.{key}_scale"], theirs_state[key].scale, rtol=1e-2, atol=1e-9)
        assert optimizer.state_bytes == bytes_per_parameter * ours.numel()


def test_4_bit_values_equal_torchao() -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    torch.testing.assert_close(torch.tensor(SIGNED_VALUES), torch.tensor(create_dynamic_map(True, 3, 4)))


def test_an_incomplete_last_block_of_4_bit_codes_is_updated_like_the_others() -> None:
    """Gradients of equal size in a block are stored exactly, so the update equals float32 AdamW."""
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
