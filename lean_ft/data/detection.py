"""Which format rows have, told from the names of their fields.

| format            | fields                                   | becomes                                             |
|-------------------|------------------------------------------|-----------------------------------------------------|
| messages          | messages; tools                          | the chat as it is                                   |
| sharegpt          | conversations; system, tools             | the same, its roles renamed                         |
| preference        | chosen, rejected; prompt, tools          | a pair of answers: `lean_ft.data.preference`        |
| prompt_completion | prompt, completion; tools                | a user's and an assistant's message, or messages    |
| alpaca            | instruction, output; input               | the same; instruction and input are one message     |
| tokens            | input_ids; labels, attention_mask        | the ids as they are, trained where labels are ids   |
| text              | text                                     | bos + text + eos, all of it trained                 |

Behind the semicolon stand the fields that a row may lack. Of several formats that fit, the first of the table is
taken.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lean_ft.data.rows import Row, names_of
from lean_ft.data.sources import list_sources
from lean_ft.settings import RowsConfig, Sources
from lean_ft.spelling import did_you_mean

NUM_ROWS_TO_DETECT = 16


class Fields(NamedTuple):
    """The names of a format's fields."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMATS = {
    "messages": Fields(("messages",), ("tools",)),
    "sharegpt": Fields(("conversations",), ("system", "tools")),
    "preference": Fields(("chosen", "rejected"), ("prompt", "tools")),
    "prompt_completion": Fields(("prompt", "completion"), ("tools",)),
    "alpaca": Fields(("instruction", "output"), ("input",)),
    "tokens": Fields(("input_ids",), ("labels", "attention_mask")),
    "text": Fields(("text",)),
}


class RowFormat(NamedTuple):
    """How the rows of a source are read."""

    name: str
    columns: dict[str, str]
    """Names of fields, ours to theirs, where they differ."""

    def fields_of(self, row: Row) -> dict[str, Any]:
        """The fields of `row` under our names; optional ones that are null are left out.

        Raises ValueError for one that is missing.
        """
        required, optional = FORMATS[self.name]
        fields = {}
        for name in (*required, *optional):
            theirs = self.columns.get(name, name)
            if theirs in row.fields and (name in required or row.fields[theirs] is not None):
                fields[name] = row.fields[theirs]
            elif name in required:
                renamed = f" (for `{name}`, by data.columns)" if theirs != name else ""
                raise ValueError(
                    f"no field `{theirs}`{renamed}. The format {self.name} needs {', '.join(required)}; the row has "
                    f"{names_of(row.fields)}. {RENAME}"
                )
        return fields


def formats_of(config: RowsConfig, first_rows: Sequence[Row], source: Sources | None = None) -> dict[int, RowFormat]:
    """The format of every source that `first_rows` are from: the one set, or the one that their fields tell.

    They are the rows of `source`, or of the source that is trained on. Raises ValueError where `columns` names no
    field, and where no format fits.
    """
    formats = {}
    for number, one in enumerate(list_sources(config.source if source is None else source, config)):
        assert one.format is not None
        assert one.columns is not None
        _check_columns(one.columns)
        rows = [row for row in first_rows if row.source == number]
        if rows:
            name = _detect(rows, one.columns, config.on_bad_row) if one.format == "auto" else one.format
            formats[number] = RowFormat(name, one.columns)
    return formats


RENAME = "Rename with data.columns, ours to yours: data.columns.prompt=question."


def _check_columns(columns: dict[str, str]) -> None:
    known = sorted({name for fields in FORMATS.values() for name in (*fields.required, *fields.optional)})
    for ours in columns:
        if ours not in known:
            raise ValueError(
                f"data.columns.{ours}: no format has such a field; the fields are {', '.join(known)}. "
                f"data.columns.prompt=question reads `prompt` from `question`.{did_you_mean(ours, known)}"
            )


def _detect(rows: Sequence[Row], columns: dict[str, str], on_bad_row: str) -> str:
    readable = [row for row in rows if row.problem is None]
    if not readable:
        raise ValueError(f"{rows[0].place}: {rows[0].problem}. None of the first rows can be read.")

    def fit(name: str) -> int:
        theirs = [columns.get(field, field) for field in FORMATS[name].required]
        return sum(all(field in row.fields for field in theirs) for row in readable)

    best = max(FORMATS, key=fit)  # the first of several
    # A row of another shape is bad; whether it may be left out is for `on_bad_row` to say.
    if fit(best) == len(readable) or (on_bad_row == "skip" and fit(best)):
        return best
    odd = min(readable, key=lambda row: all(columns.get(f, f) in row.fields for f in FORMATS[best].required))
    expected = "; ".join(f"{name}: {', '.join(fields.required)}" for name, fields in FORMATS.items())
    raise ValueError(
        f"{odd.place}: the format cannot be told from the fields {names_of(odd.fields)}. Expected those of one format "
        f"({expected}), the same in the first {NUM_ROWS_TO_DETECT} rows. {RENAME}"
    )
