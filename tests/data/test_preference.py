"""Pairs become one prompt and two answers, whichever way they are written, and are cut in the order promised."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_ft.data.preference import Pair, PairReader, fit_pair
from lean_ft.data.render import Renderer
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row
from lean_ft.settings import PreferenceDataConfig


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def render(tokenizer, *fields: dict[str, Any], **settings: Any) -> tuple[list[Pair], DataReport]:
    rows = [Row(one, f"rows.jsonl, line {i}") for i, one in enumerate(fields, start=1)]
    config = PreferenceDataConfig(source="rows.jsonl", **settings)
    documents, report = Renderer(config, PairReader.of(config, rows, tokenizer), tokenizer)(rows)
    return [Pair.of(*sides) for sides in zip(documents[::2], documents[1::2], strict=True)], report


def texts(tokenizer, pair: Pair) -> list[str]:
    return [tokenizer.decode(ids) for ids in (pair.prompt, pair.chosen[0], pair.rejected[0])]


CHAT = ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "yes<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [user("q")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {"prompt": "q", "chosen": [assistant("yes")], "rejected": "no"},
        {"chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
        {"prompt": "q", "chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
        {
            "prompt": [{"from": "human", "value": "q"}],
            "chosen": [{"from": "gpt", "value": "yes"}],
            "rejected": [{"from": "gpt", "value": "no"}],
        },
    ],
)
def test_ways_to_write_a_chat(fields: dict[str, Any], chat_tokenizer):
    (pair,), report = render(chat_tokenizer, fields)
    assert texts(chat_tokenizer, pair) == CHAT
    assert pair.chosen[1].all() and pair.rejected[1].all()
    assert (report.kept, report.tokens) == (1, pair.num_tokens)
    assert report.target_tokens == 4 + 3


def test_answers_of_several_turns(chat_tokenizer):
    chosen = [assistant("a"), user("r"), assistant("b")]
    (pair,), _ = render(chat_tokenizer, {"prompt": "q", "chosen": chosen, "rejected": "no"})
    assert (
        texts(chat_tokenizer, pair)[1]
        == "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert chat_tokenizer.decode(pair.chosen[0][pair.chosen[1]]) == "a<|im_end|>b<|im_end|>"
    # An earlier answer that both share is a part of the prompt.
    shared = [user("q"), assistant("a"), user("r")]
    (pair,), _ = render(chat_tokenizer, {"chosen": [*shared, assistant("b")], "rejected": [*shared, assistant("c")]})
    assert texts(chat_tokenizer, pair)[1:] == ["b<|im_end|>", "c<|im_end|>"]


def test_texts(plain_tokenizer):
    for fields in (
        {"prompt": "Q: why?\n\nA:", "chosen": " the cat", "rejected": " the dog"},
        {"chosen": "Q: why?\n\nA: the cat", "rejected": "Q: why?\n\nA: the dog"},
    ):
        (pair,), _ = render(plain_tokenizer, fields)
        prompt, chosen, rejected = texts(plain_tokenizer, pair)
        assert (prompt + chosen, prompt + rejected) == ("Q: why?\n\nA: the cat<|end|>", "Q: why?\n\nA: the dog<|end|>")
        assert prompt == fields.get("prompt", "Q: why?\n\nA: the")  # what both say is no difference to learn


def reference(prompt: list[int], answers: list[list[int]], max_prompt, max_completion, max_length, side):
    """The cutting in plain lists; None where the pair is dropped."""
    prompt = prompt[-max_prompt:] if max_prompt else prompt
    answers = [answer[:max_completion] if max_completion else answer for answer in answers]
    if side == "right":
        sequences = [(prompt + answer)[:max_length] for answer in answers]
        answers = [sequence[len(prompt) :] for sequence in sequences]
    else:
        while prompt and max(len(prompt + answer) for answer in answers) > max_length:
            prompt = prompt[1:]
        answers = [answer[: max_length - len(prompt)] for answer in answers]
    if any(len(answer) < (1 if prompt else 2) for answer in answers) or answers[0] == answers[1]:
        return None
    return prompt, *answers


@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)),
    max_prompt=st.one_of(st.none(), st.integers(1, 10)),
    max_completion=st.one_of(st.none(), st.integers(1, 10)),
    max_length=st.integers(2, 20),
    side=st.sampled_from(["right", "left"]),
)
def test_cutting(sizes, max_prompt, max_completion, max_length, side):
    prompt, chosen, rejected = (list(range(100 * i, 100 * i + size)) for i, size in enumerate(sizes))
    expected = reference(prompt, [chosen, rejected], max_prompt, max_completion, max_length, side)
    config = PreferenceDataConfig(
        source="x",
        max_prompt_length=max_prompt,
        max_completion_length=max_completion,
        max_length=max_length,
        truncation_side=side,
    )
    report = DataReport("preference")
    sides = [(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool)) for ids in (chosen, rejected)]
    kept = fit_pair(Pair(np.array(prompt, dtype=np.int32), sides[0], sides[1]), config, "a place", report)
    if expected is None:
        assert kept is None
        assert sum(report.dropped.values()) == 1
        return
    assert kept is not None
    assert [kept.prompt.tolist(), kept.chosen[0].tolist(), kept.rejected[0].tolist()] == list(expected)
    assert [len(kept.chosen[1]), len(kept.rejected[1])] == [len(expected[1]), len(expected[2])]
    lost = 2 * len(prompt) + len(chosen) + len(rejected) - kept.num_tokens
    assert (report.lost_tokens, report.truncated) == (lost, int(lost > 0))


def test_what_is_dropped_is_counted(plain_tokenizer):
    _, report = render(
        plain_tokenizer,
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"prompt": "p", "chosen": "abcd", "rejected": "abxy"},
        {"prompt": "p" * 30, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": None, "rejected": "b"},
        max_length=8,
        max_completion_length=2,
        on_bad_row="skip",
    )
    assert report.dropped == {
        "chosen equals rejected": 1,
        "chosen equals rejected within the lengths": 1,
        "no answer left on a side": 1,
    }
    assert (report.rows, report.kept, report.bad_rows) == (5, 1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "line 1: `chosen` and `rejected` do not begin with the same"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]}, "do not begin with the same"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "line 1: the field `chosen` is a number"),
        ({"prompt": "q", "chosen": [user("q")], "rejected": "b"}, "do not begin with the same"),
        ({"prompt": "q", "completion": "a"}, "the rows are prompt_completion, and this recipe learns from pairs"),
    ],
)  # fmt: skip
def test_rows_that_are_no_pair(fields: dict[str, Any], message: str, chat_tokenizer):
    with pytest.raises(ValueError, match=message):
        render(chat_tokenizer, fields)
