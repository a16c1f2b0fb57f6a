"""Stochastic rounding is unbiased, and the workspace of a step is a few slices."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lean_ft.optim.adamw_8bit import noise_keys
from lean_ft.optim.build import MATRIX_RULES
from lean_ft.optim.slices import RoundingNoise, store
from tests.optim.hashed_noise import HashedNoise
from tests.optim.tiny_training import CONFIGS

Draw = Callable[..., torch.Tensor]
ROOT = Path(__file__).resolve().parents[2]


def noise(num_elements: int, seed: int = 0, index: int = 0) -> torch.Tensor:
    return RoundingNoise(torch.device("cpu"), seed, index).draw(num_elements)


def hashed_noise(num_elements: int, seed: int = 0, index: int = 0) -> torch.Tensor:
    """As the Triton kernel of 8-bit AdamW draws it."""
    return HashedNoise(noise_keys(seed + index)).draw(num_elements)


DRAWS = pytest.mark.parametrize("draw", [noise, hashed_noise])


@DRAWS
@pytest.mark.parametrize("value", [1.0 + 2**-9, -1.0 - 3 * 2**-10, 1e-3, 3e-39, -2e30])
def test_rounding_goes_to_a_neighbour_and_is_unbiased(value: float, draw: Draw) -> None:
    n = 400_000
    rounded = torch.empty(n, dtype=torch.bfloat16)
    exact = torch.full((n,), value)
    store(rounded, exact, draw(n))
    found = rounded.double().unique()
    low, high = found.min(), found.max()
    assert len(found) == 2 and low < exact[0].double() < high
    share = (exact[0].double() - low) / (high - low)
    assert (rounded.double() == high).double().mean().item() == pytest.approx(share.item(), abs=4e-3)


def test_rounding_leaves_exact_values_infinities_and_nan_as_they_are() -> None:
    special = torch.tensor([1.5, -0.0, 0.0, float("inf"), -float("inf"), float("nan")])
    hidden = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN with every bit set, as on CUDA
    values = torch.cat([special, hidden]).repeat(1000)
    rounded = torch.empty(8000, dtype=torch.bfloat16)
    store(rounded, values, noise(8000))
    torch.testing.assert_close(rounded.float(), values, rtol=0, atol=0, equal_nan=True)


@DRAWS
def test_noise_is_the_same_for_a_seed_and_differs_between_parameters(draw: Draw) -> None:
    assert torch.equal(draw(1001, 3, 1), draw(1001, 3, 1))
    assert (draw(1001, 3, 1) == draw(1001, 3, 2)).float().mean() < 0.01
    bits = (draw(40_000)[:, None].int() >> torch.arange(16)) & 1
    assert (bits.float().mean(0) - 0.5).abs().max() < 0.02  # each of the 16


@DRAWS
def test_noise_of_neighbours_and_of_other_updates_is_independent(draw: Draw) -> None:
    """Correlations of n independent numbers have a standard deviation of n ** -0.5, here 0.002."""
    n = 2**18
    first, *others = (draw(n + 2, seed, index).double() for seed, index in ((0, 0), (0, 1), (1, 0), (2**16, 0)))
    for other in (first[1:], first[2:], *others):
        assert torch.corrcoef(torch.stack([first[:n], other[:n]]))[0, 1].abs() < 0.01


# Rules that update element by element; the others need a whole matrix.
ELEMENTWISE = {name: config for name, config in CONFIGS.items() if config["name"] not in MATRIX_RULES}


MEASURE_WORKSPACE = """
import sys
import torch
import torchao.optim  # the library itself is no workspace
from tests.optim.test_slices import ELEMENTWISE
from tests.optim.tiny_training import build

def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

model = torch.nn.Linear(896, 30_000, bias=False, dtype=torch.bfloat16)  # 51 MiB; a float32 copy is 103 MiB
model.weight.grad = torch.randn_like(model.weight)
for name, settings in ELEMENTWISE.items():
    optimizer = build(model, settings)
    optimizer.set_lr(1e-3)
    for tensor in optimizer.state_dict().values():
        tensor.add_(0)  # makes its pages resident
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = peak_kib()
    optimizer.finish_gradients()
    optimizer.step()
    print(name, (peak_kib() - before) // 1024)
    del optimizer, tensor
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resets the peak resident size through /proc")
def test_the_workspace_of_a_step_does_not_grow_with_the_largest_tensor() -> None:
    """In a separate process, where memory that the allocator keeps also counts."""
    done = subprocess.run([sys.executable, "-c", MEASURE_WORKSPACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    workspace_mib = {name: int(mib) for name, mib in (line.split() for line in done.stdout.splitlines())}
    assert workspace_mib.keys() == ELEMENTWISE.keys()
    assert max(workspace_mib.values()) < 30, workspace_mib
