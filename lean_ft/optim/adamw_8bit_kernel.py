"""The update of 8-bit AdamW on a GPU as one Triton kernel: gradients are read once, and weights and moments are read
and written once. Random bits and float32 numbers stay in registers.

Codes are those of `DynamicCode`, by two tables. To decode, a code selects its value. To encode, the upper bits of a
float32 select a bin that holds at most one midpoint between two values. The table's integer plus the bits of the number
is the code in its upper bits: the lower bits carry into it if the number is above the midpoint. Tables have 448 KiB,
of which an update reads a few KiB.

Compared with the sliced update, fused multiply-adds and divisions by constants as products change float32 numbers by
about one unit in the last place. Imported only with Triton and a GPU.
"""

from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.optim.adamw import Scalars
from lean_ft.optim.dynamic_code import DynamicCode

BLOCKS = 4  # per program
# Low float32 bits that the index of a bin drops.
_SIGNED_SHIFT, _UNSIGNED_SHIFT = 17, 16


class Tables(NamedTuple):
    """Tables of both codes, the signed one first."""

    values: Tensor  # (512,) float32
    bins: Tensor  # (2^15 + 2^16,) int32

    @classmethod
    def of(cls, signed: DynamicCode, unsigned: DynamicCode, device: torch.device) -> "Tables":
        values = torch.cat([code.tables(torch.device("cpu"))[0] for code in (signed, unsigned)])
        bins = torch.cat([_bins(signed, _SIGNED_SHIFT), _bins(unsigned, _UNSIGNED_SHIFT)])
        return cls(values.to(device), bins.to(device))


def _bins(code: DynamicCode, shift: int) -> Tensor:
    """For each bin, the int32 that gives the code of a float32 x in it: (bin + bits(x)) >> shift. For negative x, it
    gives the complement of the code, which grows with the bits. Unsigned codes are at least 1."""
    starts = torch.arange(2 ** (32 - shift)) << shift

    def codes(low: Tensor) -> Tensor:
        numbers = (starts | low).to(torch.int32).view(torch.float32).nan_to_num(0.0, 1.0, -1.0)
        if code.signed:
            return torch.where(starts < 2**31, code.encode_by_tables(numbers), ~code.encode_by_tables(numbers)).long()
        return code.encode_by_tables(numbers.clamp(min=code.smallest_magnitude())).long()

    first = codes(torch.zeros_like(starts))
    # Bisect for the number of low bits below the midpoint; 2^shift without one.
    below, above = torch.zeros_like(starts), torch.full_like(starts, 2**shift)
    for _ in range(shift):
        middle = (below + above) // 2
        is_above = codes(middle) > first
        below, above = torch.where(is_above, below, middle), torch.where(is_above, middle, above)
    has_one = codes(torch.full_like(starts, 2**shift - 1)) > first
    carry = torch.where(has_one, 2**shift - above, 0)
    return ((first << shift) + carry - starts).to(torch.int32)


class Step(NamedTuple):
    """The numbers of a step, and the keys of its random bits (None: round to nearest)."""

    scalars: Scalars
    keys: tuple[int, int] | None


def update(weight: Tensor, grad: Tensor, moments: list[Tensor], tables: Tables, step: Step) -> None:
    """Update a flat weight (N,) and its moments: codes (N,) and scales (N / 256,) of the first and the second."""
    scalars, keys = step
    key0, key1 = keys or (0, 0)
    launch: Any = _update
    factor = scalars.correction1 / scalars.root_correction2
    launch[(triton.cdiv(len(weight), BLOCKS * 256),)](
        *(weight, grad, *moments, *tables, len(weight)),
        *(scalars.lr, scalars.weight_decay, scalars.beta1, scalars.one_minus_beta1),
        *(scalars.beta2, scalars.one_minus_beta2, factor, scalars.correction1 * scalars.eps, key0, key1),
        isinstance(scalars.lr, Tensor),
        keys is not None and weight.dtype == torch.bfloat16,
        len(weight) % (BLOCKS * 256) == 0,
        BLOCKS,
    )


# fmt: off
@triton.jit
def _largest(moment):
    # As integers, so that a NaN is the largest.
    return tl.max(tl.abs(moment).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _mixed(x, key):
    # Two rounds of multiplication (https://github.com/skeeto/hash-prospector).
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ key) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit(do_not_specialize=["key0", "key1"])
def _update(
    weights, grads, codes, scales, codes_sq, scales_sq, values, bins, num_elements,
    lr, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, factor, eps, key0, key1,
    CLIPPED: tl.constexpr, RANDOM: tl.constexpr, WHOLE: tl.constexpr, BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    places = block * 256 + tl.arange(0, 256)[None, :]
    is_element, is_block = places < num_elements, block * 256 < num_elements
    if WHOLE:
        is_element = is_block = None
    grad = tl.load(grads + places, mask=is_element).to(tl.float32)
    weight = tl.load(weights + places, mask=is_element).to(tl.float32)
    scale = tl.load(scales + block, mask=is_block) * beta1
    scale_sq = tl.load(scales_sq + block, mask=is_block) * beta2
    m = tl.load(values + tl.load(codes + places, mask=is_element, other=0).to(tl.int32)) * scale
    v = tl.load(values + 256 + tl.load(codes_sq + places, mask=is_element, other=0).to(tl.int32)) * scale_sq
    m += grad * one_minus_beta1
    v += grad * grad * one_minus_beta2
    if not WHOLE:
        m, v = tl.where(is_element, m, 0.0), tl.where(is_element, v, 0.0)
    scale, scale_sq = _largest(m), _largest(v)
    tl.store(scales + block, scale, mask=is_block)
    tl.store(scales_sq + block, scale_sq, mask=is_block)
    # The smallest normal number keeps a block of zeros finite.
    bits = (m * (1.0 / tl.maximum(scale, 1.1754943508222875e-38))).to(tl.int32, bitcast=True)
    code = (tl.load(bins + (bits.to(tl.uint32, bitcast=True) >> 17)) + bits) >> 17
    tl.store(codes + places, (code ^ (bits >> 31)).to(tl.uint8), mask=is_element)
    bits = (v * (1.0 / tl.maximum(scale_sq, 1.1754943508222875e-38))).to(tl.int32, bitcast=True)
    code = (tl.load(bins + 32768 + (bits.to(tl.uint32, bitcast=True) >> 16)) + bits) >> 16
    tl.store(codes_sq + places, code.to(tl.uint8), mask=is_element)
    if CLIPPED:
        lr = tl.load(lr)
    direction = m / (tl.sqrt(v) * factor + eps)
    weight -= (direction + weight * weight_decay) * lr
    if RANDOM:  # bfloat16 is the upper half of float32
        pair = block * 128 + tl.arange(0, 128)[None, :]
        words = _mixed(pair.to(tl.uint32) ^ key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True))
        noise = tl.interleave(words & 0xFFFF, words >> 16)
        # Adding to the bits of a NaN could make it a finite number and hide a diverged run.
        noise = tl.where(tl.abs(weight) < float("inf"), noise, 0)
        upper = (weight.to(tl.uint32, bitcast=True) + noise) >> 16
        tl.store(weights + places, upper.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=is_element)
    else:
        tl.store(weights + places, weight.to(weights.dtype.element_ty), mask=is_element)
# fmt: on
