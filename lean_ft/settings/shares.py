"""Shares of tokens of the entries of `data.source`: which values an entry accepts, and which lists make sense."""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

if TYPE_CHECKING:
    from lean_ft.settings.data import DataSource

_TOLERANCE = Fraction(1, 10**6)  # by which shares may miss a sum of 1


def _is_part_of_1(value: object) -> object:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if value is None or (number is not None and 0 < number <= 1):
        return value
    found = json.dumps(value, default=str) if number is None else f"{number:g}"
    percent = re.fullmatch(r'"?(\d+(?:\.\d+)?) ?%?"?', found)
    percents = float(percent[1]) if percent else 0.0
    example = f" Write {percents / 100:g} for {percents:g}%." if 2 <= percents < 100 else ""
    raise ValueError(
        f"share is {found}; expected a number above 0 and up to 1. The shares of all entries add up to 1.{example}"
    )


TokenShare = Annotated[float, BeforeValidator(_is_part_of_1), Field(gt=0.0, le=1.0)]


def shares_of(sources: "Sequence[DataSource]") -> list[Fraction] | None:
    """Return the share of each source, which add up to 1 within 1e-6, or None if no source has one.

    One source without a share gets the rest. Raises ValueError for other sums, and for weights beside shares.
    """
    given = [None if one.share is None else Fraction(repr(one.share)) for one in sources]
    if not any(given):
        return None
    if (weighted := next((one for one in sources if one.weight != 1), None)) is not None:
        shared = next(one for one in sources if one.share is not None)
        raise ValueError(
            f"{shared.path} has share={shared.share:g} and {weighted.path} has weight={weighted.weight:g}, and both "
            "decide how often rows are used. Give the entries of a list shares, or weights."
        )
    total = sum(filter(None, given), Fraction(0))
    without = [one.path for one, share in zip(sources, given, strict=True) if share is None]
    if len(without) > 1:
        raise ValueError(
            f"{', '.join(without)} have no share. Give each entry a share, and leave out at most one, which gets the "
            f"rest ({float(1 - total):g})."
        )
    if without and total >= 1:
        raise ValueError(f"the shares add up to {float(total):g}, which leaves nothing for {without[0]}. Lower them.")
    if not without and abs(total - 1) > _TOLERANCE:
        raise ValueError(
            f"the shares add up to {float(total):g}; expected 1. Change them, or leave out the share of one entry, "
            "which then gets the rest."
        )
    return [(1 - total) if share is None else share / (1 if without else total) for share in given]
