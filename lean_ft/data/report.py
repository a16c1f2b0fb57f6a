"""Counts of kept, truncated, dropped and bad rows of a data source."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from lean_ft.settings import DataConfig
from lean_ft.system.units import counted
from lean_ft.tokenizers import Passage

if TYPE_CHECKING:
    from lean_ft.data.mixing import SourceUse

NUM_BAD_ROWS_SHOWN = 3
ANSWERS = {
    "rewritten_answers": (
        "earlier answers",
        " trained without an end token (the chat template ends only the last turn with the model's end token)",
    ),
    "other_prompts": (
        "answers",
        " after another text than the prompt for generation (the chat template writes the messages before "
        "an answer differently once the answer follows)",
    ),
    "endless_chats": (
        "chats",
        " without a trained token that ends the last answer (generation will not stop after it; let the chat "
        "template write a token at the end of a turn)",
    ),
    "empty_answers": ("empty answers", ""),
    "developer_chats": (
        "chats",
        " with developer messages written as system messages (the template has no role developer)",
    ),
}
COUNTS = (
    *("rows", "kept", "truncated", "lost_tokens", "bad_rows", "tokens", "target_tokens"),
    *ANSWERS,
)
NUM_NAMES_SHOWN = 20


def count(names: Iterable[str], into: dict[str, int]) -> None:
    for name in names:
        into[name] = into.get(name, 0) + 1


def _add_counts(into: dict[str, int], counts: dict[str, int]) -> None:
    into |= {name: into.get(name, 0) + number for name, number in counts.items()}


@dataclass
class DataReport:
    """Counts of the rows of a source."""

    format: str
    detected: bool = False
    """Whether the format was detected from the rows' fields."""
    unit: str = "sequences"
    """Unit that `kept` counts."""
    rows: int = 0
    kept: int = 0
    kept_by_source: list[int] = field(default_factory=list)
    """Number of kept rows per source, in source order; kept rows are stored in the same order."""
    truncated: int = 0
    lost_tokens: int = 0
    """Tokens cut off by truncation."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped rows by reason."""
    rewritten_answers: int = 0
    """Answers trained without their end token, because the chat template ends an answer with another token once
    messages follow."""
    other_prompts: int = 0
    """Answers trained after another text than the prompt that generation starts from."""
    endless_chats: int = 0
    """Chats whose last answer is trained without a token that ends it."""
    empty_answers: int = 0
    """Empty answers, in kept and dropped rows."""
    developer_chats: int = 0
    """Chats whose developer messages are written as system messages."""
    notes: dict[str, int] = field(default_factory=dict)
    """What a reader counts besides rows and tokens, such as labels that were cut off, by its description."""
    joined: dict[str, int] = field(default_factory=dict)
    """Number of prompts and completions rendered without a chat template, by separator."""
    unread: dict[str, int] = field(default_factory=dict)
    """Number of rows or sequences with a field or message key that is not read, by name."""
    columns: dict[str, int] = field(default_factory=dict)
    """Number of rows with a column for rewards, by name."""
    shown: dict[str, int] = field(default_factory=dict)
    """Number of rows that show parts other than text, by their unit."""
    unseen: dict[str, dict[str, int]] = field(default_factory=dict)
    """By the unit of a kind of columns: the number of rows that show no such part and have a field which looks like
    some, by the field's name."""
    remarks: list[str] = field(default_factory=list)
    """What the objective says about the kept rows."""
    bad_rows: int = 0
    """Unreadable rows that were skipped."""
    unreadable: dict[str, int] = field(default_factory=dict)
    """Number of bad rows with a part that cannot be read, by its unit."""
    bad_row_examples: list[str] = field(default_factory=list)
    """Place and error of the first bad rows."""
    tokens: int = 0
    target_tokens: int = 0
    """Tokens with a label."""
    of_kinds: dict[str, list[int]] = field(default_factory=dict)
    """By the unit that a kind of columns adds: its number in the kept rows, and its tokens in the kept
    sequences."""
    beyond_context: int = 0
    """Sequences longer than the model's context."""
    context_length: int | None = None
    """The model's context length in tokens, if any sequence exceeds it."""
    sources: "list[SourceUse]" = field(default_factory=list)
    """What an epoch uses of each source, if there are several, or weights."""
    packing: str | None = None
    """Packing method; None without packed rows."""
    packed_rows: int | None = None
    """Number of packed rows."""
    packing_efficiency: float | None = None
    """Share of the packed rows' positions that hold a token."""

    def __str__(self) -> str:
        rows, kept = counted(self.rows, "rows"), counted(self.kept, self.unit)
        parts = [f"{rows} ({self.format}{', detected from their fields' if self.detected else ''})"]
        if self.bad_rows:
            parts.append(f"{counted(self.bad_rows, 'unreadable rows')} skipped (first: {self.bad_row_examples[0]})")
        if self.truncated:
            loses_most = self.format == "text" and self.lost_tokens > self.tokens
            remedy = "; data.packing=bfd_split keeps them" if loses_most else ""
            parts.append(f"{self.truncated:,} truncated (-{self.lost_tokens:,} tokens{remedy})")
        parts += self._reasons
        parts += [
            counted(number, unit) + text for name, (unit, text) in ANSWERS.items() if (number := getattr(self, name))
        ]
        parts += [f"{number:,} {what}" for what, number in self.notes.items()]
        parts += [
            f"without a chat template: {count:,} prompts and completions joined by "
            f"{repr(between) if between else 'nothing'} (data.separator)"
            for between, count in self.joined.items()
        ]
        for what, names in (("fields not read", [*self.unread]), ("columns for rewards", [*self.columns])):
            more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
            parts += [f"{what}: {', '.join(names[:NUM_NAMES_SHOWN])}{more}"] if names else []
        trained = f", {self.target_tokens:,} trained ({self.target_tokens / max(1, self.tokens):.0%})"
        of_kinds = [
            f", {counted(number, f'{unit}s')} with {tokens:,} tokens"
            for unit, (number, tokens) in self.of_kinds.items()
            if number
        ]
        parts.append(f"{kept}, {self.tokens:,} tokens{trained if self.target_tokens else ''}{''.join(of_kinds)}")
        parts += self.remarks
        if self.beyond_context:
            longer = f"{self.beyond_context:,} longer than the model's context of {self.context_length:,} tokens"
            parts.append(f"WARNING: {longer}; the model was not trained on such positions")
        if self.packed_rows is not None and self.packing_efficiency is not None:
            parts.append(f"packed into {counted(self.packed_rows, 'rows')}, {self.packing_efficiency:.2%} full")
        if self.packing == "wrapped":
            parts.append("wrapped: documents in a row attend to each other and may be cut at its ends")
        return "; ".join(parts)

    @property
    def _reasons(self) -> list[str]:
        """Dropped rows by reason."""
        return [f"{count:,} dropped ({reason})" for reason, count in self.dropped.items()]

    @property
    def left_out(self) -> str | None:
        """Summary of dropped and bad rows for the end of a run; None if all rows were used."""
        reasons = {"unreadable": self.bad_rows, **self.dropped}
        listed = ", ".join(f"{count:,} ({reason})" for reason, count in reasons.items() if count)
        return f"{sum(reasons.values()):,} of {self.rows:,} rows were not used: {listed}" if listed else None

    def count_lost(self, tokens: int) -> None:
        """Count `tokens` cut off a row, if any."""
        self.truncated += tokens > 0
        self.lost_tokens += tokens

    def drop(self, reason: str) -> None:
        count([reason], self.dropped)

    def note(self, what: str, number: int) -> None:
        """Count `number` more of something that the report names, if any."""
        _add_counts(self.notes, {what: number} if number else {})

    def count_passage(self, passage: Passage) -> None:
        """Count a passage's rewritten and empty answers and its separator."""
        self.rewritten_answers += passage.num_rewritten
        self.other_prompts += passage.num_other_prompts
        self.endless_chats += passage.is_endless
        self.empty_answers += passage.num_empty
        self.developer_chats += passage.developer_as_system
        count(passage.unread, self.unread)
        if passage.joined_by is not None:
            count([passage.joined_by], self.joined)

    def truncates(self, length: int, config: DataConfig, place: str) -> bool:
        """Return whether to truncate a sequence of `length` > max_length tokens; otherwise count it as dropped.

        Raises ValueError that starts with `place` under `overflow=raise`.
        """
        if config.overflow == "raise":
            raise ValueError(
                f"{place}: {length:,} tokens, more than data.max_length={config.max_length:,}. Raise data.max_length, "
                "or set data.overflow=truncate or data.overflow=drop."
            )
        if config.overflow == "drop":
            self.drop("longer than max_length")
        return config.overflow == "truncate"

    def keep(self, tokens: int, targets: int, source: int) -> None:
        """Count a row to train on."""
        self.kept += 1
        self.tokens += tokens
        self.target_tokens += targets
        self.kept_by_source += [0] * (source + 1 - len(self.kept_by_source))
        self.kept_by_source[source] += 1

    def skip_bad_row(self, problem: str) -> None:
        self.bad_rows += 1
        self.bad_row_examples = [*self.bad_row_examples, problem][:NUM_BAD_ROWS_SHOWN]

    def check_bad_rows(self, most: int) -> None:
        """Raise ValueError if more than `most` rows are bad."""
        if self.bad_rows > most:
            examples = "".join(f"\n  {example}" for example in self.bad_row_examples)
            raise ValueError(
                f"more than data.max_bad_rows={most} rows cannot be read. The first are:{examples}\nRepair them, or "
                "raise data.max_bad_rows."
            )

    def nothing_left(self) -> str:
        """Explain why no row is left, for an error message."""
        reasons = self._reasons
        if self.bad_rows:
            reasons.append(f"{self.bad_rows:,} unreadable (first: {self.bad_row_examples[0]})")
        return f"{counted(self.rows, 'rows')}, {', '.join(reasons)}"

    def add(self, other: "DataReport") -> None:
        """Add the counts of `other`, a part of the same source. Packing counts are not added."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad_row_examples = (self.bad_row_examples + other.bad_row_examples)[:NUM_BAD_ROWS_SHOWN]
        pairs = zip_longest(self.kept_by_source, other.kept_by_source, fillvalue=0)
        self.kept_by_source = [ours + theirs for ours, theirs in pairs]
        for name in ("dropped", "notes", "joined", "unread", "columns", "shown", "unreadable"):
            _add_counts(getattr(self, name), getattr(other, name))
        for unit, fields in other.unseen.items():
            _add_counts(self.unseen.setdefault(unit, {}), fields)
