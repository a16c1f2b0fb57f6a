"""Expand quantized numbers on a GPU as one Triton kernel: each byte is read once, and each dense number written once.

Bits are equal to those of the operations in `frozen_weight`. Imported only with Triton and a GPU.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.system.triton_compiler import launch

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
    grid = triton.cdiv(scales.numel(), _NUMBERS // columns), triton.cdiv(width, columns)
    launch(
        *(_expand, grid),
        *(numbers.contiguous().view(torch.uint8), scales.contiguous(), levels, out, scales.numel(), width),
        *(kind, _NUMBERS // columns, columns),
    )


def expand_nf4(
    numbers: Sequence[Tensor],
    scales: Sequence[Tensor],
    scale_scales: Sequence[Tensor],
    means: Sequence[Tensor],
    scale_levels: Tensor,
    out: Tensor,
) -> None:
    """Fill `out` with up to three NF4 weights, one after the other, from pairs of 4 bits and the 8-bit scales of 64
    numbers each, which are decoded here: a level of `scale_levels` times the scale of 256 scales, plus the weight's
    mean scale."""
    parts, num_programs = [], 0
    for weight in zip(numbers, scales, scale_scales, means, strict=True):
        num_programs += triton.cdiv(weight[1].numel(), _NUMBERS // 64)
        parts += [*(tensor.contiguous() for tensor in weight), weight[1].numel(), num_programs]
    parts += parts[-6:] * (3 - len(numbers))  # no program is left for these
    # A fused multiply-add would round the scales differently from bitsandbytes.
    launch(_expand_nf4, (num_programs,), *parts, _nf4_levels(out.device), scale_levels, out, enable_fp_fusion=False)


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


@triton.jit
def _expand_nf4(
    numbers_0, scales_0, scale_scales_0, mean_0, num_groups_0, end_0,
    numbers_1, scales_1, scale_scales_1, mean_1, num_groups_1, end_1,
    numbers_2, scales_2, scale_scales_2, mean_2, num_groups_2, end_2,
    levels, scale_levels, out,
):
    program = tl.program_id(0)
    if program < end_0:
        _expand_nf4_part(numbers_0, scales_0, scale_scales_0, mean_0, num_groups_0, program, levels, scale_levels, out)
    elif program < end_1:
        target = out + num_groups_0.to(tl.int64) * 64
        program -= end_0
        _expand_nf4_part(
            numbers_1, scales_1, scale_scales_1, mean_1, num_groups_1, program, levels, scale_levels, target)
    else:
        target = out + (num_groups_0.to(tl.int64) + num_groups_1) * 64
        program -= end_1
        _expand_nf4_part(
            numbers_2, scales_2, scale_scales_2, mean_2, num_groups_2, program, levels, scale_levels, target)


@triton.jit
def _expand_nf4_part(numbers, scales, scale_scales, mean, num_groups, program, levels, scale_levels, out):
    GROUPS: tl.constexpr = 64  # of 64 numbers each
    group = program.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    is_group = group < num_groups
    code = tl.load(scales + group, mask=is_group, other=0).to(tl.int32)
    scale = tl.load(scale_levels + code) * tl.load(scale_scales + group // 256, mask=is_group, other=0.0)
    scale += tl.load(mean)
    places = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = tl.load(numbers + places, mask=is_group[:, None], other=0).to(tl.int32)
    bits = tl.interleave(bits >> 4, bits & 15)
    values = tl.gather(tl.broadcast_to(tl.load(levels + tl.arange(0, 16))[None, :], (GROUPS, 16)), bits, 1)
    places = out + group[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(places, (values * scale[:, None]).to(out.dtype.element_ty), mask=is_group[:, None])
# fmt: on
