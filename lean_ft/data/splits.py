"""Parse `data.split`: a split such as `train`, or a slice as in the `datasets` library, such as `train[:95%]`."""

import re
from collections.abc import Callable

_SPLIT = re.compile(r"(\w[\w.-]*)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


def read_split(split: str) -> tuple[str, str, str] | None:
    """Return a split's name and slice bounds, "" for an omitted bound; None if `split` is invalid."""
    match = _SPLIT.fullmatch(split)
    if match is None or any(abs(int(bound[:-1])) > 100 for bound in match.groups("")[1:] if bound.endswith("%")):
        return None
    return match.groups("")  # pyright: ignore[reportReturnType]


def is_sliced(split: str) -> bool:
    return "[" in split


def rows_of_split(split: str, count: Callable[[], int]) -> tuple[int, int | None]:
    """Return a slice's first row and the row after its last; None means no end.

    Bounds are those of `datasets`: rows, counted from the end if negative, or percentages rounded to the nearest row.
    `count` returns the total number of rows, and is called only for a percentage or a negative bound. Raises ValueError
    if `split` is invalid.
    """
    if (found := read_split(split)) is None:
        raise ValueError(f"data.split={split}: expected a split such as train, train[:95%] or train[100:200].")
    _, first, last = found
    if not any(sign in first + last for sign in "%-"):
        return int(first or 0), int(last) if last else None
    total = count()

    def row(bound: str) -> int:
        number = int(bound.rstrip("%"))
        number = round(number * total / 100) if "%" in first + last else number
        return min(max(number + total, 0) if number < 0 else number, total)

    return row(first) if first else 0, row(last) if last else total
