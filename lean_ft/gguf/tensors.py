"""Weights of a GGUF file under their Hugging Face names, checked against the model and dequantized in strips while they
are read.

Source: llama.cpp, src/llama-model.cpp.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lean_ft.gguf.cache import GGUF_INDEX
from lean_ft.gguf.header import Facts, TensorPlace, num_rows
from lean_ft.gguf.names import all_tensors, architecture_metadata, divisors_of, is_exact, layout_of, load
from lean_ft.gguf.open import USE_FOLDER
from lean_ft.gguf.rows import GGUFFamily, Step
from lean_ft.gguf.wholes import row_of
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.system.shards import Part
from lean_ft.system.whole_files import read_json

if TYPE_CHECKING:
    from lean_ft.models import Decoder

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_STRIP_NUMBERS = 2**18  # numbers dequantized at a time
# Metadata that tensors' shapes show, that repeats other metadata, or that changes nothing for text.
_UNCHECKED = {
    "block_count", "vocab_size", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "rope.dimension_sections", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "attention.sliding_window_pattern", "full_attention_interval",
}  # fmt: skip


def gguf_tensors(folder: Path, model: "Decoder") -> dict[str, StoredTensor]:
    """Return the weights of a folder of the cache by their Hugging Face names. `model` is the folder's, without
    weights.

    Raises ValueError if the GGUF file is gone, or unless it has the metadata and tensors that lean_ft would write for
    the model.
    """
    index = read_json(folder / GGUF_INDEX)
    file = Path(index["file"])
    if not file.is_file():
        raise ValueError(f"{file}, which holds the weights of the model, is missing. Set model.path to its new place.")
    tensors = {
        name: TensorPlace(kind, tuple(shape), *place) for name, (kind, shape, *place) in index["tensors"].items()
    }
    facts, family = Facts(file, index["metadata"], tensors), row_of(model)
    _check_metadata(facts, architecture_metadata(model, family), index["read"])
    _check_tensors(facts, model, family)
    return dict(_stored_parameters(facts, model, family))


def _check_metadata(facts: Facts, expected: Mapping[str, Any], read: list[str]) -> None:
    """Raise ValueError unless a file of the model that was read has the same metadata."""
    unused = {key for key in facts.values if key.startswith("ssm.") and facts.architecture.startswith("granite")}
    if unknown := sorted(facts.values.keys() - expected.keys() - set(read) - _UNCHECKED - unused):
        raise ValueError(
            f"{facts.file} has the metadata {', '.join(unknown)}, which lean_ft does not read for "
            f"{facts.architecture}. {USE_FOLDER}"
        )
    for key in facts.values.keys() & expected.keys() - _UNCHECKED:
        if not _is_same(facts.values[key], expected[key], facts.num_layers):
            raise ValueError(f"{facts.file}: {key} is {facts.values[key]}; expected {expected[key]}. {USE_FOLDER}")


def _is_same(stored: object, expected: object, num_layers: int) -> bool:
    if isinstance(stored, list) or isinstance(expected, list):  # a file also counts the layers that draft tokens
        each, each_expected = (
            value[:num_layers] if isinstance(value, list) else [value] * num_layers for value in (stored, expected)
        )
        return len(each) == len(each_expected) and all(
            _is_same(*pair, num_layers) for pair in zip(each, each_expected, strict=True)
        )
    if isinstance(stored, int | float) and isinstance(expected, int | float):
        return math.isclose(stored, expected, rel_tol=1e-4)
    return stored == expected


def _check_tensors(facts: Facts, model: "Decoder", family: GGUFFamily) -> None:
    """Raise ValueError unless the file has the model's tensors, in their shapes."""
    expected = {name: tuple(tensor.shape) for name, tensor in all_tensors(model, family, "meta")}
    unread = tuple(f"blk.{i}." for i in range(facts.num_layers, facts.count("block_count")))  # layers that draft tokens
    in_file = {name for name in facts.tensors if not name.startswith(unread)} - {"rope_freqs.weight"}
    for problem, names in (
        ("lacks", expected.keys() - facts.tensors.keys()),
        ("has unexpected", in_file - expected.keys()),
    ):
        if names:
            few = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ValueError(
                f"{facts.file} {problem} tensors of {facts.architecture}: {few}. Download the file again, or use "
                "another one."
            )
    for name, shape in expected.items():
        stored = facts.tensors[name].shape
        if [n for n in stored if n != 1] != [n for n in shape if n != 1]:
            raise ValueError(
                f"{facts.file}: {name} has the shape {list(stored)}; expected {list(shape)} from the metadata. "
                "Download the file again."
            )
    for name, divisors in divisors_of(model.config).items():
        if not np.allclose(facts.vector(name, len(divisors)), divisors, rtol=1e-4):
            raise ValueError(
                f"{facts.file}: {name} is not a scaling of frequencies that lean_ft computes. {USE_FOLDER}"
            )


