"""Weights of a GGUF file under their Hugging Face names, dequantized in strips while they are read.

`lean_ft.gguf.open` writes the index, one entry per tensor, into a folder of the cache. Only folders there are trusted
to name a file anywhere on the disk.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lean_ft.gguf.layouts import Step, is_exact, load
from lean_ft.hub.paths import gguf_cache
from lean_ft.models.safetensors_file import StoredTensor
from lean_ft.system.shards import Part
from lean_ft.system.whole_files import read_json, write_json

GGUF_INDEX = "model.gguf.json"
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_STRIP_NUMBERS = 2**18  # numbers dequantized at a time


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
    """A tensor that a GGUF file stores as others: `steps` of `gguf_layouts` lead from it to `sources`."""

    sources: tuple[GGUFTensor, ...]
    steps: tuple[Step, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {source.dtype for source in self.sources}
        return dtypes.pop() if len(dtypes) == 1 and is_exact(self.steps) else torch.float32

    def read_part(self, part: Part) -> None:
        """Fill this rank's part of the tensor, with memory for the whole in float32, or for one matrix of a stack."""
        if any(len(one.shape) != 3 or one.shape[0] != self.shape[0] for one in (self, *self.sources)):
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


def num_rows(shape: Sequence[int]) -> int:
    """The number of rows of a stored tensor; each number of a vector is one."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def write_index(folder: Path, file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the index of a file's tensors by their Hugging Face names."""
    entries = {name: _entry(tensor) for name, tensor in tensors.items()}
    write_json(folder / GGUF_INDEX, {"file": str(file), "tensors": entries})


def _entry(tensor: StoredTensor) -> dict:
    entry = {name: value for name, value in vars(tensor).items() if name not in ("file", "sources")}
    return entry | (
        {"sources": [_entry(source) for source in tensor.sources]} if isinstance(tensor, ArrangedTensor) else {}
    )


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file whose weights the folder lists; None if the folder is not in the GGUF cache."""
    if folder.parent != gguf_cache() or not (folder / GGUF_INDEX).is_file():
        return None
    return Path(read_json(folder / GGUF_INDEX)["file"])


def gguf_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder of the cache by name. Raises ValueError if the file is gone."""
    index = read_json(folder / GGUF_INDEX)
    file = Path(index["file"])
    if not file.is_file():
        raise ValueError(f"{file}, which holds the weights of the model, is missing. Set model.path to its new place.")

    def tensor(entry: dict) -> StoredTensor:
        entry["shape"] = tuple(entry["shape"])
        if "sources" in entry:
            steps = tuple((name, *numbers) for name, *numbers in entry.pop("steps"))
            return ArrangedTensor(file, **{**entry, "sources": tuple(map(tensor, entry["sources"])), "steps": steps})
        return (InlineTensor if "numbers" in entry else GGUFTensor)(file, **entry)

    return {name: tensor(entry) for name, entry in index["tensors"].items()}
