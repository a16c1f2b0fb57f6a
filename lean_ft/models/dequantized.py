"""Read quantized weights of published checkpoints, as dequantized numbers or as they are stored.

Matrices are dequantized in strips of a few MiB, so there is no second copy in memory. Two formats are supported:

- `fp8`: float8_e4m3 numbers with a float32 scale per block or per matrix (DeepSeek-V3 technical report, 2024,
  https://arxiv.org/abs/2412.19437, section 3.3). Scales of activations are ignored.
- `mxfp4`: stacked experts of 4-bit numbers with a power of two per 32 (OCP Microscaling Formats 1.0, 2023).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_ft.models.frozen_weight import Form, Frozen, FrozenParameter, to_float8
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.models.source import Source
from lean_ft.system.shards import Part

# `quant_method` of the formats that are read, with a description for docs/models.md.
READABLE = {
    "fp8": "float8 (e4m3) with a scale per block or per matrix",
    "mxfp4": "stacked experts of 4 bits with a power of two per 32",
}
_OF_BLOCKS = "_scale_inv"  # ends the names of scales in fp8
_FLOATS = ("F32", "BF16", "F16")
_STRIP_NUMBERS = 2**18  # numbers dequantized at a time


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix of float8 numbers with a scale per block."""

    numbers: StoredTensor  # (rows, columns)
    scales: StoredTensor  # (blocks of rows, blocks of columns)
    block: tuple[int, int]

    dtype, dtype_name = torch.bfloat16, "F8_E4M3"

    @property
    def file(self) -> Path:
        return self.numbers.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def read_part(self, part: Part) -> None:
        """Fill this rank's part of the matrix: whole rows, or a stretch of each row."""
        columns, (block_rows, block_columns) = self.shape[1], self.block
        scales = self.scales.read().float()
        scales = scales.view(1, 1) if scales.numel() == 1 else scales
        flat, done = part.values.view(-1), 0
        for first, length in part.runs():
            width = min(length, columns - first % columns)
            while length:
                num_rows = min(length // width, max(1, _STRIP_NUMBERS // width))
                row, column = divmod(first, columns)
                assert num_rows and (width == columns or num_rows == 1), "a run has whole rows, or is within a row"
                numbers = _read(self.numbers, first, (num_rows, width))
                of_rows = scales[torch.arange(row, row + num_rows) // block_rows]
                scale = of_rows[:, torch.arange(column, column + width) // block_columns]
                rows = Frozen(Form("float8", (num_rows, width), torch.float32), (numbers, scale))
                flat[done : done + numbers.numel()].view(num_rows, width).copy_(rows.whole())
                first, length, done = first + numbers.numel(), length - numbers.numel(), done + numbers.numel()

    def read_stored(self, key: str, part: Part) -> None:
        """Fill this rank's part of the `numbers`, or of the `scales`: one per row and group of columns. A block has one
        or more groups (`form_in_folder`)."""
        if key == "numbers":
            self.numbers.read_part(part)
            return
        (num_rows, num_columns), (block_rows, block_columns) = self.shape, self.block
        scales = self.scales.read().float().view(-(-num_rows // block_rows), -1)
        starts = torch.arange(0, num_columns, num_columns // part.shape[-1])
        part.values.copy_(
            part.within(scales[torch.arange(num_rows) // block_rows][:, starts // block_columns].contiguous())
        )


@dataclass(frozen=True)
class FourBitStack:
    """A stack of transposed 4-bit matrices."""

    blocks: StoredTensor  # (experts, rows, groups, 16): two numbers per byte
    exponents: StoredTensor  # (experts, rows, groups): powers of two, biased by 127

    dtype, dtype_name = torch.bfloat16, "U8"

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_rows, num_groups, _ = self.blocks.shape
        return num_experts, 32 * num_groups, num_rows

    def read_part(self, part: Part) -> None:
        """Fill this rank's part of the stack: whole matrices."""
        _, num_rows, num_groups, _ = self.blocks.shape
        of_matrix = math.prod(self.shape[1:])
        assert part.run is None and not part.first % of_matrix, "a stack is cut by its first dimension"
        strip = max(1, _STRIP_NUMBERS // (32 * num_groups))
        for expert, matrix in enumerate(part.values.view(-1, *self.shape[1:]), start=part.first // of_matrix):
            for row in range(0, num_rows, strip):
                size, place = min(strip, num_rows - row), expert * num_rows + row
                blocks = _read(self.blocks, place * num_groups * 16, (size, num_groups, 16))
                exponents = _read(self.exponents, place * num_groups, (size, num_groups))
                rows = Frozen(Form("mxfp4", (size, 32 * num_groups), torch.float32), (blocks, exponents))
                matrix[:, row : row + size] = rows.whole().T

    def read_stored(self, key: str, part: Part) -> None:
        """Fill this rank's part of the `blocks` or `exponents`."""
        (self.blocks if key == "blocks" else self.exponents).read_part(part)


Readable = StoredTensor | ScaledTensor | FourBitStack


def dequantized(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, Readable]:
    """The tensors of a folder by name, with quantized weights and their scales merged into one entry.

    config: the `quantization_config` of config.json, or empty. Raises ValueError, before anything is read, if a piece
    of a weight is missing or has another dtype or shape than its format, or if there are scales of a weight that is not
    quantized.
    """
    if config.get("quant_method") == "mxfp4":
        stacks = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
        made = {name: _four_bit_stack(name, stored) for name in stacks}
        pieces = {f"{name}_{kind}" for name in stacks for kind in ("blocks", "scales")}
    elif config.get("quant_method") == "fp8":
        names = [name for name, tensor in stored.items() if tensor.dtype_name == "F8_E4M3"]
        made = {name: _scaled(name, stored, config.get("weight_block_size")) for name in names}
        pieces = {*names, *(f"{name}{_OF_BLOCKS}" for name in names)}
        pieces |= {name for name in stored if name.endswith(".activation_scale")}
        _check_all_read(stored, pieces)
    else:
        return dict(stored)
    return {**{name: tensor for name, tensor in stored.items() if name not in pieces}, **made}


def form_in_folder(name: str, tensors: Sequence[Readable], shape: Sequence[int], dtype: torch.dtype) -> Frozen | None:
    """The form of a parameter whose pieces a folder stores as `tensors`, on the meta device; None if it is not
    quantized there.

    If the blocks do not divide the columns, as in 576 columns and blocks of 128, the form has narrower blocks that do
    (64), with repeated scales. The values are the same.
    """
    if isinstance(tensors[0], FourBitStack):
        return empty_mxfp4(shape, dtype)
    *rows, num_columns = shape
    width = num_columns
    for tensor in tensors:
        if not isinstance(tensor, ScaledTensor):
            return None
        if tensor.block[1] < num_columns:
            width = math.gcd(width, tensor.block[1])
    numbers = torch.empty(*rows, num_columns, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty(*rows, num_columns // width, device="meta")
    return Frozen(Form("float8", tuple(shape), dtype), (numbers, scales))


def as_in_folder(source: Source, name: str, weight: Tensor) -> FrozenParameter | None:
    """A weight on the meta device in the form in which its folder has it; None if it is not quantized there. Random
    weights, and those of a plan, get the form that the folder's quantization usually has."""
    method, frozen = source.quantization.get("quant_method"), None
    if method and source.form_in_folder is not None:
        frozen = source.form_in_folder(name)
    elif method == "fp8":
        return FrozenParameter(to_float8(weight.detach()), to_float8)
    elif method == "mxfp4" and weight.dim() == 3:  # a stack of experts
        frozen = empty_mxfp4(weight.shape, weight.dtype)
    return None if frozen is None else FrozenParameter(frozen)


def empty_mxfp4(shape: Sequence[int], dtype: torch.dtype) -> Frozen:
    """A stack (experts, columns, rows) of transposed matrices on the meta device, as `FourBitStack` has them."""
    num_experts, num_columns, num_rows = shape
    if num_columns % 32:
        raise ValueError(
            f"MXFP4 has groups of 32 values, which do not divide this model's experts of shape {tuple(shape[1:])}. Set "
            "lora.quantize=none or float8."
        )
    groups = num_experts, num_rows, num_columns // 32
    blocks, exponents = (torch.empty(size, dtype=torch.uint8, device="meta") for size in ((*groups, 16), groups))
    return Frozen(Form("mxfp4", tuple(shape), dtype, is_transposed=True), (blocks, exponents))


def _scaled(name: str, stored: Mapping[str, StoredTensor], block: Any) -> ScaledTensor:
    numbers, scales = _piece(stored, name, "F8_E4M3"), _piece(stored, f"{name}{_OF_BLOCKS}", *_FLOATS)
    if len(numbers.shape) != 2:
        raise ValueError(
            f"{numbers.file}: {name} is in float8 and has the shape {list(numbers.shape)}; expected a matrix."
        )
    if math.prod(scales.shape) == 1:
        return ScaledTensor(numbers, scales, (numbers.shape[0], numbers.shape[1]))
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    grid = tuple(-(-n // size) for n, size in zip(numbers.shape, block, strict=True)) if is_pair else ()
    if scales.shape != grid:
        raise ValueError(_misfit(name, numbers, scales) + f" weight_block_size is {block!r:.100}.")
    return ScaledTensor(numbers, scales, (block[0], block[1]))


def _four_bit_stack(name: str, stored: Mapping[str, StoredTensor]) -> FourBitStack:
    blocks, exponents = (_piece(stored, f"{name}_{kind}", "U8") for kind in ("blocks", "scales"))
    if len(blocks.shape) != 4 or blocks.shape[3] != 16:
        expected = "experts, rows, and groups of 16 bytes"
        raise ValueError(f"{blocks.file}: {name}_blocks has the shape {list(blocks.shape)}; expected {expected}.")
    if exponents.shape != blocks.shape[:3]:
        raise ValueError(_misfit(name, blocks, exponents))
    return FourBitStack(blocks, exponents)


def _piece(stored: Mapping[str, StoredTensor], name: str, *dtype_names: str) -> StoredTensor:
    """Return a tensor of a quantized weight. Raises ValueError unless it has one of these dtypes and is not empty."""
    if name not in stored:
        raise ValueError(f"the weights lack {name}, which config.json's quantization_config requires.")
    piece = stored[name]
    if piece.dtype_name not in dtype_names or 0 in piece.shape:
        found = f"{name} is {piece.dtype_name} of the shape {list(piece.shape)}"
        raise ValueError(
            f"{piece.file}: {found}; expected {' or '.join(dtype_names)} values. Download the folder again."
        )
    return piece


def _check_all_read(stored: Mapping[str, StoredTensor], pieces: set[str]) -> None:
    """Raise ValueError for scales whose weight is missing or not quantized, so that its numbers would be read without
    them."""
    for name in stored.keys() - pieces:
        if name.endswith(_OF_BLOCKS):
            weight = stored.get(name.removesuffix(_OF_BLOCKS))
            found = "missing" if weight is None else f"stored as {weight.dtype_name}"
            raise ValueError(f"{stored[name].file}: {name} has scales of a weight that is {found}; expected F8_E4M3.")


def _misfit(name: str, numbers: StoredTensor, scales: StoredTensor) -> str:
    shapes = f"{list(scales.shape)}, which does not fit the weight's, {list(numbers.shape)}"
    return f"{scales.file}: the scales of {name} have the shape {shapes}."


def _read(stored: StoredTensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """The elements from `first` on as a tensor of this shape."""
    values = torch.empty(shape, dtype=stored.dtype)
    stored.read_part(Part(values, stored.shape, first))
    return values
