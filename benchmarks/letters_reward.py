"""The reward of the comparison of grpo, the same function for lean_ft and for TRL."""

from typing import Any


def letters(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing and differs from answer to answer."""
    return [float(sum(character.isalpha() for character in text)) for text in completions]
