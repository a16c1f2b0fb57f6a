"""Counters of the simulated GPU: launches, host waits, copies, and bytes as the driver counts them."""

import ctypes
import tempfile
from pathlib import Path

# In the order of `Counters` in pretended_cuda.cpp.
NAMES = (
    "kernels",
    "host_waits",
    "copies",
    "copied_bytes",
    "device_mallocs",
    "pinned_bytes",
    "used_bytes",
    "peak_bytes",
    "late_ops",
    "graph_launches",
    "graph_kernels",
)


def counters() -> dict[str, int]:
    """Return all counts since the process began or `reset_counters`; `pinned_bytes` and `used_bytes` are current
    values."""
    found = (ctypes.c_ulonglong * len(NAMES))()
    _library().pretended_counters(found)
    return dict(zip(NAMES, found, strict=True))


def reset_counters() -> None:
    _library().pretended_reset_counters()


def limit_pinned_bytes(limit: int | None) -> None:
    """Limit the host memory that can be pinned, in bytes; None: no limit."""
    _library().pretended_limit_pinned(ctypes.c_size_t(2**64 - 1 if limit is None else limit))


def launches() -> dict[str, int]:
    """Return launches since `reset_counters` by mangled kernel name. Needs PRETENDED_GPU_NAMES=1."""
    with tempfile.NamedTemporaryFile() as file:
        _library().pretended_write_launches(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    return {name: int(count) for count, _, name in (line.partition(" ") for line in lines)}


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # preloaded by run.sh
