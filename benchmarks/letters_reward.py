"""The reward function of the grpo comparison, for lean_ft and for TRL."""

from typing import Any


def letters(completions: list[str], **columns: Any) -> list[float]:
    """A cheap reward that differs between completions."""
    return [float(sum(character.isalpha() for character in text)) for text in completions]
