"""Losses that work on hidden states, so that no recipe ever holds a (tokens, vocabulary) tensor."""

from lean_ft.losses.linear_cross_entropy import IGNORED_LABEL, linear_cross_entropy
from lean_ft.losses.token_statistics import TokenStatistics

__all__ = ["IGNORED_LABEL", "TokenStatistics", "linear_cross_entropy"]
