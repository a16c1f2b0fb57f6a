"""Suggest the nearest valid name for a mistyped name."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import islice

MAX_NAMES, MAX_CHARACTERS = 2000, 300  # limits, since a comparison takes up to a millisecond


def nearest(word: str, valid: Iterable[str], least: float = 0.6) -> str | None:
    """Return the valid name closest to `word`, or None if none has the `least` likeness, from 0 to 1.

    Dotted names are compared whole and by their last part, so `lr` finds `optimizer.lr`. A prefix of a name is close to
    it.
    """
    word = word.lower()
    valid = list(islice(valid, MAX_NAMES))
    if len(word) > MAX_CHARACTERS:
        return None

    def likeness(name: str) -> float:
        name = name.lower()
        whole = SequenceMatcher(None, word, name).ratio()
        last_part = SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        beginning = 0.8 if len(word) >= 3 and name.startswith(word) else 0.0
        # The whole name decides between equal last parts or prefixes.
        return max(whole, 0.95 * last_part + 0.05 * whole, beginning + 0.05 * whole)

    best = max(valid, key=likeness, default=None)
    return best if best is not None and likeness(best) >= least else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ` Did you mean 'name'?` for the end of a message, or an empty string. The word itself is never
    suggested."""
    name = nearest(word, (name for name in valid if name != word))
    return f" Did you mean '{name}'?" if name else ""
