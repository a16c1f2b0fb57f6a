"""How much memory this process holds, as the operating system and the device's allocator count it.

Resident memory is what the kernel has given the process physical pages for: weights, gradients, optimizer state,
and also freed memory the allocator has not handed back. That is the honest number on a CPU. On a GPU the peak is
the caching allocator's: the most bytes that were in live tensors at once. Nothing here waits for the device.

Source: proc(5), `/proc/[pid]/status` (VmRSS, VmHWM).
"""

import contextlib
import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def _status_bytes(field: str) -> int | None:
    """A `VmXXX:  1234 kB` line of /proc/self/status in bytes; None where there is no such file or line."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def rss_bytes() -> int | None:
    """Resident size of this process now, in bytes; None off Linux, where only the peak is to be had cheaply."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Largest resident size of this process since it started, in bytes."""
    peak = _status_bytes("VmHWM")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, the others KiB
    return peak


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of training on `device`, in bytes: the allocator's peak on CUDA, the process's peak on a CPU.

    On MPS, whose allocator keeps no peak, it is the driver's present allocation.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return peak_rss_bytes()
