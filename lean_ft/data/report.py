"""What became of the rows of a source, counted: nothing is left out without being told."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class DataReport:
    """What became of the rows of a source."""

    format: str
    rows: int = 0
    kept: int = 0
    truncated: int = 0
    lost_tokens: int = 0
    """Tokens cut off by truncation."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    tokens: int = 0
    target_tokens: int = 0
    """Tokens that carry a label."""
    packing: str | None = None
    """How rows of max_length were packed; None where they were not."""
    packed_rows: int | None = None
    """How many those are."""
    packing_efficiency: float | None = None
    """Share of the packed rows' positions that hold a token."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows ({self.format})"]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated (-{self.lost_tokens:,} tokens)")
        parts += [f"{count:,} dropped ({reason})" for reason, count in self.dropped.items()]
        share = self.target_tokens / max(1, self.tokens)
        parts.append(f"{self.kept:,} sequences, {self.tokens:,} tokens, {self.target_tokens:,} trained ({share:.0%})")
        if self.packed_rows is not None and self.packing_efficiency is not None:
            parts.append(f"packed into {self.packed_rows:,} rows, {self.packing_efficiency:.2%} full")
        if self.packing == "wrapped":
            parts.append("wrapped: documents in one row see each other, and rows cut them")
        return "; ".join(parts)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def add(self, other: "DataReport") -> None:
        """Adds the counts of `other`, a part of the same source; what packing made is no count of rows."""
        self.rows += other.rows
        self.kept += other.kept
        self.truncated += other.truncated
        self.lost_tokens += other.lost_tokens
        self.tokens += other.tokens
        self.target_tokens += other.target_tokens
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