def _stored_parameters(facts: Facts, model: "Decoder", family: GGUFFamily) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the model's tensors by their names on disk."""
    for name, parameter in model.state_dict().items():
        steps, names = layout_of(name, model, family)
        if model.source.is_transposed(name):
            steps = (("transpose",), *steps)
        pieces = list(model.source.stored(name, parameter))
        sources = [GGUFTensor(facts.file, *facts.tensors[name_in_file]) for name_in_file in names]
        if not names:
            numbers = facts.metadata.get(key := f"xielu.{name.rpartition('.')[2]}")
            if not isinstance(numbers, list) or [type(number) for number in numbers] != [float] * facts.num_layers:
                raise ValueError(f"{facts.file}: {key} is not one number per layer. Download the file again.")
            number = numbers[int(name.split(".")[2])]
            yield pieces[0][0], InlineTensor(facts.file, "F32", tuple(parameter.shape), 0, (number,))
        elif len(pieces) > 1:  # a stack, with a matrix or two of each expert on disk
            for i, (place, _) in enumerate(pieces):
                expert, source = divmod(i, len(sources))
                yield place, sources[source].of_stack(expert)
        elif steps or sources[0].shape != tuple(parameter.shape):
            kind, offset, shape = sources[0].dtype_name, sources[0].offset, tuple(pieces[0][1].shape)
            yield pieces[0][0], ArrangedTensor(facts.file, kind, shape, offset, tuple(sources), steps)
        else:
            yield pieces[0][0], sources[0]


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor of a GGUF file. `dtype_name` is the kind in which llama.cpp stores its rows, such as Q4_K."""

    row_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds the values exactly."""
        return _DTYPES.get(self.dtype_name, torch.float32)

    def read_part(self, part: Part) -> None:
        """Fill this rank's part of the tensor, with memory for a few MiB of rows."""
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        flat, done = part.values.view(-1), 0
        for first, length in part.runs():
            while length:
                row, column = divmod(first, columns)
                stop = row + min(-(-(column + length) // columns), max(1, _STRIP_NUMBERS // columns))
                taken = min(length, (stop - row) * columns - column)
                values = self._rows(row, stop).view(-1)
                flat[done : done + taken].copy_(values[column : column + taken])
                first, length, done = first + taken, length - taken, done + taken

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        """The values of consecutive rows in float32."""
        import gguf

        stored = torch.empty((stop - start, self.row_bytes), dtype=torch.uint8)
        self._bytes.read_part(Part(stored, self._bytes.shape, start * self.row_bytes))
        return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[self.dtype_name]))

    def of_stack(self, number: int) -> "GGUFTensor":
        """One matrix or vector of a stack."""
        shape = self.shape[1:]
        stored_rows = num_rows(self.shape) // self.shape[0]
        return replace(self, shape=shape, offset=self.offset + number * stored_rows * self.row_bytes)

    def pieces(self, size: int, at_most: int | None = None) -> Iterator[bytes]:
        """Yield the stored bytes, as `StoredTensor.pieces` does."""
        return self._bytes.pieces(size, at_most)

    @property
    def _bytes(self) -> StoredTensor:
        return StoredTensor(self.file, "U8", (num_rows(self.shape) * self.row_bytes,), self.offset)


@dataclass(frozen=True)
class ArrangedTensor(StoredTensor):
    """A tensor that a GGUF file stores as others: `steps` of `lean_ft.gguf.names` lead from it to `sources`."""

    sources: tuple[GGUFTensor, ...]
    steps: tuple[Step, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {source.dtype for source in self.sources}
        return dtypes.pop() if len(dtypes) == 1 and is_exact(self.steps) else torch.float32

    def read_part(self, part: Part) -> None:
        """Fill this rank's part of the tensor, with memory for the whole in float32, or for one matrix of a stack."""
        if any(len(tensor.shape) != 3 or tensor.shape[0] != self.shape[0] for tensor in (self, *self.sources)):
            whole = load([source.read().float() for source in self.sources], self.steps, self.shape)
            part.values.copy_(part.within(whole.contiguous()))
            return
        of_matrix = math.prod(self.shape[1:])
        assert part.run is None and not part.first % of_matrix, "a stack is cut by its first dimension"
        for number, values in enumerate(part.values.view(-1, *self.shape[1:]), start=part.first // of_matrix):
            sources = [source.of_stack(number).read().float()[None] for source in self.sources]
            values.copy_(load(sources, self.steps, (1, *self.shape[1:]))[0])

    def pieces(self, size: int, at_most: int | None = None) -> Iterator[bytes]:
        for source in self.sources:
            yield from source.pieces(size, at_most)


@dataclass(frozen=True)
class InlineTensor(StoredTensor):
    """A tensor of a few numbers, which the file has among its metadata."""

    numbers: tuple[float, ...]

    dtype = torch.float32  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def read_part(self, part: Part) -> None:
        part.values.copy_(part.within(torch.tensor(self.numbers).reshape(self.shape)))

    def pieces(self, size: int, at_most: int | None = None) -> Iterator[bytes]:
        yield np.asarray(self.numbers, np.float32).tobytes()
