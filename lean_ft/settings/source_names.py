"""Names of the sources of rows, for the held-out loss of each.

A source without a name gets the shortest end of its path that no other source has: `maths` for `data/maths.jsonl`, and
`train-a` next to `test-b/a.jsonl`. Sources to which the user gives equal names count as one, so that many files can
be read as few. Names that come from paths never join sources.
"""

import re
from collections.abc import Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from lean_ft.system.contents import name_of_file
from lean_ft.system.spelling import did_you_mean

if TYPE_CHECKING:
    from lean_ft.settings.data import DataSource, RowsConfig

MOST_CHARACTERS = 40
_ENDING = r"(\.(jsonl?|csv|tsv|txt|md|parquet|gz|zst|zstd))+$"
_MOST_NAMED = 20  # names in a message


def _is_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w .-]*", name) or len(name) > MOST_CHARACTERS or name != name.strip():
        raise ValueError(
            f"expected a name of at most {MOST_CHARACTERS} letters, digits, spaces and `_ . -`, which begins with a "
            f"letter or a digit, found {name!r:.80}. Metrics are named after it, and loggers refuse other characters."
        )
    return name


SourceName = Annotated[str, AfterValidator(_is_name)]


def source_names(sources: "str | Sequence[str | DataSource]") -> list[str]:
    """Return the name of each source. Those that the user gave may be equal."""
    listed = [sources] if isinstance(sources, str) else sources
    given = [None if isinstance(one, str) else one.name for one in listed]
    ends = _different_ends([one if isinstance(one, str) else one.path for one in listed])
    own = [_named(end, _part_of(one)) if ends.count(end) > 1 else end for end, one in zip(ends, listed, strict=True)]
    names, taken = list[str](), {name for name in given if name is not None}
    for name, end in zip(given, own, strict=True):
        if name is None:
            numbered = (_named(end, str(number)) for number in count(2))
            taken.add(name := next(one for one in chain([_named(end)], numbered) if one not in taken))
        names.append(name)
    return names


def _different_ends(paths: Sequence[str]) -> list[str]:
    """Return the shortest end of each path that no other path has, joined by dashes; the last part of equal paths."""
    parts = [_parts_of(path) for path in paths]

    def end_of(i: int) -> str:
        for depth in range(1, len(parts[i]) + 1):
            if all(parts[i][-depth:] != other[-depth:] for j, other in enumerate(parts) if j != i):
                return "-".join(parts[i][-depth:])
        return parts[i][-1]

    return [end_of(i) for i in range(len(paths))]


def _parts_of(path: str) -> list[str]:
    """Return the parts of a path or glob without the ending of the file."""
    if name_of_file(path) != path:  # rows passed from Python
        return ["rows"]
    *folders, last = [part for part in re.split(r"[/\\]+", path) if part] or [""]
    parts = [_cleaned(part) for part in (*folders, re.sub(_ENDING, "", last))]
    return [part for part in parts if part] or ["source"]


def _part_of(source: "str | DataSource") -> str:
    """Return the subset and the split of a source, with a dash between them."""
    parts = () if isinstance(source, str) else (source.subset, source.split)
    return _cleaned("-".join(part for part in parts if part))


def _cleaned(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-._ ")


def _named(end: str, more: str = "") -> str:
    """Return a name of the end of a path and something that tells it apart from others."""
    if not more:
        return end[:MOST_CHARACTERS]
    more = more[: MOST_CHARACTERS // 2]
    return f"{end[: MOST_CHARACTERS - 1 - len(more)]}-{more}"


def held_out_names(data: "RowsConfig") -> list[str]:
    """Return the different names of the sources of held-out rows, in order; [] if nothing is held out."""
    if data.validation_source is not None:
        return [*dict.fromkeys(source_names(data.validation_source))]
    return [*dict.fromkeys(source_names(data.source))] if data.validation_fraction else []


def check_watched(name: str | None, data: "RowsConfig | None") -> None:
    """Raise ValueError, with the nearest name, unless `watched_source` is one of several held-out sources."""
    names = [] if data is None else held_out_names(data)
    if name is None or (name in names and len(names) > 1):
        return
    if len(names) < 2:
        found = f"there is only one, {names[0]}" if names else "nothing is held out"
        raise ValueError(
            f"watched_source={name} chooses between several sources of held-out rows, and {found}. Remove it, or list "
            "several in data.validation_source."
        )
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(names[:_MOST_NAMED]) + more
    raise ValueError(
        f"watched_source={name}: no such source of held-out rows.{did_you_mean(name, names)} Expected one of: {listed}."
    )
