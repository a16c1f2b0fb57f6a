"""Format and parse amounts: `13.25 GiB`, `3 min 20 s`, and `24GiB` on a command line."""

import re
from collections.abc import Sequence

GIB = 2**30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": GIB}


def gibibytes(count: float) -> str:
    """Format bytes: `512 B`, `3.1 MiB`, `0.73 GiB`, `13.25 GiB`."""
    if count >= GIB / 10:
        return f"{count / GIB:.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:.1f} MiB"
    if count >= 2**10:
        return f"{count / 2**10:.1f} KiB"
    return f"{count:.0f} B"


def parse_bytes(text: str, option: str) -> int:
    """Parse `5GB`, `800MiB` or `2.5 gb`; KB, MB and GB are powers of 1000. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?((?:[kmg]i?)?)b", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{option} is {text!r}; expected a number and a unit: 24GiB, 5GB, 800MB.")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


def duration(seconds: float) -> str:
    """Format seconds: `0.4 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(count: int, units: str) -> str:
    """Format a count with its unit, which is in the plural: `1 row`, `1,200 rows`."""
    return f"{count:,} {units.removesuffix('s') if count == 1 else units}"


def enumerated(words: Sequence[str]) -> str:
    """One or more words of a sentence: `a, b and c`."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def number(value: float | None) -> str:
    """Format a loss or a norm with four digits; None means that it was not finite."""
    return "not finite" if value is None else f"{value:.4g}"
