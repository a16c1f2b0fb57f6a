"""The memory of this process, as the operating system and the device's allocator count it.

Resident memory is the physical memory of the process: weights, gradients, optimizer state, and freed memory that the
allocator has not returned. On a GPU the peak is the caching allocator's: the most bytes in live tensors at one time. Nothing
here waits for the device.

A run's memory should stop growing after a few steps; a leak ends a long run after hours. So growth since step 10 is measured,
and growth that continues is logged. File pages do not count: they grow as data is read, and the kernel drops them when needed.

Source: proc(5), `/proc/[pid]/status` (VmRSS, VmHWM).
"""

import resource
import sys
from pathlib import Path

import torch

from lean_ft.system.environment import proc_bytes

STATUS = Path("/proc/self/status")
SETTLED_STEPS = 10  # after so many steps nothing happens for the first time
WINDOW_STEPS = 25  # the minimum over so many steps leaves out temporary memory
GROWING_SHARE = 0.005  # of the resident size, over three windows; less may be noise


def rss_bytes() -> int | None:
    """Current resident size of this process, in bytes; None except on Linux."""
    return proc_bytes(STATUS, "VmRSS")


def own_rss_bytes() -> int | None:
    """Current resident size without file pages (libraries, data), in bytes; None except on Linux."""
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
    """Peak memory of training on `device`, in bytes: the allocator's peak on CUDA, the process's peak on a CPU, the current
    allocation on MPS, whose allocator keeps no peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return peak_rss_bytes()


class ResidentGrowth:
    """Watches the resident size over the steps of one process.

    `goes_on` becomes True if, at step 200 or any 25th step later, the minimum resident size has grown from each 25 steps to
    the next over the last three windows, by 0.5% in total.
    """

    def __init__(self) -> None:
        self.goes_on = False
        self._steps = 0
        self._settled: int | None = None
        self._floors: list[int] = []  # minimum of each window, the current one last

    def note(self, resident_bytes: int | None) -> int | None:
        """Record the resident size after a step; return the growth since step 10, None before."""
        if resident_bytes is None:
            return None
        if self._steps % WINDOW_STEPS == 0:
            self._floors.append(resident_bytes)
        self._floors[-1] = min(self._floors[-1], resident_bytes)
        self._steps += 1
        if self._steps == SETTLED_STEPS:
            self._settled = resident_bytes
        if self._steps % WINDOW_STEPS == 0 and self._steps >= 8 * WINDOW_STEPS:
            first, second, third = self._floors[-3:]
            self.goes_on |= first < second < third and third - first > GROWING_SHARE * first
        return None if self._settled is None else resident_bytes - self._settled
