"""Truncated and dropped rows, and token counts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lean_ft.data.documents import ROWS_AT_A_TIME
from lean_ft.data.prepare import Preparation
from lean_ft.settings import SFTDataConfig
from tests.data.conftest import prepare

Config = Callable[..., Any]


def test_documents_are_the_tokenised_rows(config: Config, plain_tokenizer):
    rows = [{"prompt": "p" * (i % 7), "completion": f"c{i}"} for i in range(2 * ROWS_AT_A_TIME + 3)]
    documents, report = prepare(config(rows), plain_tokenizer)
    assert len(documents) == len(rows) == report.kept == report.rows
    for row, document in zip(rows, documents, strict=True):
        ids, trained = document.ids, document.trained
        text = row["prompt"] + row["completion"]
        assert ids.tolist() == [*plain_tokenizer.encode(text), plain_tokenizer.eos_id]
        assert trained.tolist() == [i >= len(row["prompt"]) for i in range(len(text) + 1)]
    assert documents.values["ids"].dtype == np.int32
    assert report.tokens == sum(len(row["prompt"] + row["completion"]) + 1 for row in rows)
    # Each completion and its eos are labels. Without a prompt, nothing predicts the first token.
    assert report.target_tokens == sum(len(row["completion"]) + 1 - (not row["prompt"]) for row in rows)


@pytest.mark.first
@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_source_may_have_its_own_format_and_columns(
    config: Config, plain_tokenizer, write: Callable[..., str], monkeypatch, num_processes: int
):
    monkeypatch.setattr("lean_ft.data.documents.FEW_ROWS", 0)
    sources = [
        {
            "path": write([{"question": "a", "answer": "b"}], "1.jsonl"),
            "columns": {"prompt": "question", "completion": "answer"},
        },
        {
            "path": write([{"question": "cd", "text": "e"}], "2.jsonl"),
            "format": "text",
            "columns": {"text": "question"},
        },
        write([{"body": "f"}], "3.jsonl"),
    ]
    settings = config([], source=sources, columns={"text": "body"}, num_processes=num_processes)
    documents, report = prepare(settings, plain_tokenizer)
    assert report.format == "prompt_completion + text"
    assert [plain_tokenizer.decode(document.ids[:-1]) for document in documents] == ["ab", "cd", "f"]
    with pytest.raises(ValueError, match=r"data\.columns\.promt: no format of this recipe has such a field"):
        prepare(config([], source=[{**sources[0], "columns": {"promt": "question"}}]), plain_tokenizer)


def test_another_format_of_a_source_makes_other_documents(config: Config, plain_tokenizer, write, tmp_path):
    path = write([{"question": "q", "answer": "a"}], "both.jsonl")
    settings = config([], source=path, cache_dir=tmp_path / "cache")

    def tokens(**own: Any) -> int:
        one = settings.model_copy(update={"source": SFTDataConfig(source=[{"path": path, **own}]).source})
        return Preparation(one, plain_tokenizer, batch_size=1, seed=0).documents(one.source).report.tokens

    assert tokens(columns={"text": "question"}, format="text") == 2
    both = {"columns": {"prompt": "question", "completion": "answer"}}
    assert tokens(**both, format="prompt_completion") == 3
    assert tokens(columns={"text": "answer"}, format="text") == 2
    assert len(list((tmp_path / "cache").glob("documents-*"))) == 3


def test_truncation_keeps_the_beginning_and_counts_what_is_lost(config: Config, plain_tokenizer):
    rows = [{"prompt": "pppp", "completion": "c" * 10}, {"prompt": "p", "completion": "c"}]
    documents, report = prepare(config(rows, max_length=8), plain_tokenizer)
    assert documents[0].ids.tolist() == plain_tokenizer.encode("ppppcccc")
    assert (report.truncated, report.lost_tokens, report.kept, report.dropped) == (1, 7, 2, {})


def test_rows_without_a_label_are_dropped_and_counted(config: Config, plain_tokenizer):
    rows = [
        {"prompt": "p" * 9, "completion": "lost"},
        {"prompt": "p" * 8, "completion": "lost"},
        {"prompt": "p" * 7, "completion": "kept"},
        {"prompt": "p", "completion": "kept"},
    ]
    documents, report = prepare(config(rows, max_length=8), plain_tokenizer)
    assert documents.lengths.tolist() == [8, 6]
    assert report.dropped == {"nothing to train on within max_length": 2}
    assert (report.rows, report.kept, report.truncated) == (4, 2, 1)


def test_a_text_of_one_token_predicts_nothing(config: Config, plain_tokenizer):
    _, report = prepare(config([{"text": ""}, {"text": "ab"}]), plain_tokenizer)
    assert report.dropped == {"nothing to train on": 1}
    assert (report.tokens, report.target_tokens) == (3, 2)


def test_overflow_drop_and_raise(config: Config, plain_tokenizer):
    rows = [{"text": "a" * 7}, {"text": "a" * 8}, {"text": "ok"}]
    documents, report = prepare(config(rows, max_length=8, overflow="drop"), plain_tokenizer)
    assert documents.lengths.tolist() == [8, 3]
    assert report.dropped == {"longer than max_length": 1}
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: 9 tokens, more than data.max_length=8"):
        prepare(config(rows, max_length=8, overflow="raise"), plain_tokenizer)


def test_nothing_left_says_why(config: Config, plain_tokenizer):
    rows = [{"prompt": "p" * 20, "completion": "c"}] * 3
    with pytest.raises(ValueError, match=r"3 rows, 3 dropped .nothing to train on within max_length.*data.max_length"):
        prepare(config(rows, max_length=8), plain_tokenizer)


def test_truncation_from_the_left_keeps_the_end(config: Config, plain_tokenizer):
    rows = [{"prompt": "p" * 10, "completion": "abc"}, {"prompt": "p" * 9, "completion": "c" * 20}]
    documents, report = prepare(config(rows, max_length=8, truncation_side="left"), plain_tokenizer)
    ids, trained = documents[0].ids, documents[0].trained
    assert plain_tokenizer.decode(ids) == "ppppabc<|end|>"
    assert trained.tolist() == [False] * 4 + [True] * 4
    assert plain_tokenizer.decode(documents[1].ids) == "c" * 7 + "<|end|>"
    assert documents.num_targets.tolist() == [4, 7]  # nothing predicts the first remaining token
    assert (report.truncated, report.lost_tokens) == (2, 6 + 22)
