"""The products of `grouped_matmul` as Triton kernels, for operands that PyTorch's grouped kernel does not support.

Each program finds its group on the device. The grid has one more tile per group than the rows need, and surplus
programs return at once. Sums are float32 without TF32. Imported only with Triton and a GPU.

Source: Triton's tutorial on grouped products, whose programs loop over the groups.

Shapes: M rows of all groups, G groups, K and N features.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.system.triton_compiler import launch

# Per program: rows and columns of the result, and features summed at a time. tl.dot needs at least 16 of each.
_ROWS, _COLUMNS, _SUMMED = 64, 128, 32


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor, total: Tensor | None = None) -> Tensor:
    """Each group's rows (M, K) times its matrix (G, K, N), added to `total` (M, N) in place if it is given. ends (G,)
    int32."""
    num_rows, num_summed = rows.shape
    num_groups, _, num_columns = matrices.shape
    out = rows.new_empty(num_rows, num_columns) if total is None else total
    columns, summed = (_block(n, most) for n, most in ((num_columns, _COLUMNS), (num_summed, _SUMMED)))
    grid = (triton.cdiv(num_rows, _ROWS) + num_groups, triton.cdiv(num_columns, columns))
    sizes, strides = (num_groups, num_columns, num_summed), (*rows.stride(), *matrices.stride(), out.stride(0))
    tile = {"GROUPS": triton.next_power_of_2(num_groups), "ROWS": _ROWS, "COLUMNS": columns, "SUMMED": summed}
    launch(_multiply, grid, rows, matrices, ends, out, *sizes, *strides, ADDS=total is not None, **tile)
    return out


def multiply_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Each group's transposed rows of left (M, K) times its rows of right (M, N): (G, K, N)."""
    num_rows, num_columns = left.shape[1], right.shape[1]  # of each result
    out = left.new_empty(len(ends), num_rows, num_columns)
    rows, columns = (_block(n, most) for n, most in ((num_rows, _ROWS), (num_columns, _COLUMNS)))
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns), len(ends))
    tile = {"ROWS": rows, "COLUMNS": columns, "SUMMED": _SUMMED}
    launch(
        _multiply_outer, grid, left, right, ends, out, num_rows, num_columns, *left.stride(), *right.stride(), **tile
    )
    return out


def _block(length: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(length)))


@triton.jit
def load_tile(start, i, i_stride, is_i, j, j_stride, is_j):
    """A tile (i, j) of a matrix, with zeros beyond its edges."""
    places = start + i[:, None] * i_stride + j[None, :] * j_stride
    return tl.load(places, mask=is_i[:, None] & is_j[None, :], other=0.0)


@triton.jit
def store_tile(start, tile, i, i_stride, is_i, j, is_j):
    """Write the part of a tile within the matrix's edges."""
    places = start + i[:, None] * i_stride + j[None, :]
    tl.store(places, tile.to(start.dtype.element_ty), mask=is_i[:, None] & is_j[None, :])


# fmt: off
@triton.jit
def _multiply(
    rows, matrices, ends, out, num_groups, num_columns, num_summed,
    row_stride, row_feature_stride, group_stride, summed_stride, column_stride, out_stride, ADDS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMED: tl.constexpr,
):
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    group_ends = tl.load(ends + groups, mask=is_group, other=0)
    group_starts = tl.load(ends + groups - 1, mask=is_group & (groups > 0), other=0)
    tiles = tl.where(is_group, (group_ends - group_starts + ROWS - 1) // ROWS, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    group = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    is_own = groups == group
    own_tile = tile - tl.sum(tl.where(is_own, tiles_up_to - tiles, 0), 0)
    start = tl.sum(tl.where(is_own, group_starts, 0), 0) + own_tile * ROWS
    end = tl.sum(tl.where(is_own, group_ends, 0), 0)

    m = (start + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = m < end, n < num_columns
    matrix = matrices + group.to(tl.int64) * group_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, num_summed, SUMMED):
        k = first + tl.arange(0, SUMMED)
        is_summed = k < num_summed
        left = load_tile(rows, m, row_stride, is_row, k, row_feature_stride, is_summed)
        right = load_tile(matrix, k, summed_stride, is_summed, n, column_stride, is_column)
        total = tl.dot(left, right, total, input_precision="ieee")
    if ADDS:
        total += load_tile(out, m, out_stride, is_row, n, 1, is_column).to(tl.float32)
    store_tile(out, total, m, out_stride, is_row, n, is_column)


@triton.jit
def _multiply_outer(
    left, right, ends, out, num_rows, num_columns,
    left_stride, left_feature_stride, right_stride, right_feature_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMED: tl.constexpr,
):
    group = tl.program_id(2).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    k = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = k < num_rows, n < num_columns
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(start, end, SUMMED):
        m = (first + tl.arange(0, SUMMED)).to(tl.int64)
        is_summed = m < end
        lefts = load_tile(left, k, left_feature_stride, is_row, m, left_stride, is_summed)
        rights = load_tile(right, m, right_stride, is_summed, n, right_feature_stride, is_column)
        total = tl.dot(lefts, rights, total, input_precision="ieee")
    store_tile(out + group * num_rows * num_columns, total, k, num_columns, is_row, n, is_column)
# fmt: on
