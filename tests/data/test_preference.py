"""All forms of pairs become one prompt and two answers, and are truncated in the documented order."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_ft.data import prepare_batches
from lean_ft.data.columns import Document
from lean_ft.data.pairs import PairReader, fit_answers, num_prompt_tokens
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row
from lean_ft.settings import PreferenceDataConfig
from tests.data.conftest import rendering
from tests.data.pair_texts import Text, texts_of


class Pair(NamedTuple):
    prompt: np.ndarray
    chosen: Document
    rejected: Document


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def render(tokenizer, *fields: dict[str, Any], **settings: Any) -> tuple[list[Pair], DataReport]:
    rows = [Row(one, f"rows.jsonl, line {i}") for i, one in enumerate(fields, start=1)]
    config = PreferenceDataConfig(source="rows.jsonl", **settings)
    documents, report = rendering(PairReader, config, rows, tokenizer)(rows)
    pairs = []
    for sides in zip(documents[::2], documents[1::2], strict=True):
        length = num_prompt_tokens(sides)
        pairs.append(Pair(sides[0].ids[:length], *(side[length:] for side in sides)))
    return pairs, report


def texts(tokenizer, pair: Pair) -> list[str]:
    return [tokenizer.decode(ids) for ids in (pair.prompt, pair.chosen.ids, pair.rejected.ids)]


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
    assert pair.chosen.trained.all() and pair.rejected.trained.all()
    num_tokens = 2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected)
    assert (report.kept, report.tokens) == (1, num_tokens)
    assert report.target_tokens == 4 + 3


def test_answers_of_several_turns(chat_tokenizer):
    chosen = [assistant("a"), user("r"), assistant("b")]
    (pair,), _ = render(chat_tokenizer, {"prompt": "q", "chosen": chosen, "rejected": "no"})
    assert (
        texts(chat_tokenizer, pair)[1]
        == "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    assert chat_tokenizer.decode(pair.chosen.ids[pair.chosen.trained]) == "a<|im_end|>b<|im_end|>"
    # An earlier answer common to both sides is part of the prompt.
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
        assert prompt == fields.get("prompt", "Q: why?\n\nA: the")  # the common text is part of the prompt


def reference(prompt: list[int], answers: list[list[int]], max_prompt, max_completion, max_length, side):
    """Truncate plain lists; return None if the pair is dropped."""
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
    limits = {"max_prompt_length": max_prompt, "max_completion_length": max_completion, "max_length": max_length}
    config = PreferenceDataConfig(source="x", truncation_side=side, **limits)
    report = DataReport("preference")
    asked, *sides = (Document(np.array(ids), np.ones(len(ids), dtype=bool)) for ids in (prompt, chosen, rejected))
    kept = fit_answers(asked, sides, config, "a place", report)
    if expected is None:
        assert kept is None
        assert sum(report.dropped.values()) == 1
        return
    assert kept is not None
    kept_prompt, answers = kept
    assert [part.ids.tolist() for part in (kept_prompt, *answers)] == list(expected)
    assert [len(answer.trained) for answer in answers] == [len(expected[1]), len(expected[2])]
    lost = 2 * len(prompt) + len(chosen) + len(rejected) - sum(len(kept_prompt) + len(answer) for answer in answers)
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
        "no completion left on one side": 1,
    }
    assert (report.rows, report.kept, report.bad_rows) == (5, 1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]},
            "line 1: `chosen` and `rejected` must begin with the same"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("r"), assistant("b")]}, "must begin with the same"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "line 1: the field `chosen` is a number"),
        ({"prompt": "q", "chosen": " ", "rejected": "b"}, "line 1: `chosen` is empty; expected a completion"),
        ({"prompt": "q", "chosen": [user("q")], "rejected": "b"}, "must begin with the same"),
        ({"prompt": "q", "completion": "a"},
            "the rows are prompt_completion, and this recipe trains on preference pairs"),
    ],
)  # fmt: skip
def test_rows_that_are_no_pair(fields: dict[str, Any], message: str, chat_tokenizer):
    with pytest.raises(ValueError, match=message):
        render(chat_tokenizer, fields)


@pytest.mark.parametrize("overflow", ["drop", "raise"])
def test_a_pair_that_is_too_long_need_not_be_cut(overflow: str, plain_tokenizer):
    rows = [{"prompt": "pp", "chosen": "a" * n, "rejected": "b"} for n in (5, 6, 20)]  # plus eos
    settings: dict[str, Any] = {"max_length": 8, "overflow": overflow}
    if overflow == "raise":
        with pytest.raises(ValueError, match=r"line 2: 9 tokens, more than data.max_length=8"):
            render(plain_tokenizer, *rows, **settings)
        return
    pairs, report = render(plain_tokenizer, *rows, **settings)
    assert [len(pair.chosen) for pair in pairs] == [6]
    assert (report.dropped, report.truncated) == ({"longer than max_length": 2}, 0)
    # max_completion_length truncates the long answer first, so the pair fits.
    assert render(plain_tokenizer, *rows, **settings, max_completion_length=6)[1].kept == 3


PAIRS = [{"prompt": "p" * (i % 5 + 1), "chosen": f"{i}+" + "c" * (i % 9),
    "rejected": f"{i}-" + "r" * (i % 7)} for i in range(40)]  # fmt: skip


@pytest.mark.first(4)
@pytest.mark.parametrize(
    "layout",
    [{}, {"packing": "bfd"}, {"packing": "padding_free"}, {"batch_tokens": 160}, {"num_processes": 2}],
    ids=str,
)
def test_batches_hold_chosen_and_rejected_in_turn(layout: dict[str, Any], write, plain_tokenizer, monkeypatch):
    """With and without shared prompts: of different lengths, empty prompts, and answers of one token."""
    monkeypatch.setattr("lean_ft.data.documents.FEW_ROWS", 0)
    rows = [*PAIRS, *({"prompt": "", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(4))]
    layout = {"num_processes": 1} | layout
    config = PreferenceDataConfig(source=write(rows), max_length=32, validation_fraction=0.25, **layout)

    def expected(row: dict[str, str], side: str) -> Text:
        prompt, answer = (plain_tokenizer.encode(text) for text in (row["prompt"], row[side] + "<|end|>"))
        return prompt + answer, ([-100] * (len(prompt) - 1) + answer if prompt else answer[1:]) + [-100]

    everything = sorted([expected(row, side) for side in ("chosen", "rejected")] for row in rows)
    shared, positions = [_same_ids(*both) for both in everything], list[int]()
    assert {0, 1, 4} <= set(shared)
    for share_prompts in (False, True):
        batches, held_out = prepare_batches(config, plain_tokenizer, 3, 0, share_prompts)
        assert held_out is not None
        assert (batches.report.kept, held_out.report.kept) == (33, 11)
        trained, validated = batches.take(batches.batches_per_epoch), list(held_out)
        if not share_prompts:  # a shared prompt's last token has the first completion's label
            for some, report in ((trained, batches.report), (validated, held_out.report)):
                assert sum(batch.num_targets for batch in some) == report.target_tokens
        taken: list[Any] = [*trained, *validated]
        numbers, *both = zip(*(one for batch in taken for one in texts_of(batch)), strict=True)
        assert sorted(map(list, zip(*both, strict=True))) == everything
        assert sorted(numbers) == list(range(44))
        positions.append(sum(int(batch.is_token.sum()) for batch in taken))
        assert sum(batch.num_prefix_tokens for batch in taken) == positions[0] - positions[-1]
        assert all(batch.input_ids.shape == (3, 64) for batch in trained if layout.get("packing") == "bfd")
        assert max(batch.num_tokens for batch in taken) <= layout.get("batch_tokens", 9999)
    assert positions[0] - positions[1] == sum(shared)
    if not layout:
        widest = max(len(c[0]) + len(r[0]) - own for (c, r), own in zip(everything, shared, strict=True))
        assert max(batch.input_ids.shape[1] for batch in taken) == -(-widest // 8) * 8


def _same_ids(chosen: Text, rejected: Text) -> int:
    """Number of common prompt ids."""
    first = [next(i for i, label in enumerate(labels) if label != -100) + 1 for _, labels in (chosen, rejected)]
    pairs = zip(chosen[0], rejected[0], strict=False)
    return min(*first, next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), 99))


def test_a_recipe_that_shares_no_prompt_refuses_to_be_told_so(plain_tokenizer):
    config = PreferenceDataConfig(source="unread", shared_prompt=True)
    with pytest.raises(ValueError, match="this recipe computes the prompt once per completion"):
        prepare_batches(config, plain_tokenizer, batch_size=2, seed=0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"packing": "wrapped"}, "the answers of a pair are compared whole"),
        ({"packing": "bfd_split"}, "the answers of a pair are compared whole"),
        ({"batch_tokens": 63}, "batch_tokens=63 is less than max_length=32 for each of 2 answers"),
    ],
)
def test_what_pairs_cannot_have_is_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        PreferenceDataConfig(source="x", max_length=32, **settings)
