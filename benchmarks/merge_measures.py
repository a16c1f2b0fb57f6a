"""CPU time and memory of a block, for both sides of merging.py; needs no other package."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def measured(results: list[dict[str, float]]) -> Iterator[None]:
    """Append the CPU seconds of all threads, and the peak resident bytes above those at the start (proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, began = _status("VmRSS"), time.process_time()
    yield
    results.append({"seconds": time.process_time() - began, "peak_bytes": _status("VmHWM") - before})


def _status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
