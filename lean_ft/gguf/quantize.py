"""The quantized kinds of a GGUF file: which kind llama.cpp stores each tensor in, and the bytes of its rows.

A block is a run of weights in a row. It stores a few bits per weight, its code, and a scale; some kinds also store the
block's lowest value. Blocks of the k kinds have 256 weights in parts of 16 or 32, and the scales of the parts are
quantized too.

A scale is searched: each trial scale rounds the weights to codes, least squares gives the best scale for these codes,
and the one with the smallest weighted error is kept.

Source: llama.cpp, ggml-quants.c (formats, trial scales, weights of errors) and llama-quant.cpp (the kinds of tensors).

Shapes: R rows, C columns, N blocks, P parts of a block, B weights of a block or part, E experts.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lean_ft.gguf.header import gguf_package

if TYPE_CHECKING:
    from lean_ft.models import DecoderConfig

_SLICE = 2**17  # weights quantized at a time
_IN_FLOAT32 = ("_norm", "_gate_inp", "_gate_inp_shexp", "conv", "conv1d", "per_layer_model_proj", "_coef")  # endings


class Mix(NamedTuple):
    """What determines in which kind llama.cpp stores a tensor of a quantized file. `kind` is the file's, such as
    q4_k_m."""

    kind: str
    architecture: str
    config: "DecoderConfig"

    def kind_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the kind of the tensor `name`, such as blk.0.attn_q.weight, of `shape` (..., C)."""
        role, _, ending = name.rpartition(".")
        if len(shape) == 1 or ending != "weight" or role.endswith(_IN_FLOAT32):
            return "f32"
        kind = self._wanted(role, len(shape) == 3)
        if kind in FORMATS and shape[-1] % FORMATS[kind].block:
            kind = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}.get(kind, kind)
            kind = "f16" if shape[-1] % 32 else kind
        return kind

    def _wanted(self, role: str, is_stack: bool) -> str:
        """The kind of a matrix whose rows are multiples of the block."""
        kind = self.kind.removesuffix("_m")
        if kind not in FORMATS:
            return kind
        place, _, part = role.rpartition(".")
        layer = int(role.split(".")[1]) if place else 0
        num_layers, num_experts = self.config.num_layers, getattr(self.config.mixture, "num_experts", 0)
        heads_per_group, eighth = self.config.num_heads // self.config.num_kv_heads, num_layers // 8
        early, late = layer < eighth, layer >= 7 * num_layers // 8
        more_bits = kind != self.kind and (early or late or (layer - eighth) % 3 == 2)  # of q4_k_m and q5_k_m
        is_70b = self.architecture in ("llama", "qwen2") and num_layers == 80 and heads_per_group > 1
        is_value, is_down = part in ("attn_v", "attn_qkv", "attn_kv_b"), part.startswith("ffn_down")
        is_output = role == "output" or (role in ("token_embd", "per_layer_token_embd") and self.config.tied_embeddings)
        rules = (
            ("f16", part.startswith(("altup", "laurel"))),
            ("q8_0", is_output and kind in ("q8_0", "mxfp4")),
            ("q6_k", is_output),
            # llama.cpp has this mix for mixtures of experts only. Without experts, all matrices of layers are in 4
            # bits.
            ("q8_0", kind == "mxfp4" and not is_stack and (num_experts > 0 or not place)),
            ("q8_0", num_experts == 8 and (is_value or part == "attn_k")),
            ("q5_k", num_experts == 8 and part == "attn_output" and kind in ("q4_k", "iq4_nl")),
            ("q6_k", more_bits and (is_value or is_down)),
            ("q5_k", is_value and ((kind == "iq4_nl" and heads_per_group >= 4) or (kind == "q4_k" and is_70b))),
            ("q5_k", is_down and early and kind == "iq4_nl"),
        )
        return next((wanted for wanted, holds in rules if holds), kind)


