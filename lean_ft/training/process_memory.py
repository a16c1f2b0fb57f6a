"""The memory of this process, as the operating system and the device's allocator count it.

Resident memory is the physical memory of the process: weights, gradients, optimizer state, and freed memory that the
allocator has not returned. On a GPU the peak is the caching allocator's: the most bytes in live tensors at one time.
Nothing here waits for the device.

Source: proc(5), `/proc/[pid]/status` (VmRSS, VmHWM).
"""

import resource
import sys
from pathlib import Path

import torch

from lean_ft.system.environment import proc_bytes

STATUS = Path("/proc/self/status")


def rss_bytes() -> int | None:
    """Current resident size of this process, in bytes; None except on Linux."""
    return proc_bytes(STATUS, "VmRSS")


def own_rss_bytes() -> int | None:
    """Current resident size without file pages (libraries, data), in bytes; None except on Linux.

    File pages grow as data is read, and the kernel drops them when needed.
    """
    resident, of_files = proc_bytes(STATUS, "VmRSS"), proc_bytes(STATUS, "RssFile")
    return None if resident is None or of_files is None else resident - of_files


def peak_rss_bytes() -> int:
    """Peak resident size of this process, in bytes."""
    peak = proc_bytes(STATUS, "VmHWM")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, the others KiB
    return peak


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of training on `device`, in bytes: the allocator's peak on CUDA, the process's peak on a CPU, the
    current allocation on MPS, whose allocator keeps no peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return peak_rss_bytes()
