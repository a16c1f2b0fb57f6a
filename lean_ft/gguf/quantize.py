"""The quantized kinds of a GGUF file: which kind llama.cpp stores each tensor in, and the bytes of its rows.

A block is a run of weights in a row. It stores a few bits per weight, its code, and a scale; some kinds also store the block's
lowest value. Blocks of the k kinds have 256 weights in parts of 16 or 32, and the scales of the parts are quantized too.

A scale is searched: each trial scale rounds the weights to codes, least squares gives the best scale for these codes, and the
one with the smallest weighted error is kept. The importance of an input feature, the mean square of that input from llama.cpp's
`llama-imatrix`, multiplies the weight of its error.

Source: llama.cpp, ggml-quants.c (formats, trial scales, weights of errors), llama-quant.cpp (the kinds of tensors) and
common/imatrix-loader.cpp.

Shapes: R rows, C columns, N blocks, P parts of a block, B weights of a block or part, E experts.
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lean_ft.gguf.header import gguf_package, read_header

if TYPE_CHECKING:
    from lean_ft.models import DecoderConfig

_SLICE = 2**17  # weights quantized at a time
_IN_FLOAT32 = ("_norm", "_gate_inp", "_gate_inp_shexp", "conv", "conv1d", "per_layer_model_proj", "_coef")  # endings


class Mix(NamedTuple):
    """What determines in which kind llama.cpp stores a tensor of a quantized file. `kind` is the file's, such as q4_k_m."""

    kind: str
    architecture: str
    config: "DecoderConfig"
    has_importance: bool

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
            # llama.cpp has this mix for mixtures of experts only. Without experts, all matrices of layers are in 4 bits.
            ("q8_0", kind == "mxfp4" and not is_stack and (num_experts > 0 or not place)),
            ("q8_0", num_experts == 8 and (is_value or part == "attn_k")),
            ("q5_k", num_experts == 8 and part == "attn_output" and kind in ("q4_k", "iq4_nl")),
            ("q6_k", more_bits and (is_value or is_down)),
            ("q5_k", is_value and ((kind == "iq4_nl" and heads_per_group >= 4) or (kind == "q4_k" and is_70b))),
            ("q5_k", is_down and early and kind == "iq4_nl" and not self.has_importance),
            ("q4_1", is_down and early and kind == "q4_0" and self.has_importance),
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


