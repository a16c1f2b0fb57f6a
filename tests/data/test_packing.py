"""Packings hold every document once and waste little; best-fit decreasing is the textbook's."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_ft.data.packing import best_fit_decreasing, fill_rows, pack
from lean_ft.data.sft import sft_batches
from lean_ft.settings import SFTDataConfig

CAPACITY = 40
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


def one_by_one(lengths: list[int]) -> list[int]:
    """Best-fit decreasing as it is defined: the room left in each row, in O(n^2)."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(CAPACITY - length)
    return rooms


def rooms(lengths: list[int], documents: np.ndarray, offsets: np.ndarray) -> list[int]:
    """The room left in each row; checks that every document is in one row, and no row too full."""
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    assert (offsets[0], offsets[-1]) == (0, len(lengths))
    rows = [documents[first:last] for first, last in itertools.pairwise(offsets)]
    left = [CAPACITY - sum(lengths[i] for i in row) for row in rows]
    assert all(len(row) > 0 for row in rows)
    assert min(left) >= 0
    return left


@settings(max_examples=300, deadline=None)
@given(LENGTHS)
def test_best_fit_decreasing_is_that_of_placing_one_by_one(lengths: list[int]):
    left = rooms(lengths, *best_fit_decreasing(np.array(lengths), CAPACITY))
    assert sorted(left) == sorted(one_by_one(lengths))


@settings(max_examples=300, deadline=None)
@given(LENGTHS)
def test_filling_and_the_better_of_both(lengths: list[int]):
    filled = rooms(lengths, *fill_rows(np.array(lengths), CAPACITY))
    packed = rooms(lengths, *pack(np.array(lengths), CAPACITY))
    assert len(packed) <= min(len(filled), len(one_by_one(lengths)))


def test_filling_finds_rows_that_best_fit_decreasing_misses():
    # 6 + 5 + 5 = 16 in each of three rows; the longest first makes 6 + 6, 6 + 5 + 5 and leaves two rows open.
    lengths = np.array([6, 6, 6, 5, 5, 5, 5, 5, 5])
    assert len(best_fit_decreasing(lengths, 16)[1]) - 1 == 4
    assert len(pack(lengths, 16)[1]) - 1 == 3


def test_documents_keep_their_order_among_equals():
    documents, _ = best_fit_decreasing(np.full(10, 5), 20)
    assert documents.tolist() == list(range(10))


@pytest.mark.parametrize("longest", [2048, 131072])
def test_a_million_documents_take_seconds(longest: int):
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=1_000_000)
    start = time.process_time()
    _, offsets = pack(lengths, longest)
    assert time.process_time() - start < 30  # 1 s and 5 s on the machine this was written on
    assert lengths.sum() / ((len(offsets) - 1) * longest) > 0.998


def test_gsm8k_wastes_less_than_one_percent(shared_data, chat_tokenizer, tmp_path):
    from lean_ft.tokenizers import load_tokenizer

    (tmp_path / "tokenizer.model").write_bytes((shared_data / "tokenizers/llama2_sentencepiece.model").read_bytes())
    config = SFTDataConfig(
        source=str(shared_data / "gsm8k_train.jsonl"),
        columns={"prompt": "question", "completion": "answer"},
        max_length=1024,
        packing="bfd",
    )
    batches, _ = sft_batches(config, load_tokenizer(tmp_path), batch_size=4, seed=0)
    report = batches.report
    assert (report.rows, report.kept, report.truncated, report.dropped) == (7473, 7473, 0, {})
    assert report.packing_efficiency is not None
    assert report.packing_efficiency > 0.99
