"""Matrix products of rows sorted into groups, each group with its own matrix.

On CUDA one kernel computes all groups, and the host does not need to know where they end: PyTorch's grouped kernel in
bfloat16 on Hopper and Blackwell; the kernels of `grouped_kernels` on other cards, in other dtypes, and for adapters'
low-rank matrices, whose rows are not multiples of 16 bytes. CPUs, and GPUs without Triton or a C compiler, loop over
the groups, for which a GPU's host waits once per product. Each product is one custom op, opaque to torch.compile.

Shapes: M rows of all groups, G groups, K and N features.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lean_ft.system.costs import Arithmetic, Cost, Launched, register_cost
from lean_ft.system.triton_compiler import HAS_TRITON

GROUPED_CAPABILITIES = ((9, 0), (10, 0))
_TILE = (128, 256)  # rows and columns of PyTorch's grouped kernel on Hopper, in the kernel's name


@torch.library.custom_op("lean_ft::grouped_matmul", mutates_args=())
def grouped_matmul(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each group's rows (M, K) times its matrix (G, K, N): (M, N). ends (G,) int32: the groups' ends; the last is M."""
    if _has_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    if (kernels := _own_kernels(rows.is_cuda, rows.dtype)) is not None:
        return kernels.multiply(rows, matrices, ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for group, part in _groups(ends):
        torch.mm(rows[part], matrices[group], out=out[part])
    return out


@grouped_matmul.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@torch.library.custom_op("lean_ft::add_grouped_matmul", mutates_args=("total",))
def add_grouped_matmul(total: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    """Add `grouped_matmul` to `total` (M, N), which the own kernel reads and writes once, without another (M, N)."""
    if (kernels := _own_kernels(rows.is_cuda, rows.dtype)) is not None:
        kernels.multiply(rows, matrices, ends, total)
    else:
        total += grouped_matmul(rows, matrices, ends)


add_grouped_matmul.register_fake(lambda *_: None)


@torch.library.custom_op("lean_ft::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Each group's transposed rows of left (M, K) times its rows of right (M, N): (G, K, N), zero for a group without
    rows. This is the gradient of the matrices of `grouped_matmul`."""
    if _has_kernel(left, right):
        out = F.grouped_mm(left.T, right, offs=ends)
        if torch.cuda.get_device_capability(left.device) >= (10, 0):
            # Blackwell's kernel leaves the products of empty groups uninitialized (pytorch issue 172439).
            out.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
        return out
    if (kernels := _own_kernels(left.is_cuda, left.dtype)) is not None:
        return kernels.multiply_outer(left, right, ends)
    out = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for group, part in _groups(ends):
        torch.mm(left[part].T, right[part], out=out[group])
    return out


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(len(ends), left.shape[1], right.shape[1])


_OPS = torch.ops.lean_ft


@register_flop_formula([_OPS.grouped_matmul, _OPS.add_grouped_matmul, _OPS.grouped_outer])
def _num_flops(*shapes: Sequence[int], **_: object) -> int:
    left_shape, right_shape, _ends = shapes[-3:]
    return 2 * math.prod(left_shape) * right_shape[-1]


def _launched(capability: tuple[int, int], rows: Tensor, *_: Tensor) -> Launched:
    is_pytorchs = rows.dtype == torch.bfloat16 and capability in GROUPED_CAPABILITIES
    return Launched(2 if is_pytorchs else 1)  # PyTorch's kernel, and its sizes and addresses


def _arithmetic(capability: tuple[int, int], longest_document: int, *operands: Tensor) -> Arithmetic:
    """A group's last tile of rows is half empty on average, and a row's last tile of columns is filled up."""
    rows, matrices, _ends = operands[-3:]
    (num_rows, inner), (num_groups, _, columns) = rows.shape, matrices.shape
    tile_rows, tile_columns = _TILE
    computed = (num_rows + num_groups * tile_rows / 2) * (-(-columns // tile_columns) * tile_columns)
    return Arithmetic(2.0 * num_rows * columns * inner, 2.0 * (computed - num_rows * columns) * inner)


register_cost(_OPS.grouped_matmul, Cost(_launched, gpu_arithmetic=_arithmetic, first_factor=0))
register_cost(_OPS.grouped_outer, Cost(_launched))
register_cost(_OPS.add_grouped_matmul, Cost(gpu_arithmetic=_arithmetic))


def _has_kernel(*operands: Tensor) -> bool:
    """PyTorch's kernel needs bfloat16 on Hopper or Blackwell, strides in multiples of 16 bytes, and rows or columns
    that are contiguous. A compiler may lay out an adapter's matrices otherwise. For other operands `F.grouped_mm` reads
    the ends and loops."""
    return all(
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.data_ptr() % 16 == 0
        and all(s == 1 or s % 8 == 0 for s in x.stride())
        and 1 in x.stride()[-2:]
        and torch.cuda.get_device_capability(x.device) in GROUPED_CAPABILITIES
        for x in operands
    )


@cache
def _own_kernels(is_cuda: bool, dtype: torch.dtype) -> ModuleType | None:
    if not is_cuda or not HAS_TRITON or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    from lean_ft.models import grouped_kernels

    return grouped_kernels


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if start < end:
            yield group, slice(start, end)
