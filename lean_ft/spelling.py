"""The nearest valid name for one that was mistyped."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `word`, or None where none is close.

    Dotted names are compared whole and by their last part, so `lr` finds `optimizer.lr`.
    """

    def likeness(name: str) -> float:
        ours, theirs = word.lower(), name.lower()
        last_ours, last_theirs = ours.rpartition(".")[2], theirs.rpartition(".")[2]
        whole = SequenceMatcher(None, ours, theirs).ratio()
        # A last part that fits says more than a group that does, but a whole name that fits says most.
        return max(whole, 0.95 * SequenceMatcher(None, last_ours, last_theirs).ratio() + 0.05 * whole)

    best = max(valid, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """` Did you mean 'name'?`, to close a message with, or nothing."""
    name = nearest(word, valid)
    return f" Did you mean '{name}'?" if name else ""
