"""The nearest valid name for one that was mistyped."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `word`, or None where none is close.

    Dotted names are compared whole and by their last part, so `lr` finds `optimizer.lr`; the beginning of a name
    is close to it.
    """
    word = word.lower()

    def likeness(name: str) -> float:
        name = name.lower()
        whole = SequenceMatcher(None, word, name).ratio()
        last_part = SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        beginning = 0.8 if len(word) >= 3 and name.startswith(word) else 0.0
        # Where two names fit equally well by their last part or beginning, the whole decides.
        return max(whole, 0.95 * last_part + 0.05 * whole, beginning + 0.05 * whole)

    best = max(valid, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """` Did you mean 'name'?`, to close a message with, or nothing."""
    name = nearest(word, valid)
    return f" Did you mean '{name}'?" if name else ""
