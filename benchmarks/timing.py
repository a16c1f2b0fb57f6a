"""Measure time and additional memory of a function inside the current process."""

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class Timing(NamedTuple):
    """What one call takes.

    `cpu_seconds` is the processor time of all threads: on a machine that is shared it tells more than `seconds`.
    `extra_bytes` is the most memory above what was held before, results included; None where it cannot be told.
    """

    seconds: float  # median
    all_seconds: list[float]
    cpu_seconds: float  # median
    extra_bytes: int | None


def measure_calls(work: Callable[[], object], device: torch.device, *, repeats: int, warmup: int = 2) -> Timing:
    """Times `work`, which must leave nothing behind but what it replaces, and finds the memory it takes.

    Memory is the allocator's on a GPU. On a CPU it is the process's peak resident size, which Linux lets a process set
    back to the present size; allocations that never touch their pages are not in it, as they are in no run's.
    """
    for _ in range(warmup):
        work()
    before_bytes = _reset_peak(device)
    work()
    extra_bytes = None if before_bytes is None else _peak_bytes(device) - before_bytes
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        _wait(device)
        started, cpu_started = time.perf_counter(), time.process_time()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    return Timing(statistics.median(seconds), seconds, statistics.median(cpu_seconds), extra_bytes)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> int | None:
    """Reset the peak to the current memory and return it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        # Return free heap memory, which would hide the function's memory.
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM
    except (OSError, AttributeError):
        return None
    return _status_bytes("VmRSS")


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    """The resident memory of this process."""
    return _status_bytes("VmRSS")
