"""The header of a GGUF file: metadata and the places of tensors, with a check of every size and of every value that is
read.

A damaged file must not exhaust memory. Source: the GGUF specification (ggml, docs/gguf.md).
"""

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from lean_ft.system.installation import install_command
from lean_ft.system.whole_files import MAX_JSON_BYTES

_MAX_ENTRIES = 2**21  # of all arrays together; the largest vocabularies have 300,000 tokens and 600,000 merges
_MAX_COUNT = 2**24
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def gguf_package() -> Any:
    """Return the package `gguf`. Raises ValueError if it is missing."""
    try:
        import gguf
    except ImportError:
        raise ValueError(f"GGUF files need the package gguf. Run {install_command('gguf')}") from None
    return gguf


class TensorPlace(NamedTuple):
    """A tensor of the file: the kind in which its rows are stored, and where."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


def num_rows(shape: Sequence[int]) -> int:
    """The number of rows of a stored tensor; each number of a vector is one."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


class _Reader:
    """Numbers and strings of a header. One budget of bytes and one of entries hold for the whole header."""

    def __init__(self, file: Path) -> None:
        self.file, self.size, self.place, self.entries = file, file.stat().st_size, 0, _MAX_ENTRIES
        with file.open("rb") as stream:
            self.content = stream.read(MAX_JSON_BYTES)

    def bytes(self, length: int) -> bytes:
        start, self.place = self.place, self.place + length
        if self.place > self.size:
            raise ValueError(
                f"{self.file} is truncated: its header does not fit {self.size:,} bytes. Download it again."
            )
        if self.place > MAX_JSON_BYTES:
            raise self.damaged(f"more than {MAX_JSON_BYTES >> 20} MiB")
        return self.content[start : self.place]

    def number(self, code: str) -> Any:
        value = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]
        return float(str(np.float32(value))) if code == "f" else value  # the shortest decimal, as in config.json

    def text(self) -> str:
        try:
            return self.bytes(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a text that is not UTF-8") from None

    def count(self, most: int) -> int:
        number = self.number("Q")
        if number > most:
            raise self.damaged(f"a count of {number:,}, above {most:,}")
        return number

    def value(self, kind: int, in_array: bool = False) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and not in_array:
            kind, length = self.number("I"), self.count(self.entries)
            self.entries -= length
            if kind not in _SCALARS:
                return [self.value(kind, in_array=True) for _ in range(length)]
            code = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.bytes(struct.calcsize(code))))
        if kind not in _SCALARS:
            raise self.damaged(f"a value of the unknown type {kind}")
        return self.number(_SCALARS[kind])

    def damaged(self, content: str) -> ValueError:
        return ValueError(f"{self.file} is damaged: its header has {content}. Download it again.")


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """Return a GGUF file's metadata and tensors by name. Raises ValueError if it is damaged, or a kind of weights is
    unknown."""
    kinds = _kinds(gguf_package())
    metadata, tensors, starts = dict[str, Any](), dict[str, TensorPlace](), dict[str, int]()
    reader = _Reader(file)
    if reader.content[:4] != b"GGUF":
        raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF. Expected a file for llama.cpp.")
    reader.place = 4
    if (version := reader.number("I")) not in (2, 3):
        raise ValueError(f"{file} has version {version} of the format; expected 2 or 3, in little-endian order.")
    num_tensors, num_values = reader.count(2**17), reader.count(2**17)
    for _ in range(num_values):
        if (key := reader.text()) in metadata:
            raise reader.damaged(f"two values of {key}")
        metadata[key] = reader.value(reader.number("I"))
    for _ in range(num_tensors):
        name, num_dims = reader.text(), reader.number("I")
        if name in tensors or not 1 <= num_dims <= 4:
            raise reader.damaged(f"two tensors {name}" if name in tensors else f"{num_dims} dimensions of {name}")
        shape = tuple(reader.number("Q") for _ in range(num_dims))[::-1]
        number, start = reader.number("I"), reader.number("Q")
        kind, block, block_bytes = kinds.get(number, (str(number), 0, 0))
        if not block:
            names = ", ".join(name for name, size, _ in kinds.values() if size)
            raise ValueError(
                f"{file} stores {name} as {kind}; expected one of {names}. Choose another file of the model."
            )
        columns = shape[-1] if num_dims > 1 else 1
        if (num_dims == 1 and block > 1) or columns % block or 0 in shape:
            raise reader.damaged(f"the shape {list(shape)} of {name}, which is stored as {kind}")
        tensors[name], starts[name] = TensorPlace(kind, shape, 0, columns // block * block_bytes), start
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise reader.damaged(f"the alignment {alignment!r}; expected a power of two")
    data = end = -(-reader.place // alignment) * alignment
    for name in sorted(tensors, key=lambda name: starts[name]):
        stored, start = tensors[name], data + starts[name]
        if start < end:
            raise reader.damaged(f"the tensor {name} at byte {start:,}, inside another tensor")
        end = start + num_rows(stored.shape) * stored.row_bytes
        if end > reader.size:
            raise ValueError(
                f"{file} is truncated: {name} ends at byte {end:,}, and the file has {reader.size:,}. Download it "
                "again."
            )
        tensors[name] = stored._replace(offset=start)
    return metadata, tensors


@lru_cache(maxsize=1)
def _kinds(gguf: ModuleType) -> dict[int, tuple[str, int, int]]:
    """Each kind's name, and the numbers and bytes of its blocks; no numbers in a kind that cannot be dequantized."""
    sizes = {}
    for kind in gguf.GGMLQuantizationType:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            if kind.name not in ("F32", "F16"):
                gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            block = 0
        sizes[int(kind)] = (kind.name, block, block_bytes)
    return sizes


class Facts:
    """The metadata of the file's architecture, without its prefix, and the file's tensors by name."""

    def __init__(
        self,
        file: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, TensorPlace],
        vectors: Mapping[str, Any] = {},
    ) -> None:
        """vectors: the numbers of some tensors, for a file that is not written yet."""
        self.file, self.architecture, self.metadata = file, metadata["general.architecture"], metadata
        self.tensors, self.vectors = tensors, vectors
        prefix = f"{self.architecture}."
        values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        # Files of dense models may count 0 experts.
        self.values = {key: value for key, value in values.items() if value or not key.startswith("expert_")}
        self.read, self.num_layers = set[str](), 0
        num_drafting = self.count("nextn_predict_layers", 0)  # layers after the last, which draft tokens
        most = len(tensors) + 1  # every layer has a tensor
        self.num_layers = self.count("block_count", least=1 + num_drafting, most=most) - num_drafting

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def wrong(self, key: str, expected: str) -> ValueError:
        return ValueError(
            f"{self.file}: {key} is {self.values.get(key)!r}; expected {expected}. Download the file again."
        )

    def _get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise ValueError(f"{self.file} lacks the metadata {key} of its architecture. Download the file again.")
        return value

    def count(self, key: str, default: int | None = None, least: int = 0, most: int = _MAX_COUNT) -> int:
        """An integer or flag; of a list with one per layer, the largest."""
        value = self._get(key, default)
        number: Any = max(self.per_layer(key), default=None) if isinstance(value, list) else value
        if type(number) not in (int, bool) or not least <= number <= most:
            raise self.wrong(key, f"an integer from {least} to {most:,}")
        return number

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """An integer or flag per layer."""
        value = self._get(key, default)
        numbers = value[: self.num_layers] if isinstance(value, list) else [value] * self.num_layers
        if len(numbers) != self.num_layers or not all(type(n) in (int, bool) and 0 <= n <= _MAX_COUNT for n in numbers):
            raise self.wrong(key, "one number per layer")
        return numbers

    def pattern(self, period: int) -> list[int]:
        """Whether each layer has a sliding window: as the file lists, or all but every `period`th (0: all)."""
        key = "attention.sliding_window_pattern"
        if isinstance(self.values.get(key), list):
            return self.per_layer(key)
        period = self.count(key, period)
        return [period == 0 or (i + 1) % period != 0 for i in range(self.num_layers)]

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise self.wrong(key, "a number")
        return float(value)

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether a layer, or any, has a tensor, such as `attn_q.bias`."""
        layers = range(self.num_layers) if layer is None else (layer,)
        return any(f"blk.{i}.{name}" in self.tensors for i in layers)

    def num_rows(self, name: str) -> int:
        """The rows of a matrix outside the layers."""
        if name not in self.tensors:
            raise ValueError(f"{self.file} lacks the tensor {name}. Download the file again.")
        return self.tensors[name].shape[0]

    def vector(self, name: str, length: int) -> list[float]:
        """The numbers of a vector outside the layers, in the shortest decimals."""
        stored = self.tensors.get(name)
        if stored is None or stored.kind != "F32" or stored.shape != (length,):
            problem = "is missing" if stored is None else f"is {list(stored.shape)} {stored.kind}"
            raise ValueError(f"{self.file}: {name} {problem}; expected [{length}] F32.")
        values = self.vectors.get(name)
        values = np.fromfile(self.file, np.float32, length, offset=stored.offset) if values is None else values
        return [float(str(number)) for number in np.asarray(values, np.float32)]
