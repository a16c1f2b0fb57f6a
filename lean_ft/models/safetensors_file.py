"""Read and write safetensors files tensor by tensor, without a second copy of the weights in memory.

The safetensors library maps a file into memory, where every touched page is resident until the file is closed, so
loading a model peaks at twice its size. This module copies bytes straight between file and parameter. The format is 8
bytes of length, a JSON header, and the tensors' bytes (https://huggingface.co/docs/safetensors). Files equal the
library's output byte for byte.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from io import RawIOBase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lean_ft.system.shards import ALONE, Part, Ranks, part_of
from lean_ft.system.whole_files import write_whole

# In the order in which the library writes them: wide dtypes first, so that tensors are aligned.
_DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = list(_NAMES)
# The largest published models have 100,000 tensors in many files.
_MAX_HEADER_BYTES = 2**25
MAX_TENSORS, MAX_NAME_CHARACTERS = 2**17, 1000
_STAGING_BYTES = 2**20
_COPIED_BYTES = 2**24  # at a time


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place on disk. `dtype` is None if the dtype, named by `dtype_name`, is not supported."""

    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    is_transposed: bool = field(default=False, kw_only=True)  # a stack of matrices of which the file has the transposes

    @property
    def dtype(self) -> torch.dtype | None:
        return _DTYPES.get(self.dtype_name)

    @property
    def transposed(self) -> "StoredTensor":
        """The stack (E, columns, rows) of the transposes of these matrices (E, rows, columns)."""
        return replace(self, shape=(*self.shape[:1], *self.shape[:0:-1]), is_transposed=True)

    def read(self) -> Tensor:
        """The tensor on the CPU. Raises ValueError if its dtype is not supported."""
        if self.dtype is None:
            raise ValueError(
                f"{self.file}: a tensor is stored as {self.dtype_name:.20}; expected one of {', '.join(_DTYPES)}."
            )
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_part(part_of(tensor))
        return tensor

    def read_part(self, part: Part) -> None:
        """Fill this rank's part of a tensor of this shape, on any device and in any floating dtype, with 1 MiB of
        memory; with none if the part is on the CPU and has the stored dtype, and with a matrix at a time if it is
        transposed."""
        assert self.dtype is not None
        assert part.shape == self.shape
        if not part.values.is_contiguous():
            values = torch.empty(part.values.shape, dtype=self.dtype)
            self.read_part(replace(part, values=values))
            part.values.copy_(values)
            return
        if self.is_transposed:
            size = math.prod(self.shape[1:])
            assert not part.first % size, "a stack is cut by its first dimension"
            for i, matrix in enumerate(part.values.view(-1, *self.shape[1:]), start=part.first // size):
                offset = self.offset + i * size * self.dtype.itemsize
                matrix.copy_(StoredTensor(self.file, self.dtype_name, self.shape[:0:-1], offset).read().T)
            return
        flat = part.values.view(-1)
        with open(self.file, "rb", buffering=0) as file:
            is_direct = flat.device.type == "cpu" and flat.dtype == self.dtype
            step = flat.numel() if is_direct else min(flat.numel(), _STAGING_BYTES // self.dtype.itemsize)
            staging = flat if is_direct else torch.empty(step, dtype=self.dtype, pin_memory=flat.is_cuda)
            done = 0
            for runs in _in_steps(part.runs(), step):
                filled = 0
                for first, length in runs:
                    file.seek(self.offset + first * self.dtype.itemsize)
                    _read_exactly(file, staging[filled : filled + length], self.file)
                    filled += length
                if not is_direct:
                    flat[done : done + filled].copy_(staging[:filled])
                done += filled

    def pieces(self, size: int, at_most: int | None = None) -> Iterator[bytes]:
        """Yield the tensor's bytes in pieces of `size`; with `at_most`, at most that many evenly spaced pieces."""
        assert self.dtype is not None
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        starts = range(self.offset, end, size)
        if at_most is not None and len(starts) > at_most:
            starts = [self.offset + i * (end - size - self.offset) // (at_most - 1) for i in range(at_most)]
        with open(self.file, "rb", buffering=0) as file:
            for start in starts:
                file.seek(start)
                yield file.read(min(size, end - start))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises ValueError if the file is damaged."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file} is not a safetensors file, or is truncated: its header does not fit.")
        content = stream.read(length)
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        spans = [(name, entry["dtype"], entry["shape"], entry["data_offsets"]) for name, entry in entries]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        expected = "expected JSON with the dtype, shape and data_offsets of each tensor"
        raise ValueError(f"{file} is damaged: its safetensors header cannot be read; {expected}.") from error
    if len(spans) > MAX_TENSORS or max(map(len, header), default=0) > MAX_NAME_CHARACTERS:
        most = f"{MAX_TENSORS:,} tensors, with names of {MAX_NAME_CHARACTERS:,} characters"
        raise ValueError(f"{file} is damaged: expected at most {most}.")
    tensors, end = {}, 0
    for name, dtype_name, shape, offsets in spans:
        if not _follows(end, shape, offsets, _DTYPES.get(str(dtype_name))):
            raise ValueError(f"{file} is damaged: the bytes of {name} do not match its shape.")
        tensors[name], end = StoredTensor(file, str(dtype_name), tuple(shape), 8 + length + offsets[0]), offsets[1]
    if end != size - 8 - length:
        found = size - 8 - length
        raise ValueError(
            f"{file} is damaged: expected {end} bytes of tensors, found {found}. Download or copy it again."
        )
    return tensors


def read_same(
    stored: Mapping[str, StoredTensor], own: Mapping[str, Part], folder: Path, what: str, begun_with: str
) -> None:
    """Read a checkpoint's tensors into a run's tensors, bit for bit and without a second copy.

    Raises ValueError before reading unless names, shapes and dtypes match.
    """
    if different := sorted(stored.keys() ^ own.keys()):
        owner = folder if different[0] in stored else "the model"
        raise ValueError(f"{folder} is not a checkpoint of this {what}: only {owner} has {different[0]}.")
    for name, tensor in own.items():
        found, expected = (stored[name].shape, stored[name].dtype), (tensor.shape, tensor.dtype)
        if found != expected:
            raise ValueError(
                f"{name} is {found[0]} {found[1]} in {folder} and {expected[0]} {expected[1]} in the model. "
                f"Resume with {begun_with} of the original run."
            )
    for name, part in own.items():
        stored[name].read_part(part)


def _follows(end: int, shape: Any, offsets: Any, dtype: torch.dtype | None) -> bool:
    """Whether shape and offsets are counts, and the tensor's bytes start at `end` and have the right number."""
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or len(shape) > 64:
        return False
    if any(type(n) is not int or not 0 <= n < 2**63 for n in [*shape, *offsets]):
        return False
    start, stop = offsets
    return start == end <= stop and (dtype is None or stop - start == math.prod(shape) * dtype.itemsize)


class Stored(Protocol):
    """A tensor on disk, of which a part can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_part(self, part: Part) -> None: ...


def write_file(
    file: Path,
    tensors: Mapping[str, Tensor | Part],
    metadata: Mapping[str, str],
    ranks: Ranks = ALONE,
    copied: Mapping[str, Stored] = {},
) -> None:
    """Write tensors to a file atomically, one at a time.

    All `ranks` call this with their parts of the same tensors. The bytes do not depend on the number of ranks. If one
    rank fails, all raise. Rank 0 reads tensors on the meta device from `copied`, and writes them in pieces of some MiB.
    """
    parts = {name: tensor if isinstance(tensor, Part) else part_of(tensor) for name, tensor in tensors.items()}
    names = sorted(parts, key=lambda name: (_ORDER.index(parts[name].dtype), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for name in names:
        part, starts[name], end = parts[name], end, end + parts[name].whole_bytes
        header[name] = {"dtype": _NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    encoded = len(encoded).to_bytes(8, "little") + encoded

    with ExitStack() as whole_or_not:

        def begin() -> Path:
            temporary = whole_or_not.enter_context(write_whole(file))
            with temporary.open("wb") as stream:
                stream.write(encoded)
                stream.truncate(len(encoded) + end)
            return temporary

        def write_mine() -> None:
            with open(temporary, "r+b", buffering=0) as stream:
                for name in names:
                    part, offset = parts[name], len(encoded) + starts[name]
                    if part.values.is_meta and ranks.rank == 0:
                        _copy(stream, copied[name], part, offset)
                    elif not part.values.is_meta and not part.is_kept_by_others:
                        _write_part(stream, part, offset)
                if ranks.size > 1:  # on a shared disk rank 0 may not sync other ranks' writes
                    os.fsync(stream.fileno())

        temporary = ranks.on_rank_zero(begin)
        ranks.on_every_rank(write_mine)
        ranks.on_rank_zero(whole_or_not.close)


def _in_steps(runs: Iterator[tuple[int, int]], step: int) -> Iterator[list[tuple[int, int]]]:
    """Split runs of elements into groups of `step` elements; the last group may have fewer."""
    group, room = [], step
    for first, length in runs:
        while length:
            taken = min(length, room)
            group.append((first, taken))
            first, length, room = first + taken, length - taken, room - taken
            if not room:
                yield group
                group, room = [], step
    if group:
        yield group


def _write_part(stream: RawIOBase, part: Part, offset: int) -> None:
    """Write this rank's part of a tensor that starts at byte `offset`."""
    size, done = part.values.element_size(), 0
    content = _bytes_of(part.values.detach().cpu().contiguous())
    for first, length in part.runs():
        stream.seek(offset + first * size)
        remaining = content[done : done + length * size]
        while remaining:  # one write takes at most 2 GiB
            remaining = remaining[stream.write(remaining) :]
        done += length * size


def _copy(stream: RawIOBase, stored: Stored, place: Part, offset: int) -> None:
    """Copy a stored tensor to byte `offset`, some rows at a time. place: a part with its shape and dtype."""
    num_rows, numel = (*place.shape, 1)[0], math.prod(place.shape)
    of_row = numel // max(1, num_rows)
    step = max(1, _COPIED_BYTES // max(1, of_row * place.dtype.itemsize))
    for first in range(0, num_rows if numel else 0, step):
        shape = (min(step, num_rows - first), *place.shape[1:])[: len(place.shape)]
        rows = Part(torch.empty(shape, dtype=place.dtype), place.shape, first * of_row)
        stored.read_part(rows)
        _write_part(stream, rows, offset)


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(-1).view(torch.uint8).numpy().data


def _read_exactly(file, target: Tensor, name: Path) -> None:
    remaining = _bytes_of(target)
    while remaining:  # one read returns at most 2 GiB
        count = file.readinto(remaining)
        if not count:
            raise ValueError(f"{name} is truncated. Download or copy it again.")
        remaining = remaining[count:]
