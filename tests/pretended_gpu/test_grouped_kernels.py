"""The Triton kernels of grouped products: values in Triton's interpreter, the arithmetic generated for each card, and no waits."""

import os
import re
import subprocess
import sys

import pytest
import torch

from lean_ft.models import grouped_kernels
from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer

# Triton's interpreter multiplies bfloat16 bits as integers and truncates instead of rounding. This code does both as PTX's mma and
# cvt.rn do, so that the test sees the kernels' products and roundings.
VALUES = """
import itertools, numpy, torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from lean_ft.models.grouped_kernels import multiply, multiply_outer

def wide(tile):
    return (tile.data.astype(numpy.uint32) << 16).view(numpy.float32) if tile.dtype.scalar == tl.bfloat16 else tile.data

def create_dot(self, a, b, total, *_):
    assert a.dtype.scalar == b.dtype.scalar and total.data.dtype == numpy.float32
    return TensorHandle(numpy.matmul(wide(a), wide(b), dtype=numpy.float32) + total.data, total.dtype.scalar)

def cast(self, source, to, *_, original=InterpreterBuilder.cast_impl):
    if to.scalar != tl.bfloat16:
        return original(self, source, to)
    rounded = torch.from_numpy(numpy.ascontiguousarray(source.data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast
torch.manual_seed(0)
bounds = [0, 0, 70, 70, 100, 229]  # groups with no rows, less than a block, several blocks
ends = torch.tensor(bounds[1:], dtype=torch.int32)
parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
for dtype, tolerance in ((torch.float32, 3e-7), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)):
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
    """Full matrices, and the thin matrices of a rank-4 adapter, which PyTorch's kernel does not support."""
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


@pytest.mark.cards("H100")
def test_on_blackwell_the_products_of_empty_groups_are_made_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel leaves the memory of empty groups uninitialized."""
    multiplied = torch.full((3, 16, 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    multiplied[1] = 2.0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *operands, offs: multiplied)
    rows = torch.ones(32, 16, device="cuda", dtype=torch.bfloat16)
    product = grouped_outer(rows, rows.clone(), torch.tensor([0, 32, 32], dtype=torch.int32, device="cuda"))
    assert product.sum((1, 2)).tolist() == [0.0, 512.0, 0.0]


# Tensor core instructions per card: products of these dtypes, summed in float32. Float32 products, and all products before Ampere,
# are plain multiplications.
PRODUCTS = {
    (torch.bfloat16, 8): r"mma\.sync\S*\.f32\.bf16\.bf16\.f32",
    (torch.float16, 8): r"mma\.sync\S*\.f32\.f16\.f16\.f32",
    (torch.bfloat16, 9): r"wgmma\S*\.f32\.bf16\.bf16|mma\.sync\S*\.f32\.bf16\.bf16\.f32",
    (torch.float16, 9): r"wgmma\S*\.f32\.f16\.f16|mma\.sync\S*\.f32\.f16\.f16\.f32",
}
ROUNDED = {torch.bfloat16: r"cvt\.rn\.bf16(x2)?\.f32", torch.float16: r"cvt\.rn\.f16(x2)?\.f32"}


@pytest.mark.cards("T4", "A100", "H100")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_is_generated_multiplies_this_type_sums_float32_and_rounds_to_nearest(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    compiled, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: compiled.append(run(*args, **kwargs)))
    major, _ = torch.cuda.get_device_capability()
    if dtype == torch.bfloat16 and major < 8:
        pytest.skip("this card does not compute in bfloat16")
    ends = torch.arange(64, 513, 64, dtype=torch.int32).cuda()
    rows, right = (torch.randn(512, n, device="cuda").to(dtype) for n in (64, 96))
    matrices = torch.randn(8, 64, 96, device="cuda").to(dtype)
    grouped_kernels.multiply(rows, matrices, ends)
    grouped_kernels.multiply_outer(rows, right, ends)
    assert [kernel.name for kernel in compiled] == ["_multiply", "_multiply_outer"]
    for code in (kernel.asm["ptx"] for kernel in compiled):
        if dtype == torch.float32:
            assert "mma" not in code and "tf32" not in code and "fma.rn.f32" in code
            continue
        assert re.search(PRODUCTS[dtype, major], code) if major >= 8 else "f32" in code
        assert re.search(ROUNDED[dtype], code)
        # All matrix products are of one kind, and no sum is rounded to the narrow dtype in between.
        products = set(re.findall(r"w?g?mma\.(?:sync|mma_async)\S*", code))
        assert all(".f32." in product for product in products), products
