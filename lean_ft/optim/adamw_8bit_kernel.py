"""The update of 8-bit AdamW on a GPU as one Triton kernel: it reads gradients once, and it reads and writes weights and
moments once. Random bits and float32 numbers stay in registers.

Codes are exactly those of `DynamicCode`, by tables. To decode, a code selects its value. To encode, the upper bits of a
float32 select a bin that holds at most one midpoint between two values. The bin's integer plus the number's bits has
the code in its upper bits: the lower bits carry into it at the midpoint. These tables take 384 KiB, of which an update
reads a few KiB.

The random bits of an element depend on the update's seed and the element's number alone. Fused multiply-adds, and
products with reciprocals instead of divisions, change float32 results by about one unit in the last place, compared
with the sliced update. Imported only with Triton and a GPU.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lean_ft.optim.adamw import Scalars
from lean_ft.optim.dynamic_code import DynamicCode

BLOCKS = 8  # per program
# Low bits of a float32 that do not select the bin.
SIGNED_SHIFT, UNSIGNED_SHIFT = 17, 16


def code_tables(signed: DynamicCode, unsigned: DynamicCode, device: torch.device) -> tuple[Tensor, Tensor]:
    """The values (512,) float32 and the bins (2^15 + 2^16,) int32 of the signed code and then of the unsigned code."""
    values = torch.cat([code.tables(torch.device("cpu"))[0] for code in (signed, unsigned)])
    bins = torch.cat([_bins(signed, SIGNED_SHIFT), _bins(unsigned, UNSIGNED_SHIFT)])
    return values.to(device), bins.to(device)


def _bins(code: DynamicCode, shift: int) -> Tensor:
    """The int32 of each bin: (bin + bits) >> shift is the code of a float32; bits: as an integer, absolute in the
    signed code. The unsigned code is at least 1."""
    starts = torch.arange(2 ** (32 - shift)) << shift

    def codes(low_bits: Tensor) -> Tensor:
        numbers = (starts | low_bits).to(torch.int32).view(torch.float32).nan_to_num(0.0, 1.0, -1.0)
        return code.encode_by_tables(numbers if code.signed else numbers.clamp(min=code.smallest_magnitude())).long()

    first = codes(torch.zeros_like(starts))
    # Bisect for the least low bits with another code; 2^shift if there are none.
    same, other = torch.zeros_like(starts), torch.full_like(starts, 2**shift)
    for _ in range(shift):
        middle = (same + other) // 2
        differs = codes(middle) != first
        same, other = torch.where(differs, same, middle), torch.where(differs, middle, other)
    rising = (first << shift) + 2**shift - other - starts
    falling = (first << shift) + other - 1 - (2**32 - starts)
    is_negative = (starts >= 2**31) & code.signed
    return torch.where(is_negative, falling, rising).to(torch.int32)


def update(
    tensors: Sequence[Tensor], tables: tuple[Tensor, Tensor], step: Scalars, keys: tuple[int, int] | None
) -> None:
    """Update a weight and its moments in place.

    Args:
        tensors: weight (N,), gradient (N,), codes (N,) uint8 and scales (N / 256,) float32 of the first moment and of
            the second.
        tables: `code_tables`.
        keys: two int32 that select the random bits which round a bfloat16 weight; None: round to nearest.
    """
    weight = tensors[0]
    ratio = step.correction1 / step.root_correction2
    _update[(triton.cdiv(len(weight), 256 * BLOCKS),)](  # pyright: ignore[reportIndexIssue]
        *(*tensors, *tables, len(weight)),
        *(step.lr, step.weight_decay, step.beta1, step.one_minus_beta1, step.beta2, step.one_minus_beta2),
        *(ratio, step.correction1 * step.eps, *(keys or (0, 0))),
        IS_CLIPPED=isinstance(step.lr, Tensor),
        IS_RANDOM=keys is not None and weight.dtype == torch.bfloat16,
        IS_WHOLE=len(weight) % (256 * BLOCKS) == 0,
        BLOCKS=BLOCKS,
    )


# fmt: off
@triton.jit
def _decoded(values, codes, SHAPE: tl.constexpr):
    indices = tl.reshape(codes.to(tl.int32), (SHAPE[0] * SHAPE[1],))
    return tl.reshape(tl.gather(tl.load(values + tl.arange(0, 256)), indices, 0), SHAPE)


@triton.jit
def _largest(magnitudes):
    # As integers, because NaN is then the largest.
    return tl.max(magnitudes.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _scaled_bits(moment, scale):
    # The smallest normal number keeps a block of zeros finite.
    return (moment * (1.0 / tl.maximum(scale, 1.1754943508222875e-38))).to(tl.int32, bitcast=True)


@triton.jit
def _bin_of(bins, bits, SHIFT: tl.constexpr):
    return tl.load(bins + (bits.to(tl.uint32, bitcast=True) >> SHIFT))


@triton.jit
def _noise(pair, key0, key1):
    # 16 bits for each element of a pair: lowbias32 (https://github.com/skeeto/hash-prospector) with a key per round.
    word = pair.to(tl.uint32) + key0.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15) ^ key1.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return tl.interleave((word ^ (word >> 16)) & 0xFFFF, word >> 16)


@triton.jit(do_not_specialize=["key0", "key1"])
def _update(
    weights, grads, codes, scales, codes_sq, scales_sq, values, bins, num_elements,
    lr, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, ratio, eps, key0, key1,
    IS_CLIPPED: tl.constexpr, IS_RANDOM: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    place = block * 256 + tl.arange(0, 256)[None, :]
    is_block = block * 256 < num_elements
    is_element = place < num_elements
    if IS_WHOLE:
        is_block = tl.full((BLOCKS, 1), True, tl.int1)
        is_element = tl.full((BLOCKS, 256), True, tl.int1)
    grad = tl.load(grads + place, mask=is_element, other=0).to(tl.float32)
    code = tl.load(codes + place, mask=is_element, other=0)
    code_sq = tl.load(codes_sq + place, mask=is_element, other=0)
    scale = tl.load(scales + block, mask=is_block, other=0)
    scale_sq = tl.load(scales_sq + block, mask=is_block, other=0)
    m = _decoded(values, code, (BLOCKS, 256)) * (scale * beta1) + grad * one_minus_beta1
    v = _decoded(values + 256, code_sq, (BLOCKS, 256)) * (scale_sq * beta2) + grad * grad * one_minus_beta2
    if not IS_WHOLE:
        m = tl.where(is_element, m, 0.0)
        v = tl.where(is_element, v, 0.0)
    scale = _largest(tl.abs(m))
    scale_sq = _largest(v)
    bits = _scaled_bits(m, scale)
    bits_sq = _scaled_bits(v, scale_sq)
    code = (_bin_of(bins, bits, 17) + tl.abs(bits)) >> 17
    code_sq = (_bin_of(bins + 32768, bits_sq, 16) + bits_sq) >> 16
    weight = tl.load(weights + place, mask=is_element, other=0).to(tl.float32)
    if IS_CLIPPED:
        lr = tl.load(lr)
    root = tl.rsqrt(tl.sqrt(v) * ratio + eps)  # fewer instructions than a division
    weight -= (m * root * root + weight * weight_decay) * lr
    if IS_RANDOM:  # bfloat16 is the upper half of float32
        noise = _noise(block * 128 + tl.arange(0, 128)[None, :], key0, key1)
        # Adding to the bits of a NaN could make it a finite number and hide a diverged run.
        noise = tl.where(tl.abs(weight) < float("inf"), noise, 0)
        upper = (weight.to(tl.uint32, bitcast=True) + noise) >> 16
        tl.store(weights + place, upper.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=is_element)
    else:
        tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=is_element)
    tl.store(codes + place, code.to(tl.uint8), mask=is_element)
    tl.store(codes_sq + place, code_sq.to(tl.uint8), mask=is_element)
    tl.store(scales + block, scale, mask=is_block)
    tl.store(scales_sq + block, scale_sq, mask=is_block)
# fmt: on
