"""What the pretended GPU counted: launches, waits of the host, copies, and bytes by the driver's own count."""

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
)


def counters() -> dict[str, int]:
    """All counts since the process began or `reset_counters`; `pinned_bytes` and `used_bytes` are what is held now."""
    found = (ctypes.c_ulonglong * len(NAMES))()
    _library().pretended_counters(found)
    return dict(zip(NAMES, found, strict=True))


def reset_counters() -> None:
    _library().pretended_reset_counters()


def launches() -> dict[str, int]:
    """Launches since `reset_counters` by the (mangled) name of the kernel; needs PRETENDED_GPU_NAMES=1."""
    with tempfile.NamedTemporaryFile() as file:
        _library().pretended_write_launches(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    return {name: int(count) for count, _, name in (line.partition(" ") for line in lines)}


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # the one that run.sh preloads
