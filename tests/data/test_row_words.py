"""Words of texts and rows: normalization, scripts without spaces, their numbers, and what of a row counts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lean_ft.data.documents import renderer_of
from lean_ft.data.row_words import RowContents, numbers_of, runs_of, words_of, words_of_rows
from lean_ft.settings import (
    ClassificationDataConfig,
    DataConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SFTDataConfig,
)

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

TEXTS = {
    "The cat's 3.5 RED-ish hats_": ["the", "cat", "s", "3", "5", "red", "ish", "hats"],
    "Cafe\u0301 CAF\u00c9 \uff26\uff35\uff2c\uff2c": ["caf\u00e9", "caf\u00e9", "full"],
    "soft\u00adhyphen zero\u200bwidth": ["softhyphen", "zerowidth"],
    "\u4f60\u597d\u4e16\u754cabc def": [*"\u4f60\u597d\u4e16\u754c", "abc", "def"],
    "\u0939\u093f\u0928\u094d\u0926\u0940": ["\u0939\u093f\u0928\u094d\u0926\u0940"],
    "?! ...": ["?", "!", ".", ".", "."],
    "\U0001f600 yes! \u2764\ufe0f": ["\U0001f600", "yes", "\u2764"],
    "78 - 8 = 70": ["78", "-", "8", "=", "70"],
    "2*(x+1) `a_b`": ["2", "*", "(", "x", "+", "1", ")", "a", "b"],
    "-5 6-7 well-known a- -b": ["-", "5", "6", "-", "7", "well", "known", "a", "-", "-", "b"],
    "": [],
    " \n": [],
}


@pytest.mark.parametrize("text", TEXTS)
def test_words_of_a_text(text: str) -> None:
    assert words_of(text, symbols=True) == TEXTS[text]
    without = [word for word in TEXTS[text] if word.isalnum() or word[:1].isalpha()]
    assert words_of(text, symbols=False) == (without or TEXTS[text])


def test_numbers_are_equal_where_words_are() -> None:
    """In one call for all texts, and in a call for each."""
    together = numbers_of(list(TEXTS), symbols=True)
    assert together.num_words.tolist() == [len(words) for words in TEXTS.values()]
    np.testing.assert_array_equal(
        together.words, np.concatenate([numbers_of([text], symbols=True).words for text in TEXTS])
    )
    pairs = set(zip([word for words in TEXTS.values() for word in words], together.words.tolist(), strict=True))
    assert len(pairs) == len({word for word, _ in pairs}) == len({number for _, number in pairs})


@pytest.mark.parametrize("of_short", [True, False])
def test_runs_are_those_of_the_texts_words(of_short: bool) -> None:
    rows = ["a b c d", "b c", "", "x b c d", "b c", "c b"]
    found = numbers_of(rows, symbols=True)
    hashes, firsts = runs_of(found.words, found.offsets, 3, of_short=of_short)
    expected = []
    for row in rows:
        words = row.split()
        runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
        expected.append(runs or ([tuple(words)] if words and of_short else []))
    assert np.diff(firsts).tolist() == [len(runs) for runs in expected]
    named = dict(zip(hashes.tolist(), [run for runs in expected for run in runs], strict=True))
    assert [named[one] for one in hashes.tolist()] == [run for runs in expected for run in runs]
    assert len(named) == len(set(named.values()))


PREFERENCE = {"prompt": "Who?", "chosen": "I am.", "rejected": "You are.", "margin": "3"}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"what": "up"}}}
CHAT = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": [{"type": "text", "text": "Look"}]},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
]


@pytest.mark.parametrize(
    ("settings", "row", "words"),
    [
        (SFTDataConfig, {"text": "One two", "id": "x"}, "one two"),
        (SFTDataConfig, {"messages": CHAT, "tools": [{"name": "look"}]}, "look look up"),
        (
            SFTDataConfig,
            {"messages": '[{"role": "system", "content": "No"}, {"role": "user", "content": "Yes"}]'},
            "yes",
        ),
        (SFTDataConfig, {"instruction": "Do", "input": "this", "output": "Done", "system": "No"}, "do done this"),
        (PreferenceDataConfig, PREFERENCE, "i am you are who"),
        (ClassificationDataConfig, {"text": "One", "label": "good"}, "one"),
    ],
    ids=["text", "chat", "json", "alpaca", "pair", "label"],
)
def test_what_of_a_row_is_compared(
    settings: type[DataConfig], row: dict[str, Any], words: str, write: Callable[..., str], chat_tokenizer
) -> None:
    found = contents(settings(source=write([row])), chat_tokenizer)
    assert sorted(words_of(found.text, symbols=True)) == sorted(words.split())


def test_a_prompt_is_compared_without_its_other_columns(write: Callable[..., str], chat_tokenizer) -> None:
    config = PromptDataConfig(source=write([{"prompt": "Who?", "answer": "No one"}])).rows([])
    assert words_of(contents(config, chat_tokenizer).text, symbols=True) == ["who"]


def test_ids_are_words(write: Callable[..., str], plain_tokenizer) -> None:
    found = contents(SFTDataConfig(source=write([{"input_ids": [3, 5, 5, 200]}])), plain_tokenizer)
    assert words_of_rows([found, RowContents(["a"])], symbols=True).num_words.tolist() == [4, 1]
    assert words_of_rows([found], symbols=True).words.tolist() == [3, 5, 5, 200]


def test_images_count_by_their_contents() -> None:
    def media(*values: object) -> int:
        found = RowContents()
        for value in values:
            found.add(value)
        return found.media

    shown = {"type": "image", "image": "a.png"}
    assert media("text") == 0 != media(shown) == media([{"content": [shown]}])
    assert len({media(shown), media({"type": "image", "image": "b.png"}), media(shown, shown)}) == 3
    assert media({"type": "image", "image": {"bytes": b"1"}}) != media({"type": "image", "image": {"bytes": b"2"}})


def contents(config: DataConfig, tokenizer) -> RowContents:
    render = renderer_of(config, tokenizer)
    [row] = render.sources.rows()
    return RowContents.of(row, render.reader)
