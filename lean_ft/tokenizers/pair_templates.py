"""A query and a passage in a template, as one text that is scored at its last token.

The template writes every token, control tokens included, so the tokenizer adds none. A text that is too long loses the
end of its passage and keeps what follows it, as sentence-transformers restores the end of a chat template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lean_ft.tokenizers.passages import Passage

if TYPE_CHECKING:
    from lean_ft.tokenizers.tokenizer import Tokenizer

QUERY, PASSAGE = "{query}", "{passage}"


def filled(template: str, query: str, passage: str) -> Passage:
    """Return the text of a pair. The tokens of its passage are marked as trained."""
    before, after = (part.replace(QUERY, query) for part in template.split(PASSAGE))
    return Passage(before + passage + after, [(len(before), len(before) + len(passage))])


def cut(is_passage: np.ndarray, max_length: int | None) -> np.ndarray:
    """Return the indices of the tokens that are kept. is_passage: (N,) bool, the tokens of the passage, in one stretch.

    Raises ValueError if the template and the query alone are longer than `max_length`.
    """
    too_many = 0 if max_length is None else max(0, len(is_passage) - max_length)
    inside = np.flatnonzero(is_passage)
    if too_many > len(inside):
        raise ValueError(
            f"the template and the query have {len(is_passage) - len(inside)} tokens, which leaves no room for the "
            f"passage within {max_length}. Shorten the query, or raise the longest length."
        )
    end = int(inside[-1]) + 1 if too_many else 0
    return np.delete(np.arange(len(is_passage)), np.s_[end - too_many : end])


def encode_pairs(
    tokenizer: Tokenizer, template: str, query: str, passages: list[str], max_length: int | None = None
) -> list[np.ndarray]:
    """Return the ids, int32, of the query with each passage. Raises ValueError as `cut` does."""
    pairs = tokenizer.tokenize([filled(template, query, passage) for passage in passages])
    return [ids[cut(is_passage, max_length)] for ids, is_passage in pairs]