def num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return the size of a stored tensor."""
    block, block_bytes = FORMATS[kind][:2] if kind in FORMATS else (1, 4 if kind == "f32" else 2)
    return math.prod(shape) // block * block_bytes


class Errors(dict[str, Tensor]):
    """Kind of tensors -> the sums of squares of the errors and of the weights."""

    def __str__(self) -> str:
        sums = {"all": torch.stack([*self.values()]).sum(0), **self} if len(self) > 1 else self
        return ", ".join(f"{kind} {float((error / size).sqrt()):.2%}" for kind, (error, size) in sums.items())


def quantize(tensor: Tensor, kind: str, errors: Errors | None = None) -> Tensor:
    """Return the stored rows, uint8 (..., bytes), of a tensor (..., C).

    errors: gets the relative error. Raises ValueError if a weight is too large for the float16 scales.
    """
    if tensor.ndim == 3:
        return torch.stack([quantize(expert, kind, errors) for expert in tensor])
    gguf, (block, _, encode) = gguf_package(), FORMATS[kind]
    stored_as = gguf.GGMLQuantizationType[kind.upper()]
    stored = torch.empty(num_bytes(kind, tensor.shape), dtype=torch.uint8).view(len(tensor), -1)

    def store(rows: Tensor, place: Tensor) -> Tensor:
        rows = rows.float().contiguous()
        with np.errstate(all="ignore"):  # a scale below or above the range of float16
            if encode is None:
                place.copy_(torch.from_numpy(gguf.quants.quantize(rows.numpy(), stored_as)))
            else:
                blocks = rows.view(-1, block)
                torch.cat(encode(blocks), 1, out=place.view(len(blocks), -1))
            values = torch.from_numpy(gguf.quants.dequantize(place.numpy(), stored_as))
        return torch.stack(
            [torch.linalg.vector_norm(one, dtype=torch.float64) for one in (values.view_as(rows) - rows, rows)]
        ).square()

    step = max(1, _SLICE // tensor.shape[1])
    with serial_operations() as num_threads, ThreadPoolExecutor(num_threads) as pool:
        sums = sum(pool.map(store, tensor.split(step), stored.split(step)), torch.zeros(2, dtype=torch.float64))
    if not bool(torch.as_tensor(sums).isfinite().all()):
        raise ValueError(
            "a weight is too large for the float16 scales of a quantized GGUF file. Choose --gguf bf16 or f32."
        )
    if errors is not None:
        errors[kind] = errors.get(kind, 0) + sums
    return stored


@contextmanager
def serial_operations() -> Iterator[int]:
    """Let each operation of torch use one thread, and yield how many it used before.

    With several threads in each operation on a few MiB, they mostly wait for one another if other programs use the
    cores.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


# Search of scales -----------------------------------------------------------------------------------------------------


