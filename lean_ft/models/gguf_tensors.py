"""Weights of a GGUF file under their Hugging Face names, dequantized in strips while they are read.

`lean_ft.export.gguf_import` writes the index, one entry per tensor, into a folder of the cache. Only folders there are trusted
to name a file anywhere on the disk.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

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
    num_heads: int | None = None
    """Set if the file pairs neighboring rows of a head, 2 * i and 2 * i + 1, which are rows i and i + head_dim / 2 here."""
    added: float = 0.0
    """What the file has added to every value."""

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
                values = self._rows(np.arange(row, stop)).view(-1)
                flat[done : done + taken].copy_(values[column : column + taken])
                first, length, done = first + taken, length - taken, done + taken

    def _rows(self, rows: np.ndarray) -> torch.Tensor:
        """The values of consecutive rows in float32."""
        import gguf

        if self.num_heads is not None:
            size = self.shape[0] // self.num_heads
            head, place = np.divmod(rows, size)
            rows = head * size + 2 * (place % (size // 2)) + place // (size // 2)
        start, stop = int(rows.min()), int(rows.max()) + 1
        stored = torch.empty((stop - start, self.row_bytes), dtype=torch.uint8)
        self._bytes.read_part(Part(stored, self._bytes.shape, start * self.row_bytes))
        kind = gguf.GGMLQuantizationType[self.dtype_name]
        values = torch.from_numpy(gguf.quants.dequantize(stored.numpy()[rows - start], kind))
        return values - self.added if self.added else values

    def pieces(self, size: int, at_most: int | None = None) -> Iterator[bytes]:
        """Yield the stored bytes, as `StoredTensor.pieces` does."""
        return self._bytes.pieces(size, at_most)

    @property
    def _bytes(self) -> StoredTensor:
        return StoredTensor(self.file, "U8", (num_rows(self.shape) * self.row_bytes,), self.offset)


def num_rows(shape: Sequence[int]) -> int:
    """The number of rows of a stored tensor; each number of a vector is one."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def write_index(folder: Path, file: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """Write the index of a file's tensors by their Hugging Face names."""
    entries = {name: {k: v for k, v in asdict(tensor).items() if k != "file"} for name, tensor in tensors.items()}
    write_json(folder / GGUF_INDEX, {"file": str(file), "tensors": entries})


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
        raise ValueError(f"{file}, which holds the weights of {folder}, is missing. Set model.path to its new place.")
    return {
        name: GGUFTensor(file, **{**entry, "shape": tuple(entry["shape"])}) for name, entry in index["tensors"].items()
    }
