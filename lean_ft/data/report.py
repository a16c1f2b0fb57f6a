"""What became of the rows of a source, counted: nothing is left out without being told."""

from dataclasses import dataclass, field
from itertools import zip_longest

from lean_ft.settings import DataConfig
from lean_ft.tokenizers import Passage

NUM_BAD_ROWS_SHOWN = 3
COUNTS = ("rows", "kept", "truncated", "lost_tokens", "bad_rows", "tokens", "target_tokens")
COUNTS += ("rewritten_answers", "empty_answers")


@dataclass
class DataReport:
    """What became of the rows of a source."""

    format: str
    detected: bool = False
    """Whether the format was told from the rows' fields."""
    unit: str = "sequences"
    """What a row that is kept becomes."""
    rows: int = 0
    kept: int = 0
    kept_by_source: list[int] = field(default_factory=list)
    """Of `kept`, how many are from the first source, the second ...: they stand in this order."""
    truncated: int = 0
    lost_tokens: int = 0
    """Tokens cut off by truncation."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    rewritten_answers: int = 0
    """Answers without labels because the chat template gives them another end once they are history."""
    empty_answers: int = 0
    """Answers that say nothing, of rows that are kept or not."""
    joined: dict[str, int] = field(default_factory=dict)
    """Prompts and completions that no chat template wrote, by what was put between them."""
    bad_rows: int = 0
    """Rows left out because they could not be read."""
    bad_row_examples: list[str] = field(default_factory=list)
    """Where the first of them stand, and what is wrong with them."""
    tokens: int = 0
    target_tokens: int = 0
    """Tokens that carry a label."""
    beyond_context: int = 0
    """Sequences longer than the model was made for."""
    context_length: int | None = None
    """The longest that it was made for, in tokens, where there are such."""
    packing: str | None = None
    """How rows of max_length were packed; None where they were not."""
    packed_rows: int | None = None
    """How many those are."""
    packing_efficiency: float | None = None
    """Share of the packed rows' positions that hold a token."""

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows ({self.format}{', detected from their fields' if self.detected else ''})"]
        if self.bad_rows:
            parts.append(f"{self.bad_rows:,} bad, left out (the first: {self.bad_row_examples[0]})")
        if self.truncated:
            remedy = (
                "; data.packing=bfd_split loses none"
                if self.format == "text" and self.lost_tokens > self.tokens
                else ""
            )
            parts.append(f"{self.truncated:,} truncated (-{self.lost_tokens:,} tokens{remedy})")
        parts += [f"{count:,} dropped ({reason})" for reason, count in self.dropped.items()]
        if self.rewritten_answers:
            ended = "the chat template ends them with another token once messages follow"
            parts.append(f"{self.rewritten_answers:,} answers trained without their end token ({ended})")
        if self.empty_answers:
            parts.append(f"{self.empty_answers:,} empty answers")
        parts += [
            f"without a chat template: {count:,} prompts and completions joined by {repr(between) if between else 'nothing'} "
            "(data.separator)"
            for between, count in self.joined.items()
        ]
        share = self.target_tokens / max(1, self.tokens)
        parts.append(f"{self.kept:,} {self.unit}, {self.tokens:,} tokens, {self.target_tokens:,} trained ({share:.0%})")
        if self.beyond_context:
            beyond = f"longer than the model's context of {self.context_length:,} tokens"
            parts.append(f"WARNING: {self.beyond_context:,} {beyond}, for which its positions were not trained")
        if self.packed_rows is not None and self.packing_efficiency is not None:
            parts.append(f"packed into {self.packed_rows:,} rows, {self.packing_efficiency:.2%} full")
        if self.packing == "wrapped":
            parts.append("wrapped: documents in one row see each other, and rows cut them")
        return "; ".join(parts)

    @property
    def left_out(self) -> str | None:
        """How many rows were left out and why, for the end of a run; None where all were taken."""
        reasons = [f"{count:,} ({reason})" for reason, count in self.dropped.items()]
        if self.bad_rows:
            reasons.insert(0, f"{self.bad_rows:,} (could not be read)")
        count = self.bad_rows + sum(self.dropped.values())
        return f"{count:,} of {self.rows:,} rows were left out: {', '.join(reasons)}" if count else None

    def count_lost(self, tokens: int) -> None:
        """Counts what was cut off a row, if anything was."""
        self.truncated += tokens > 0
        self.lost_tokens += tokens

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def count_passage(self, passage: Passage) -> None:
        """Counts what a text that a row becomes has of its own."""
        self.rewritten_answers += passage.num_rewritten
        self.empty_answers += passage.num_empty
        if passage.joined_by is not None:
            self.joined[passage.joined_by] = self.joined.get(passage.joined_by, 0) + 1

    def takes_overlong(self, length: int, config: DataConfig, place: str) -> bool:
        """Whether a sequence of `length` tokens, more than max_length, is to be cut; else it is counted as dropped.

        Raises ValueError, with `place`, under `overflow=raise`.
        """
        if config.overflow == "raise":
            raise ValueError(
                f"{place}: {length:,} tokens, more than data.max_length={config.max_length:,}. Raise "
                "it, or set data.overflow=truncate or data.overflow=drop."
            )
        if config.overflow == "drop":
            self.drop("longer than max_length")
        return config.overflow == "truncate"

    def keep(self, tokens: int, targets: int, source: int) -> None:
        """Counts a row that is trained on."""
        self.kept += 1
        self.tokens += tokens
        self.target_tokens += targets
        self.kept_by_source += [0] * (source + 1 - len(self.kept_by_source))
        self.kept_by_source[source] += 1

    def skip_bad_row(self, problem: str) -> None:
        self.bad_rows += 1
        self.bad_row_examples = [*self.bad_row_examples, problem][:NUM_BAD_ROWS_SHOWN]

    def check_bad_rows(self, most: int) -> None:
        """Raises ValueError when more than `most` rows were bad."""
        if self.bad_rows > most:
            examples = "".join(f"\n  {example}" for example in self.bad_row_examples)
            raise ValueError(
                f"more than data.max_bad_rows={most} rows cannot be read. The first are:{examples}\nRepair them, or "
                "raise data.max_bad_rows."
            )

    def nothing_left(self) -> str:
        """Why no row is left, for a message."""
        reasons = [f"{count:,} {reason}" for reason, count in self.dropped.items()]
        if self.bad_rows:
            reasons.append(f"{self.bad_rows:,} bad (the first: {self.bad_row_examples[0]})")
        return f"of {self.rows:,} rows, {', '.join(reasons)}"

    def add(self, other: "DataReport") -> None:
        """Adds the counts of `other`, a part of the same source; what packing made is no count of rows."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad_row_examples = (self.bad_row_examples + other.bad_row_examples)[:NUM_BAD_ROWS_SHOWN]
        pairs = zip_longest(self.kept_by_source, other.kept_by_source, fillvalue=0)
        self.kept_by_source = [ours + theirs for ours, theirs in pairs]
        for ours, theirs in ((self.dropped, other.dropped), (self.joined, other.joined)):
            for reason, count in theirs.items():
                ours[reason] = ours.get(reason, 0) + count
