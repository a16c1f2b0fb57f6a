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

from lean_ft.models.frozen_weight import Form, Frozen
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.system.shards import Part

READABLE = ("fp8", "mxfp4")
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
        """Fill this rank's part of the `numbers`, or of the `scales`, one per row and block of columns."""
        if key == "numbers":
            self.numbers.read_part(part)
            return
        scales = self.scales.read().float().view(-(-self.shape[0] // self.block[0]), -1)
        part.values.copy_(part.within(scales.repeat_interleave(self.block[0], 0)[: self.shape[0]].contiguous()))


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

    config: the `quantization_config` of config.json, or empty. Raises ValueError if scales do not fit their weight.
    """
    if config.get("quant_method") == "mxfp4":
        stacks = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
        pieces = {f"{name}_{kind}" for name in stacks for kind in ("blocks", "scales")}
        made = {name: FourBitStack(stored[f"{name}_blocks"], _scales(stored, f"{name}_scales")) for name in stacks}
        for name, stack in made.items():
            if len(stack.blocks.shape) != 4 or stack.exponents.shape != stack.blocks.shape[:3]:
                raise ValueError(_misfit(name, stack.blocks, stack.exponents))
    elif config.get("quant_method") == "fp8":
        names = [name for name, tensor in stored.items() if tensor.dtype_name == "F8_E4M3"]
        pieces = {name for name in stored if name.endswith(("_scale_inv", ".activation_scale"))} | set(names)
        made = {name: _scaled(name, stored, config.get("weight_block_size")) for name in names}
    else:
        return dict(stored)
    return {**{name: tensor for name, tensor in stored.items() if name not in pieces}, **made}


def form_in_folder(name: str, tensors: Sequence[Readable], shape: Sequence[int], dtype: torch.dtype) -> Frozen | None:
    """The form of a parameter whose pieces a folder stores as `tensors`, on the meta device; None if it is not quantized there.

    Raises ValueError if blocks of scales do not divide the columns.
    """
    first = tensors[0]
    if isinstance(first, FourBitStack):
        return empty_mxfp4(shape, dtype)
    widths = {tensor.block[1] if isinstance(tensor, ScaledTensor) else None for tensor in tensors}
    if None in widths:
        return None
    *rows, num_columns = shape
    width = widths.pop() or num_columns
    if widths or num_columns % width:
        raise ValueError(
            f"{first.file}: {name} has {num_columns} columns, which its blocks of {width} columns do not divide, so it cannot be "
            "kept in float8. Set lora.quantize=none or nf4."
        )
    numbers = torch.empty(*rows, num_columns, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty(*rows, num_columns // width, device="meta")
    return Frozen(Form("float8", tuple(shape), dtype), (numbers, scales))


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
    numbers, scales = stored[name], _scales(stored, f"{name}_scale_inv")
    if len(numbers.shape) == 2 and math.prod(scales.shape) == 1:
        return ScaledTensor(numbers, scales, numbers.shape)  # type: ignore[arg-type]
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not is_pair or scales.shape != tuple(-(-n // size) for n, size in zip(numbers.shape, block, strict=False)):
        raise ValueError(_misfit(name, numbers, scales) + f" weight_block_size is {block!r}.")
    return ScaledTensor(numbers, scales, (block[0], block[1]))


def _scales(stored: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in stored:
        raise ValueError(f"the weights lack {name}, which config.json's quantization_config requires.")
    return stored[name]


def _misfit(name: str, numbers: StoredTensor, scales: StoredTensor) -> str:
    shapes = f"{list(scales.shape)}, which does not fit the weight's, {list(numbers.shape)}"
    return f"{scales.file}: the scales of {name} have the shape {shapes}."


def _read(stored: StoredTensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """The elements from `first` on as a tensor of this shape."""
    values = torch.empty(shape, dtype=stored.dtype)
    stored.read_part(Part(values, stored.shape, first))
    return values
