"""Labeled single answers: reading, truncation, bad rows, and labels in previews and other recipes."""

import json
from typing import Any

import numpy as np
import pytest

from lean_ft.data.documents import renderer_of
from lean_ft.data.preview import preview
from lean_ft.data.rows import Row
from lean_ft.settings import DataConfig, PreferenceDataConfig, RewardDataConfig, SFTDataConfig, UnpairedDataConfig


@pytest.fixture
def render(tmp_path, chat_tokenizer) -> Any:
    def of(kind: type[DataConfig], *fields: dict[str, Any], **settings: Any) -> tuple[list[str], list[float], Any]:
        """Return the trained text and the value of each document, and the report."""
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, fields)))
        config = kind(source=str(file), **settings)
        rows = [Row(one, f"rows.jsonl, line {i}") for i, one in enumerate(fields, start=1)]
        documents, report = renderer_of(config, chat_tokenizer, str(file))(rows)
        values = [value for one in documents for value in one.per_document["row_values"].tolist()]
        return [chat_tokenizer.decode(one.ids[one.trained]) for one in documents], values, report

    return of


def answer(label: Any, completion: Any = "yes") -> dict[str, Any]:
    return {"prompt": "q", "completion": completion, "label": label}


@pytest.mark.parametrize(
    ("label", "value"), [(True, 1), (False, 0), (1, 1), (0, 0), ("true", 1), (" False ", 0), ("0", 0)]
)
def test_a_label_is_true_or_false_however_it_is_written(render, label, value):
    texts, values, report = render(UnpairedDataConfig, answer(label))
    assert (texts, values) == (["yes<|im_end|>"], [value])
    assert "1 row (unpaired, detected from their fields)" in str(report)


def test_of_a_pair_each_answer_counts_by_itself_and_an_answer_may_be_messages(render):
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    texts, values, report = render(UnpairedDataConfig, pair, pair)
    assert (texts, values) == (["yes<|im_end|>", "no<|im_end|>"] * 2, [1, 0, 1, 0])
    assert (report.rows, report.kept, report.unit) == (2, 4, "answers")
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}
    for completion in ([assistant], [user, assistant]):
        texts, _, _ = render(UnpairedDataConfig, {"prompt": [user], "completion": completion, "label": True})
        assert texts == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (answer(None), "`label` is null"),
        (answer("good"), "`label` is a string .'good'.; expected true .1. for a desirable or false"),
        (answer(2), "`label` is a number"),
        (answer([True]), "`label` is a list"),
        (answer(True, completion=3), "`completion`|the field"),
        ({"prompt": "q", "label": True}, "this recipe trains on completions|cannot detect the format from the fields"),
    ],
    ids=str,
)
def test_what_is_no_label_or_answer_is_a_bad_row(render, fields, message):
    with pytest.raises(ValueError, match=f"rows.jsonl.*({message})"):
        render(UnpairedDataConfig, fields)


def test_answers_are_cut_as_those_of_pairs_are_and_counted(render, chat_tokenizer):
    long = "one two three four five six seven eight"
    whole, _, _ = render(UnpairedDataConfig, answer(True, long))
    for settings in ({"max_completion_length": 3}, {"max_length": 28}, {"max_prompt_length": 2, "max_length": 5}):
        single, _, report = render(UnpairedDataConfig, answer(True, long), **settings)
        pair, _, _ = render(PreferenceDataConfig, {"prompt": "q", "chosen": long, "rejected": "no"}, **settings)
        assert single == pair[:1]
        assert len(single[0]) < len(whole[0])
        assert report.truncated == 1 and report.lost_tokens > 0
    none_left, _, report = render(UnpairedDataConfig, answer(True), max_length=4)
    assert none_left == []
    assert report.dropped == {"no completion left": 1}


def test_a_column_called_label_changes_nothing_for_others(render):
    texts, values, report = render(SFTDataConfig, answer(False))
    assert (texts, values, report.format) == (["yes<|im_end|>"], [0.0], "prompt_completion")
    with pytest.raises(
        ValueError, match="data.format=unpaired: this recipe does not support it; expected one of messages"
    ):
        render(SFTDataConfig, answer(False), format="unpaired")


@pytest.mark.parametrize(("margin", "value"), [(0.5, 0.5), (-1, -1), ("1e-1", 0.1), (None, 0)])
def test_margins_are_read_by_reward_models_alone(render, margin, value):
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no", "margin": margin}
    assert (
        render(RewardDataConfig, pair)[1] == [np.float32(value)] * 2 or render(RewardDataConfig, pair)[1] == [value] * 2
    )
    assert render(PreferenceDataConfig, {**pair, "margin": "much"})[1] == [0, 0]
    for wrong in ("much", True, [1], "nan"):
        with pytest.raises(ValueError, match="rows.jsonl, line 1: `margin` is"):
            render(RewardDataConfig, {**pair, "margin": wrong})


def test_the_preview_tells_good_answers_from_bad_ones(tmp_path, chat_tokenizer):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(answer(label)) for label in (True, False)))
    config = UnpairedDataConfig(source=str(tmp_path / "rows.jsonl"))
    documents = [row.documents[0] for row in preview(config, chat_tokenizer, num_rows=2, batch_size=2).rows]
    assert [document.place.rpartition(", ")[2] for document in documents] == ["desirable", "undesirable"]
    assert [document.is_rejected for document in documents] == [False, True]
