"""Expand quantized numbers on a GPU as one Triton kernel: each byte is read once, and each dense number written once.

Bits are equal to those of the operations in `frozen_weight`. Imported only with Triton and a GPU.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_NUMBERS = 4096  # per program


def expand(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill `out` with float8_e4m3 numbers times their float32 scales, or with pairs of 4-bit numbers times powers of two. Each scale is
    that of equally many neighboring numbers."""
    width, has_pairs = out.numel() // scales.numel(), numbers.dtype == torch.uint8
    columns = min(_NUMBERS, triton.next_power_of_2(width))
    launch: Any = _expand
    grid = triton.cdiv(scales.numel(), _NUMBERS // columns), triton.cdiv(width, columns)
    launch[grid](
        *(numbers.contiguous().view(torch.uint8), scales.contiguous(), out, scales.numel(), width),
        *(has_pairs, _NUMBERS // columns, columns),
    )


# fmt: off
@triton.jit
def _expand(
    numbers, scales, out, num_groups, width, PAIRS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_group, is_column = group < num_groups, column < width
    scale = tl.load(scales + group, mask=is_group, other=0)
    # The bits of a number become those of a float16 that is smaller by a power of two. Its float32 is exact.
    if PAIRS:
        pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        places = group[:, None] * (width // 2) + pair[None, :]
        bits = tl.load(numbers + places, mask=is_group[:, None] & (pair < width // 2)[None, :], other=0).to(tl.int32)
        bits = tl.interleave(bits & 15, bits >> 4)
        halves = (bits & 8) << 12 | (bits & 7) << 9
        factor = ((tl.minimum(scale.to(tl.int32), 241) + 14) << 23).to(tl.float32, bitcast=True)
    else:
        places = group[:, None] * width + column[None, :]
        bits = tl.load(numbers + places, mask=is_group[:, None] & is_column[None, :], other=0).to(tl.int32)
        halves = (bits & 128) << 8 | (bits & 127) << 7
        halves = tl.where((bits & 127) == 127, 0x7E00, halves)  # not a number
        factor = scale * 256.0
    values = halves.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * factor[:, None]
    places = out + group[:, None] * width + column[None, :]
    tl.store(places, values.to(out.dtype.element_ty), mask=is_group[:, None] & is_column[None, :])
# fmt: on
