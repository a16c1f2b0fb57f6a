"""The grouped products' own kernels: their values in Triton's interpreter, and code for each card that does not wait."""

import os
import subprocess
import sys

import pytest
import torch

from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer

# In float16 and float32: the interpreter multiplies bfloat16 as if it were integers.
VALUES = """
import itertools, torch
from lean_ft.models.grouped_kernels import multiply, multiply_outer
torch.manual_seed(0)
bounds = [0, 0, 70, 70, 100, 229]  # groups of no rows, of less than a block, of several
ends = torch.tensor(bounds[1:], dtype=torch.int32)
parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
for dtype, tolerance in ((torch.float32, 3e-7), (torch.float16, 4e-4)):
    for inputs, outputs in ((48, 80), (48, 4), (4, 80), (130, 20)):
        rows, right = (torch.randn(229, n).to(dtype) for n in (inputs, outputs))
        matrices = torch.randn(5, inputs, outputs).to(dtype)
        exact = torch.cat([rows[part].double() @ matrix.double() for part, matrix in zip(parts, matrices)])
        exact_outer = torch.stack([rows[part].double().T @ right[part].double() for part in parts])
        transposed = matrices.mT.contiguous().mT  # other strides
        for found, true in (
            (multiply(rows, matrices, ends), exact),
            (multiply(rows, transposed, ends), exact),
            (multiply_outer(rows, right, ends), exact_outer),
        ):
            assert found.dtype == dtype and (found - true).norm() < tolerance * true.norm(), (dtype, inputs, outputs)
print("right")
"""


@pytest.mark.cards("H100")
def test_the_kernels_values_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", VALUES]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "right\n"


@pytest.mark.cards("T4", "A100", "H100")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (64, 4), (4, 96)])
def test_no_product_waits(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Whole matrices, and the thin ones of an adapter of rank 4, which PyTorch's own kernel does not take."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card does not compute in bfloat16")
    ends = torch.arange(64, 513, 64, dtype=torch.int32).cuda()
    rows, right = (torch.randn(512, n, device="cuda").to(dtype) for n in (inputs, outputs))
    matrices = torch.randn(8, inputs, outputs, device="cuda").to(dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        product = grouped_matmul(rows, matrices, ends)
        grouped_matmul(right, matrices.mT, ends)
        outer = grouped_outer(rows, right, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert product.shape == (512, outputs) and outer.shape == (8, inputs, outputs)
