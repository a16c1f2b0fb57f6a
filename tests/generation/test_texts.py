"""Streamed text: the pieces add up to the text of all tokens before a stop text, in linear time."""

import random
from typing import Any

import pytest
import tokenizers

from lean_ft.generation.texts import text_of
from tests.tokenizers.conftest import byte_level_tokenizer, word_start_tokenizer

KINDS = {
    "bytes": byte_level_tokenizer,
    "words, first": lambda: word_start_tokenizer("first"),
    "words, always": lambda: word_start_tokenizer("always"),
}
SPECIAL = "<|special|>"


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.first
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_text_up_to_a_stop_text(kind: str) -> None:
    """Random ids include characters split between tokens, invalid bytes and special tokens."""
    tokenizer, draw = KINDS[kind](), random.Random(0)
    tokenizer.add_special_tokens([SPECIAL])
    special = tokenizer.token_to_id(SPECIAL)
    # With byte tokens, an invalid byte changes the text of earlier bytes, which a stream cannot undo.
    drawn_from = [token for text, token in tokenizer.get_vocab().items() if not text.startswith("<0x")]
    written = tokenizer.encode("one 日本 🙂 é two, and two more.", add_special_tokens=False).ids
    for _ in range(200):
        drawn = [draw.choice([draw.choice(drawn_from), special]) for _ in range(draw.randrange(20))]
        ids = [*drawn, *written, *drawn] if draw.random() < 0.5 else [*drawn, *written]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        at = draw.randrange(len(whole) or 1)
        for stops in ((), (whole[at : at + draw.randint(1, 6)],), ("two", "tw", " more.")):
            stops = tuple(stop for stop in stops if stop)
            pieces: list[str] = list(text_of(tokenizer, ids, stops))  # pyright: ignore[reportArgumentType]
            expected = whole[: min((at for stop in stops if (at := whole.find(stop)) >= 0), default=len(whole))]
            assert "".join(pieces) == expected, (ids, stops)


def test_a_long_text_is_decoded_once() -> None:
    counting: Any = Counting(byte_level_tokenizer())
    ids = counting.tokenizer.encode("a few words " * 1000).ids
    assert "".join(text_of(counting, ids, ("never",))) == "a few words " * 1000
    assert counting.num_decoded < 6 * len(ids)
