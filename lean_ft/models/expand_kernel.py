"""Expand quantized numbers on a GPU as one Triton kernel: each byte is read once, and each dense number written once.

Bits are equal to those of the operations in `frozen_weight`. Imported only with Triton and a GPU.
"""

from functools import cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_NUMBERS = 4096  # per program


def expand(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill `out` with numbers times their scales, each that of equally many neighboring numbers: float8_e4m3 with
    float32 scales; or pairs of 4 bits with powers of two (MXFP4, the lower bits first) or with float32 scales (NF4, the
    upper bits first)."""
    width, levels = out.numel() // scales.numel(), None
    kind = "float8" if numbers.dtype != torch.uint8 else "mxfp4" if scales.dtype == torch.uint8 else "nf4"
    if kind == "nf4":
        levels = _nf4_levels(out.device)
    columns = min(_NUMBERS, triton.next_power_of_2(width))
    launch: Any = _expand
    grid = triton.cdiv(scales.numel(), _NUMBERS // columns), triton.cdiv(width, columns)
    launch[grid](
        *(numbers.contiguous().view(torch.uint8), scales.contiguous(), levels, out, scales.numel(), width),
        *(kind, _NUMBERS // columns, columns),
    )


@cache
def _nf4_levels(device: torch.device) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type("nf4", device)


# fmt: off
@triton.jit
def _expand(
    numbers, scales, levels, out, num_groups, width, KIND: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_group, is_column = group < num_groups, column < width
    scale = tl.load(scales + group, mask=is_group, other=0)
    # The bits of a float become those of a float16 that is smaller by a power of two. Its float32 is exact.
    if KIND == "float8":
        places = group[:, None] * width + column[None, :]
        bits = tl.load(numbers + places, mask=is_group[:, None] & is_column[None, :], other=0).to(tl.int32)
        halves = (bits & 128) << 8 | (bits & 127) << 7
        halves = tl.where((bits & 127) == 127, 0x7E00, halves)  # not a number
        values, scale = halves.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32), scale * 256.0
    else:
        pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        places = group[:, None] * (width // 2) + pair[None, :]
        bits = tl.load(numbers + places, mask=is_group[:, None] & (pair < width // 2)[None, :], other=0).to(tl.int32)
        if KIND == "mxfp4":
            bits = tl.interleave(bits & 15, bits >> 4)
            halves = (bits & 8) << 12 | (bits & 7) << 9
            values = halves.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            scale = ((tl.minimum(scale.to(tl.int32), 241) + 14) << 23).to(tl.float32, bitcast=True)
        else:
            bits = tl.interleave(bits >> 4, bits & 15)
            table = tl.broadcast_to(tl.load(levels + tl.arange(0, 16))[None, :], (GROUPS, 16))
            values = tl.gather(table, bits, 1)
    places = out + group[:, None] * width + column[None, :]
    tl.store(places, (values * scale[:, None]).to(out.dtype.element_ty), mask=is_group[:, None] & is_column[None, :])
# fmt: on
