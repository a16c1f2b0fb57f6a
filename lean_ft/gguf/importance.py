"""The importance of input features for a quantized GGUF file, and how much the file differs from the model.

The importance of an input feature of a matrix is the mean square of that input. It comes from a file of llama.cpp's
`llama-imatrix`.

Source: llama.cpp, tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.

Shapes: R rows and C columns of a matrix, E experts.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lean_ft.gguf.header import read_header
from lean_ft.gguf.quantize import serial_operations
from lean_ft.gguf.tensors import GGUFTensor
from lean_ft.system.shards import Part

_STRIP = 2**18  # weights compared at a time

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


@serial_operations()
def compare(file: Path, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the relative error of the quantized matrices of each kind, and of `all`: |stored - tensor| / |tensor|.

    tensors: the file's tensors before quantization.
    """
    _, header = read_header(file)
    sums = defaultdict[str, Tensor](lambda: torch.zeros(2, dtype=torch.float64))
    for name, tensor in tensors:
        stored = header[name]
        if stored.kind in ("F32", "F16", "BF16"):
            continue
        of_file, rows = GGUFTensor(file, *stored), tensor.flatten(0, -2)
        step = max(1, _STRIP // rows.shape[1])
        for start in range(0, len(rows), step):
            expected = rows[start : start + step].float()
            values = torch.empty_like(expected)
            of_file.read_part(Part(values, stored.shape, start * rows.shape[1]))
            norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (values - expected, expected)]
            sums[stored.kind.lower()] += torch.stack(norms).square()
    if len(sums) > 1:
        sums = {"all": torch.stack([*sums.values()]).sum(0), **sums}
    return {kind: float((error / size).sqrt()) for kind, (error, size) in sums.items()}
