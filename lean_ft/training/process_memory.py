"""How much memory this process holds, as the operating system and the device's allocator count it.

Resident memory is what the kernel has given the process physical pages for: weights, gradients, optimizer state,
and also freed memory the allocator has not handed back. That is the honest number on a CPU. On a GPU the peak is
the caching allocator's: the most bytes that were in live tensors at once. Nothing here waits for the device.

A run's own memory should stand still once all has happened that happens in a step. What still grows then ends a long
run after hours, so growth is told from step 10 on, and what goes on growing is noticed. Pages of files do not count: the
more of its data a run has read, the more of that is resident, until the kernel wants the room.

Source: proc(5), `/proc/[pid]/status` (VmRSS, VmHWM).
"""

import resource
import sys
from pathlib import Path

import torch

from lean_ft.system.environment import proc_bytes

STATUS = Path("/proc/self/status")
SETTLED_STEPS = 10  # after so many a step does nothing for the first time
WINDOW_STEPS = 25  # the least resident size of so many steps is that of what stays, without what comes and goes
GROWING_SHARE = 0.005  # of the resident size, over three windows: what is less may be noise


def rss_bytes() -> int | None:
    """Resident size of this process now, in bytes; None off Linux, where only the peak is to be had cheaply."""
    return proc_bytes(STATUS, "VmRSS")


def own_rss_bytes() -> int | None:
    """Resident size now without the pages of files, libraries and data, which the kernel may drop; None off Linux."""
    resident, of_files = proc_bytes(STATUS, "VmRSS"), proc_bytes(STATUS, "RssFile")
    return None if resident is None or of_files is None else resident - of_files


def peak_rss_bytes() -> int:
    """Largest resident size of this process since it started, in bytes."""
    peak = proc_bytes(STATUS, "VmHWM")
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


class ResidentGrowth:
    """How the resident size goes from step to step of one process, of which it is told each.

    It goes on where at step 200, or at any 25th later, the least resident size of the last 25 steps is above that of the
    25 before, and that one above that of the 25 before them, by half a percent together.
    """

    def __init__(self) -> None:
        self.goes_on = False  # once it was seen to grow still
        self._steps = 0
        self._settled: int | None = None
        self._floors: list[int] = []  # of the windows, the one under way last

    def note(self, resident_bytes: int | None) -> int | None:
        """Takes the resident size after a step; returns the growth since step 10, None before."""
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
