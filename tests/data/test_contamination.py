"""Overlaps with evaluation questions equal those of sets of words, with GPT-3's lengths of runs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lean_ft.data.contamination import TaskOverlaps, task_overlaps
from lean_ft.data.documents import renderer_of
from lean_ft.settings import SFTDataConfig

VOCABULARY = [f"w{i}" for i in range(300)]
Found = tuple[list[TaskOverlaps], int]


@pytest.fixture
def overlaps(write: Callable[..., str], plain_tokenizer) -> Callable[[list[tuple[str, str]], list[str]], Found]:
    def find(questions: list[tuple[str, str]], texts: list[str]) -> Found:
        render = renderer_of(SFTDataConfig(source=write([{"text": text} for text in texts])), plain_tokenizer)
        return task_overlaps(questions, render.sources.rows(), render.reader)

    return find


def runs(text: str, length: int) -> list[tuple[str, ...]]:
    words = text.lower().split()
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def test_overlaps_are_those_of_sets(overlaps: Callable[..., Found]) -> None:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(VOCABULARY, 80)) for _ in range(200)]
    questions = []
    for i in range(60):
        words = draw.choice(VOCABULARY, draw.integers(10, 40)).tolist()
        if i % 3 == 0:  # a part of a row
            start, length = draw.integers(40), draw.integers(5, len(words))
            words[:length] = texts[draw.integers(200)].upper().split()[start : start + length]
        questions.append(" ".join(words))
    [found], num_rows = overlaps([("task", question) for question in questions], texts)
    lengths = sorted(len(question.split()) for question in questions)
    assert (num_rows, found.num_questions, found.run) == (200, 60, lengths[2])  # the 5th percentile
    assert found.num_compared == sum(length >= found.run for length in lengths)
    trained: dict[tuple[str, ...], int] = {}
    for row, text in enumerate(texts, start=1):
        for run in runs(text, found.run):
            trained.setdefault(run, row)
    expected = {}
    for number, question in enumerate(questions, start=1):
        own = runs(question, found.run)
        if rows := [trained[run] for run in own if run in trained]:
            expected[number] = len(rows) / len(own), rows
    assert 3 < len(expected) < 30
    assert {one.number: one.share for one in found.overlaps} == {n: share for n, (share, _) in expected.items()}
    for one in found.overlaps:
        place, _, line = one.place.rpartition("line ")
        assert Path(place.rstrip(", ")).name == "rows.jsonl"
        rows = expected[one.number][1]
        assert rows.count(int(line)) == max(map(rows.count, rows))
        assert one.words in " ".join(questions[one.number - 1].lower().split())
        assert any(one.words in text for text in texts)


@pytest.mark.parametrize(("lengths", "run"), [([5] * 20, 8), ([10] * 20, 10), ([10] + [30] * 30, 13), ([40] * 3, 13)])
def test_the_words_of_a_run(lengths: list[int], run: int, overlaps: Callable[..., Found]) -> None:
    questions = [("task", " ".join(f"q{i}x{j}" for j in range(length))) for i, length in enumerate(lengths)]
    [found], _ = overlaps(questions, ["one text"])
    assert (found.run, found.num_compared) == (run, sum(length >= run for length in lengths))


def test_an_instruction_of_most_questions_does_not_count(overlaps: Callable[..., Found]) -> None:
    instruction = "Answer the following question with one of the letters A B C or D please"
    questions = [("task", f"{instruction} {' '.join(f'q{i}x{j}' for j in range(15))}") for i in range(6)]
    texts = [f"{instruction} and something else", f"Now {questions[2][1].split('please ')[1]} once more"]
    [found], _ = overlaps(questions, texts)
    assert [(one.number, one.place.rpartition(", ")[2]) for one in found.overlaps] == [(3, "line 2")]


def test_tasks_have_runs_of_their_own_lengths(overlaps: Callable[..., Found]) -> None:
    words = [f"q{i}" for i in range(20)]
    questions = [("short", " ".join(words[:9])), ("long", " ".join(words)), ("none", "too short")]
    found, _ = overlaps(questions, [" ".join(words[:10])])
    assert [(one.task, one.run, len(one.overlaps)) for one in found] == [
        ("short", 9, 1),
        ("long", 13, 0),
        ("none", 8, 0),
    ]
    with pytest.raises(ValueError, match="no questions"):
        overlaps([], ["a text"])