def _scale(x: Tensor, weight: Tensor, trials: Iterable[Tensor], to_values: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the best scales (..., 1) of x (..., B). trials: inverse scales (..., 1). to_values: rounds x * trial to
    values of codes."""
    best, scale = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    weighted = weight * x
    for trial in trials:
        values = to_values(x * trial)
        product = (weighted * values).sum(-1, keepdim=True)
        norm = values.square_().mul_(weight).sum(-1, keepdim=True)
        better = product * product > best * norm
        fitted = product / norm
        scale = torch.where(better, fitted, scale)
        best = torch.where(better, fitted * product, best)
    return scale


def _scale_and_lowest(x: Tensor, weight: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and lowest values (..., 1), at most 0, of x (..., B), for codes from 0 to `most`."""
    lowest = x.amin(-1, keepdim=True).clamp_(max=0)
    shifted, span = x - lowest, x.amax(-1, keepdim=True) - lowest
    scale, inverse = span / most, _inverse(span)
    best = torch.full_like(scale, math.inf)
    weighted, sum_w = weight * x, weight.sum(-1, keepdim=True)
    sum_x = weighted.sum(-1, keepdim=True)
    for i in range(21):
        codes = (shifted * (inverse * (most - 1 + 0.1 * i))).round_().clamp_(0, most)
        of_codes = weight * codes
        sum_c = of_codes.sum(-1, keepdim=True)
        sum_cx, sum_cc = (weighted * codes).sum(-1, keepdim=True), of_codes.mul_(codes).sum(-1, keepdim=True)
        determinant = sum_w * sum_cc - sum_c * sum_c
        offset = (sum_cc * sum_x - sum_c * sum_cx) / determinant
        slope = torch.where(offset > 0, sum_cx / sum_cc, (sum_w * sum_cx - sum_x * sum_c) / determinant)
        offset = offset.clamp_(max=0)
        error = codes.mul_(slope).add_(offset).sub_(x).square_().mul_(weight).sum(-1, keepdim=True)
        better = (error < best) & (determinant > 0)
        scale, lowest, best = (torch.where(better, *pair) for pair in ((slope, scale), (offset, lowest), (error, best)))
    return scale, lowest


def _extreme(x: Tensor) -> Tensor:
    """The value (..., 1) of x (..., B) that is farthest from 0."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def _inverse(scale: Tensor) -> Tensor:
    return scale.reciprocal().masked_fill_(scale.abs() < 1e-30, 0)


def _symmetric(x: Tensor, weight: Tensor, half: int) -> Tensor:
    """Scales (..., 1) for codes from -half to half - 1."""
    inverse = _inverse(_extreme(x))
    trials = (inverse * -(half + 0.1 * i) for i in range(-9, 10))
    return _scale(x, weight, trials, lambda values: values.round_().clamp_(-half, half - 1))


# Bytes of blocks ------------------------------------------------------------------------------------------------------


def _half(scale: Tensor) -> Tensor:
    """The bytes (N, 2) of scales (N, 1) in float16."""
    return scale.half().view(torch.uint8)


def _pack(fields: Tensor, bits: int) -> Tensor:
    """Bytes (..., M) of fields (..., F, M) of `bits` bits, the first in the lowest bits."""
    shifts = torch.arange(0, bits * fields.shape[-2], bits, dtype=torch.uint8)
    return (fields << shifts[:, None]).sum(-2, dtype=torch.uint8)


def _round(values: Tensor, most: int, zero: int = 0) -> Tensor:
    """Codes from 0 to `most` of values from -zero, with halves rounded up."""
    return (values + (zero + 0.5)).floor_().clamp_(0, most).to(torch.uint8)


def _code_bytes(codes: Tensor, bits: int = 4) -> list[Tensor]:
    """The bytes of codes (N, 32): their fifth bits, if any, and the other bits of codes i and i + 16."""
    fifth = [_pack((codes >> 4).view(-1, 4, 8, 1), 1).flatten(1)] if bits == 5 else []
    return [*fifth, _pack((codes & 15).view(-1, 2, 16), 4)]


def _q5_1(x: Tensor) -> list[Tensor]:
    lowest = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - lowest) / 31
    codes = _round((x - lowest) * _inverse(scale), 31)
    return [_half(scale), _half(lowest), *_code_bytes(codes, 5)]


def _q8_0(x: Tensor) -> list[Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    values = x * _inverse(scale)
    codes = values.trunc() + (2 * values.frac()).trunc_()  # halves away from 0
    return [_half(scale), codes.to(torch.int8).view(torch.uint8)]


_IQ4_VALUES = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
# The code of the nearest value, and that value, for numbers from -128 in steps of 0.5; the middles of values are such
# steps.
_IQ4_CODES = torch.bucketize(torch.arange(-128, 128, 0.5), (_IQ4_VALUES[1:] + _IQ4_VALUES[:-1]) / 2, right=True)
_IQ4_NEAREST = _IQ4_VALUES[_IQ4_CODES]


def _look_up(table: Tensor, values: Tensor) -> Tensor:
    steps = (values * 2).floor_().clamp_(-256, 255).add_(256).int()
    return table.index_select(0, steps.flatten()).view_as(values)


def _iq4_nl(x: Tensor) -> list[Tensor]:
    inverse = _inverse(_extreme(x))
    trials = (inverse * value for value in (127, *range(-134, -119)))
    scale = _scale(x, x.square(), trials, partial(_look_up, _IQ4_NEAREST))
    return [_half(scale), *_code_bytes(_look_up(_IQ4_CODES, x * _inverse(scale)).to(torch.uint8))]


_MXFP4_MIDDLES = torch.tensor([0.5, 1.5, 2.5, 3.5, 5, 7, 10])  # between 0, 1, 2, 3, 4, 6, 8 and 12


def _mxfp4(x: Tensor) -> list[Tensor]:
    exponent = x.abs().amax(-1, keepdim=True).log2_().floor_().add_(125).clamp_(0, 254)
    codes = torch.bucketize(torch.ldexp(x.abs(), (128 - exponent).clamp_(max=127)), _MXFP4_MIDDLES).to(torch.uint8)
    codes += 8 * ((x < 0) & (codes > 0))
    return [exponent.to(torch.uint8), *_code_bytes(codes)]


def _in_six_bits(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize values (N, 8) from 0: their scale's bytes, codes up to 63 (N, 8), and the values of the codes (N, 8,
    1)."""
    inverse = _inverse(values.amax(-1, keepdim=True))
    trials = (inverse * code for code in range(40, 64))  # of the largest value
    stored = _half(_scale(values, weight, trials, lambda values: values.round_().clamp_(0, 63)))
    scale = stored.view(torch.float16).float()
    codes = _round(values * _inverse(scale), 63)
    return stored, codes, (scale * codes)[..., None]


def _q4_k(x: Tensor, bits: int = 4) -> list[Tensor]:
    parts = x.view(-1, 8, 32)
    weight = parts.square().mean(-1, keepdim=True).sqrt() + parts.abs()
    scale, lowest = _scale_and_lowest(parts, weight, 2**bits - 1)
    of_part = weight.sum(-1)
    scale_bytes, scale_codes, scale = _in_six_bits(scale[..., 0], of_part)
    lowest_bytes, lowest_codes, depth = _in_six_bits(-lowest[..., 0], of_part)
    codes = _round((parts + depth) * _inverse(scale), 2**bits - 1)
    (scales, last_scales), (depths, last_depths) = scale_codes.split(4, 1), lowest_codes.split(4, 1)
    packed = (scales | last_scales >> 4 << 6, depths | last_depths >> 4 << 6, last_scales & 15 | last_depths << 4)
    fifth = [_pack(codes >> 4, 1)] if bits == 5 else []
    return [scale_bytes, lowest_bytes, *packed, *fifth, _pack((codes & 15).view(-1, 4, 2, 32), 4).flatten(1)]


def _q6_k(x: Tensor) -> list[Tensor]:
    parts = x.view(-1, 16, 16)
    scales = _symmetric(parts, parts.square(), 32)[..., 0]
    stored = _half(_extreme(scales) / -128)
    scale = stored.view(torch.float16).float()
    scale_codes = (scales * _inverse(scale)).round_().clamp_(-128, 127)
    codes = _round(parts * _inverse(scale * scale_codes)[..., None], 63, 32).view(-1, 2, 4, 32)
    low = _pack((codes & 15).view(-1, 2, 2, 64), 4).flatten(1)
    return [low, _pack(codes >> 4, 2).flatten(1), scale_codes.to(torch.int8).view(torch.uint8), stored]


class _Format(NamedTuple):
    block: int  # weights
    num_bytes: int  # of a block
    encode: Callable[[Tensor], list[Tensor]] | None = None
    """The parts of the bytes (N, ...) of blocks (N, B); None if the gguf package encodes them, which has the same
    bytes. For q5_1, q8_0 and mxfp4 the package has them too, and is up to 1.5x slower than these functions."""


FORMATS = {
    "q4_0": _Format(32, 18),
    "q5_0": _Format(32, 22),
    "q5_1": _Format(32, 24, _q5_1),
    "q8_0": _Format(32, 34, _q8_0),
    "iq4_nl": _Format(32, 18, _iq4_nl),
    "mxfp4": _Format(32, 17, _mxfp4),
    "q4_k": _Format(256, 144, _q4_k),
    "q5_k": _Format(256, 176, partial(_q4_k, bits=5)),
    "q6_k": _Format(256, 210, _q6_k),
}