def quantize(tensor: Tensor, kind: str, importance: Tensor | None = None, errors: Errors | None = None) -> Tensor:
    """Return the stored rows, uint8 (..., bytes), of a tensor (..., C).

    importance: (C,), or (E, C) for a tensor (E, R, C); the mean square of each input feature. Kinds that round without a search
    (q8_0, mxfp4) ignore it. errors: gets the relative error. Raises ValueError if a weight is too large for the float16 scales.
    """
    if tensor.ndim == 3:
        each = [None] * len(tensor) if importance is None else importance.expand(len(tensor), -1)
        return torch.stack([quantize(expert, kind, one, errors) for expert, one in zip(tensor, each, strict=True)])
    gguf, (block, _, encode) = gguf_package(), FORMATS[kind]
    stored = torch.empty(num_bytes(kind, tensor.shape), dtype=torch.uint8).view(len(tensor), -1)
    if importance is not None:
        # An input that was always 0 in the data still counts a little.
        importance = (importance / importance.mean()).nan_to_num_(1.0).float() + 1e-6

    def store(rows: Tensor, place: Tensor) -> Tensor:
        x = rows.float().contiguous().view(-1, block)
        of_x = None if importance is None else importance.expand_as(rows).reshape(-1, block)
        torch.cat(encode(x, of_x), 1, out=place.view(len(x), -1))
        values = torch.from_numpy(gguf.quants.dequantize(place.numpy(), gguf.GGMLQuantizationType[kind.upper()]))
        return torch.stack(
            [torch.linalg.vector_norm(one, dtype=torch.float64) for one in (values.view_as(x) - x, x)]
        ).square()

    step = max(1, _SLICE // tensor.shape[1])
    with serial_operations() as num_threads, ThreadPoolExecutor(num_threads) as pool:
        sums = sum(pool.map(store, tensor.split(step), stored.split(step)), torch.zeros(2, dtype=torch.float64))
    if errors is not None:
        errors[kind] = errors.get(kind, 0) + sums
    return stored


@contextmanager
def serial_operations() -> Iterator[int]:
    """Let each operation of torch use one thread, and yield how many it used before.

    With several threads in each operation on a few MiB, they mostly wait for one another if other programs use the cores.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


# Search of scales -----------------------------------------------------------------------------------------------------


def _scale(x: Tensor, weight: Tensor, trials: Iterable[Tensor], to_values: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the best scales (..., 1) of x (..., B). trials: inverse scales (..., 1). to_values: rounds x * trial to values of codes."""
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


def _error_weight(x: Tensor, importance: Tensor) -> Tensor:
    """Weights of errors (N, B): larger weights of the model count more."""
    return importance * (2 * x.square().mean(-1, keepdim=True) + x.square()).sqrt_()


def _symmetric(x: Tensor, weight: Tensor, half: int) -> Tensor:
    """Scales (..., 1) for codes from -half to half - 1."""
    inverse = _inverse(_extreme(x))
    trials = (inverse * -(half + 0.1 * i) for i in range(-9, 10))
    return _scale(x, weight, trials, lambda values: values.round_().clamp_(-half, half - 1))


# Bytes of blocks ------------------------------------------------------------------------------------------------------


def _half(scale: Tensor) -> Tensor:
    """The bytes (N, 2) of scales (N, 1) in float16."""
    if not bool((stored := scale.half()).isfinite().all()):
        raise ValueError(
            "a weight is too large for the float16 scales of a quantized GGUF file. Choose --gguf bf16 or f32."
        )
    return stored.view(torch.uint8)


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


def _q4_0(x: Tensor, importance: Tensor | None, bits: int = 4) -> list[Tensor]:
    half = 2 ** (bits - 1)
    scale = _extreme(x) / -half if importance is None else _symmetric(x, _error_weight(x, importance), half)
    codes = _round(x * _inverse(scale), 2 * half - 1, half)
    return [_half(scale), *_code_bytes(codes, bits)]


def _q4_1(x: Tensor, importance: Tensor | None, bits: int = 4) -> list[Tensor]:
    most = 2**bits - 1
    if importance is None:
        lowest = x.amin(-1, keepdim=True)
        scale = (x.amax(-1, keepdim=True) - lowest) / most
    else:
        scale, lowest = _scale_and_lowest(x, _error_weight(x, importance), most)
    codes = _round((x - lowest) * _inverse(scale), most)
    return [_half(scale), _half(lowest), *_code_bytes(codes, bits)]


def _q8_0(x: Tensor, importance: Tensor | None) -> list[Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    values = x * _inverse(scale)
    codes = values.trunc() + (2 * values.frac()).trunc_()  # halves away from 0
    return [_half(scale), codes.to(torch.int8).view(torch.uint8)]


_IQ4_VALUES = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
# The code of the nearest value, and that value, for numbers from -128 in steps of 0.5; the middles of values are such steps.
_IQ4_CODES = torch.bucketize(torch.arange(-128, 128, 0.5), (_IQ4_VALUES[1:] + _IQ4_VALUES[:-1]) / 2, right=True)
_IQ4_NEAREST = _IQ4_VALUES[_IQ4_CODES]


def _look_up(table: Tensor, values: Tensor) -> Tensor:
    steps = (values * 2).floor_().clamp_(-256, 255).add_(256).int()
    return table.index_select(0, steps.flatten()).view_as(values)


def _iq4_nl(x: Tensor, importance: Tensor | None) -> list[Tensor]:
    weight = x.square() if importance is None else _error_weight(x, importance)
    inverse = _inverse(_extreme(x))
    trials = (inverse * value for value in (127, *range(-134, -119)))
    scale = _scale(x, weight, trials, partial(_look_up, _IQ4_NEAREST))
    return [_half(scale), *_code_bytes(_look_up(_IQ4_CODES, x * _inverse(scale)).to(torch.uint8))]


_MXFP4_MIDDLES = torch.tensor([0.5, 1.5, 2.5, 3.5, 5, 7, 10])  # between 0, 1, 2, 3, 4, 6, 8 and 12


def _mxfp4(x: Tensor, importance: Tensor | None) -> list[Tensor]:
    exponent = x.abs().amax(-1, keepdim=True).log2_().floor_().add_(125).clamp_(0, 254)
    codes = torch.bucketize(torch.ldexp(x.abs(), (128 - exponent).clamp_(max=127)), _MXFP4_MIDDLES).to(torch.uint8)
    codes += 8 * ((x < 0) & (codes > 0))
    return [exponent.to(torch.uint8), *_code_bytes(codes)]


def _in_six_bits(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize values (N, 8) from 0: their scale's bytes, codes up to 63 (N, 8), and the values of the codes (N, 8, 1)."""
    inverse = _inverse(values.amax(-1, keepdim=True))
    trials = (inverse * code for code in range(40, 64))  # of the largest value
    stored = _half(_scale(values, weight, trials, lambda values: values.round_().clamp_(0, 63)))
    scale = stored.view(torch.float16).float()
    codes = _round(values * _inverse(scale), 63)
    return stored, codes, (scale * codes)[..., None]


def _q4_k(x: Tensor, importance: Tensor | None, bits: int = 4) -> list[Tensor]:
    parts = x.view(-1, 8, 32)
    if importance is None:
        weight = parts.square().mean(-1, keepdim=True).sqrt() + parts.abs()
    else:
        weight = _error_weight(x, importance).view_as(parts)
    scale, lowest = _scale_and_lowest(parts, weight, 2**bits - 1)
    of_part = weight.sum(-1)
    scale_bytes, scale_codes, scale = _in_six_bits(scale[..., 0], of_part)
    lowest_bytes, lowest_codes, depth = _in_six_bits(-lowest[..., 0], of_part)
    codes = _round((parts + depth) * _inverse(scale), 2**bits - 1)
    (scales, last_scales), (depths, last_depths) = scale_codes.split(4, 1), lowest_codes.split(4, 1)
    packed = (scales | last_scales >> 4 << 6, depths | last_depths >> 4 << 6, last_scales & 15 | last_depths << 4)
    fifth = [_pack(codes >> 4, 1)] if bits == 5 else []
    return [scale_bytes, lowest_bytes, *packed, *fifth, _pack((codes & 15).view(-1, 4, 2, 32), 4).flatten(1)]


def _q6_k(x: Tensor, importance: Tensor | None) -> list[Tensor]:
    parts = x.view(-1, 16, 16)
    weight = parts.square() if importance is None else importance.view_as(parts)
    scales = _symmetric(parts, weight, 32)[..., 0]
    stored = _half(_extreme(scales) / -128)
    scale = stored.view(torch.float16).float()
    scale_codes = (scales * _inverse(scale)).round_().clamp_(-128, 127)
    codes = _round(parts * _inverse(scale * scale_codes)[..., None], 63, 32).view(-1, 2, 4, 32)
    low = _pack((codes & 15).view(-1, 2, 2, 64), 4).flatten(1)
    return [low, _pack(codes >> 4, 2).flatten(1), scale_codes.to(torch.int8).view(torch.uint8), stored]


class _Format(NamedTuple):
    block: int  # weights
    num_bytes: int  # of a block
    encode: Callable[[Tensor, Tensor | None], list[Tensor]]
    """The parts of the bytes (N, ...) of blocks (N, B), given the importance (N, B) of their weights."""


FORMATS = {
    "q4_0": _Format(32, 18, _q4_0),
    "q4_1": _Format(32, 20, _q4_1),
    "q5_0": _Format(32, 22, partial(_q4_0, bits=5)),
    "q5_1": _Format(32, 24, partial(_q4_1, bits=5)),
    "q8_0": _Format(32, 34, _q8_0),
    "iq4_nl": _Format(32, 18, _iq4_nl),
    "mxfp4": _Format(32, 17, _mxfp4),
    "q4_k": _Format(256, 144, _q4_k),
    "q5_k": _Format(256, 176, partial(_q4_k, bits=5)),
    "q6_k": _Format(256, 210, _q6_k),
}


# Importance -----------------------------------------------------------------------------------------------------------

Importance = dict[str, Tensor]
"""Matrix of the file, such as blk.0.attn_q.weight -> the importance of its input features, (C,), or (E, C) for experts."""


def read_imatrix(file: Path) -> Importance:
    """Read an importance matrix of llama.cpp, in GGUF or in the older binary format. Raises ValueError if it is damaged."""
    if not file.is_file():
        raise ValueError(f"--imatrix: no such file: {file}. Pass a file that llama-imatrix wrote.")
    with file.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    found = _read_gguf(file) if is_gguf else _read_binary(file)
    for name, importance in found.items():
        if not bool((importance.isfinite() & (importance >= 0)).all()):
            raise ValueError(f"--imatrix: {file} has a negative or infinite number for {name}. Make it again.")
    return found


def _read_gguf(file: Path) -> Importance:
    found, (_, tensors) = Importance(), read_header(file)
    for name, stored in tensors.items():
        matrix = name.removesuffix(".in_sum2")
        counts = tensors.get(f"{matrix}.counts")
        if matrix == name or counts is None or {stored.kind, counts.kind} != {"F32"}:
            continue
        sums, number = (
            torch.from_numpy(np.fromfile(file, np.float32, math.prod(one.shape), offset=one.offset))
            for one in (stored, counts)
        )
        sums = sums.view(-1, stored.shape[-1])  # one dimension in the file of a single matrix
        if len(number) not in (1, len(sums)):
            raise ValueError(f"--imatrix: {file} is damaged: {matrix} has {len(number)} counts. Make it again.")
        found[matrix] = _mean(sums, number[:, None])
    if not found:
        raise ValueError(
            f"--imatrix: {file} has no importance, only other tensors. Pass a file that llama-imatrix wrote."
        )
    return found


def _read_binary(file: Path) -> Importance:
    content, found, place = file.read_bytes(), Importance(), 4
    try:
        for _ in range(struct.unpack_from("<I", content)[0]):
            (length,) = struct.unpack_from("<I", content, place)
            name = content[place + 4 : place + 4 + length].decode()
            num_calls, size = struct.unpack_from("<iI", content, place + 4 + length)
            place += 12 + length
            sums = torch.frombuffer(bytearray(content[place : place + 4 * size]), dtype=torch.float32)
            if len(sums) != size or name in found or num_calls < 0:
                raise ValueError("truncated")
            found[name], place = sums / max(1, num_calls), place + 4 * size
    except (struct.error, ValueError):  # also of bytes that are not UTF-8, and of an empty buffer
        found.clear()
    if not found:
        raise ValueError(
            f"--imatrix: {file} is damaged, or not an importance matrix. Pass a file that llama-imatrix wrote."
        )
    return found


def check_importance(importance: Importance, shapes: Mapping[str, tuple[int, ...]], source: str) -> Importance:
    """Return the importance of the matrices `shapes` of the file, in the shape for `quantize`.

    Raises ValueError if a matrix has none, or one of another size. source: where the importance comes from.
    """
    remedy = "Make it with llama-imatrix from this model."
    if missing := [name for name in shapes if name not in importance]:
        raise ValueError(
            f"{source} lacks {len(missing)} of the {len(shapes)} matrices to quantize, such as {missing[0]}. {remedy}"
        )
    checked = Importance()
    for name, shape in shapes.items():
        expected = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        if importance[name].numel() != expected:
            found = f"{importance[name].numel():,} numbers for {name}; expected {expected:,}"
            raise ValueError(f"{source} has {found}, as it is of another model. {remedy}")
        checked[name] = importance[name].view(*shape[:-2], -1)
    return checked


def _mean(sums: Tensor, counts: Tensor) -> Tensor:
    """The importance (C,) or (E, C). All features of an expert that saw no token count the same."""
    return torch.where(counts > 0, sums / counts, 1.0).float().squeeze(0)
