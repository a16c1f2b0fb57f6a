"""Read and write safetensors one slice at a time, so that a checkpoint needs no second copy of what it saves.

The library's own writer collects every tensor first (a copy of the whole state for tensors on a GPU) and its
reader maps the file, whose pages then count as resident. Here at most `SLICE_BYTES` are in flight, and the
checksum is taken from the bytes as they pass.

Format: 8 bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the data.
Source: https://huggingface.co/docs/safetensors
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

SLICE_BYTES = 16 * 2**20

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write `tensors` (any device, any strides) to a new file, flush it to the disk and return its sha256."""
    # Widest types first: every offset is then a multiple of its own item size, which mapped readers rely on.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, end = {}, 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)

    digest = hashlib.sha256()
    with path.open("xb") as file:
        for chunk in (len(encoded).to_bytes(8, "little"), encoded):
            digest.update(chunk)
            file.write(chunk)
        for name in names:
            for view in _slices(tensors[name].detach()):
                chunk = memoryview(view.cpu().numpy())
                digest.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _slices(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's bytes in order, as uint8 views of at most SLICE_BYTES."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), SLICE_BYTES):
        yield flat[start : start + SLICE_BYTES]


class TensorFile(Mapping[str, Tensor]):
    """A safetensors file as a read-only mapping whose tensors are read when asked for, into memory of their own.

    Holds the file open; use it in a `with`. Raises ValueError for a file that is not whole safetensors.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            length = int.from_bytes(self._file.read(8), "little")
            size = os.fstat(self._file.fileno()).st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"its header would be {length} bytes of a file of {size}")
            self._header = json.loads(self._file.read(length))
            self._header.pop("__metadata__", None)
            self._data_start = 8 + length
            end = max((entry["data_offsets"][1] for entry in self._header.values()), default=0)
            if self._data_start + end != size:
                raise ValueError(f"its header tells of {self._data_start + end} bytes, it has {size}")
        except ValueError as error:
            self.close()
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._header)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._header[name]["dtype"]]

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._header[name]["shape"])

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill `tensor` (any device; shape and type as in the file) with the tensor called `name`."""
        assert tensor.shape == self.shape(name), (name, tensor.shape, self.shape(name))
        assert tensor.dtype == self.dtype(name), (name, tensor.dtype, self.dtype(name))
        self._file.seek(self._data_start + self._header[name]["data_offsets"][0])
        with torch.no_grad():
            if not tensor.is_contiguous():
                tensor.copy_(self._read_contiguous(name))
            else:
                self._fill(tensor.detach().reshape(-1).view(torch.uint8))

    def _read_contiguous(self, name: str) -> Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self._fill(tensor.reshape(-1).view(torch.uint8))
        return tensor

    def _fill(self, flat: Tensor) -> None:
        """Read from the file's position into the contiguous bytes `flat`."""
        staging = (
            None
            if flat.device.type == "cpu"
            else torch.empty(min(SLICE_BYTES, flat.numel()), dtype=torch.uint8)
        )
        for start in range(0, flat.numel(), SLICE_BYTES):
            target = flat[start : start + SLICE_BYTES]
            buffer = target if staging is None else staging[: target.numel()]
            unread = memoryview(buffer.numpy())
            while unread:
                count = self._file.readinto(unread)
                if not count:
                    raise ValueError(f"{self.path} ended early")
                unread = unread[count:]
            if staging is not None:
                target.copy_(buffer)


def tensors_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What `write_tensors` will put into its file, header aside."""
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors.values())
