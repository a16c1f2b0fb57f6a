"""AdamW with torchao's 8-bit and 4-bit states against torchao's optimizers."""

import pytest
import torch

from lean_ft.optim import slices
from lean_ft.optim.adamw_4bit import SIGNED_VALUES
from tests.optim.tiny_training import train_both

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
    decay = 0.1 if len(shape) == 2 else 0.0  # torchao also decays vectors
    ours, theirs, state, expected = train_both(
        torch.randn(shape).to(dtype),
        {"name": name, "weight_decay": decay},
        lambda params: getattr(torchao, reference)(params, lr=1e-2, weight_decay=decay),
        [torch.randn(shape) * torch.rand(shape[-1]) for _ in range(5)],
    )
    close = torch.isclose(ours.float(), theirs.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert close.double().mean() > 0.999  # a number halfway between two codes may round either way
    if bytes_per_parameter is not None:
        for key in ("exp_avg", "exp_avg_sq"):
            assert (state[key] == expected[key].codes).double().mean() > 0.999
            torch.testing.assert_close(state[f"{key}_scale"], expected[key].scale, rtol=1e-2, atol=1e-9)
        num_bytes = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("exp_avg"))
        assert num_bytes == bytes_per_parameter * ours.numel()


def test_4_bit_values_equal_torchao() -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    torch.testing.assert_close(torch.tensor(SIGNED_VALUES), torch.tensor(create_dynamic_map(True, 3, 4)))


def test_an_incomplete_last_block_of_4_bit_codes_is_updated_like_the_others() -> None:
    """Gradients of equal size in a block are stored exactly, so the update equals float32 AdamW."""
    torch.manual_seed(0)
    start = torch.randn(1, 4096 + 57)
    ours, theirs, _, _ = train_both(
        start,
        {"name": "adamw_4bit", "weight_decay": 0.0},
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
        [torch.full_like(start, size) for size in (1.0, 3.0, 0.5)],
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
