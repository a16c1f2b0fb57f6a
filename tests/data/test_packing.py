"""Packings hold every document once, with hardly more rows than textbook best-fit decreasing."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_ft.data.arrangement import arrange
from lean_ft.data.collate import collate
from lean_ft.data.columns import Columns, Document
from lean_ft.data.objective import PLAIN
from lean_ft.data.packing import pack, split, wrap
from lean_ft.data.prepare import report_packing
from lean_ft.data.report import DataReport
from lean_ft.settings import SFTDataConfig

CAPACITY = 40
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


def one_by_one(lengths: list[int]) -> list[int]:
    """Room left in each row by textbook best-fit decreasing, in O(n^2)."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(CAPACITY - length)
    return rooms


def rooms(lengths: list[int], documents: np.ndarray, offsets: np.ndarray) -> list[int]:
    """Return the room left in each row; check that every document is in exactly one row and no row overflows."""
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    assert (offsets[0], offsets[-1]) == (0, len(lengths))
    rows = [documents[first:last] for first, last in itertools.pairwise(offsets)]
    left = [CAPACITY - sum(lengths[i] for i in row) for row in rows]
    assert all(len(row) > 0 for row in rows)
    assert min(left) >= 0
    return left


@pytest.mark.parametrize("number", [100, pytest.param(300, marks=pytest.mark.long)])
def test_rows_hold_every_document_once(number: int):
    @settings(max_examples=number, deadline=None)
    @given(LENGTHS)
    def check(lengths: list[int]):
        packed = rooms(lengths, *pack(np.array(lengths), CAPACITY))
        assert len(packed) <= len(one_by_one(lengths)) + 1

    check()


def test_finds_rows_that_best_fit_decreasing_misses():
    # Optimal: 6 + 5 + 5 = 16 in each of three rows. Best-fit decreasing makes 6 + 6 and 6 + 5 + 5, and needs a 4th row.
    assert len(pack(np.array([6, 6, 6, 5, 5, 5, 5, 5, 5]), 16)[1]) - 1 == 3


def test_documents_keep_their_order_among_equals():
    documents, _ = pack(np.full(10, 5), 20)
    assert documents.tolist() == list(range(10))


@pytest.mark.long
@pytest.mark.parametrize("longest", [2048, 131072])
def test_a_million_documents_take_seconds(longest: int):
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=1_000_000)
    start = time.process_time()
    _, offsets = pack(lengths, longest)
    assert time.process_time() - start < 30  # measured: 0.2 s and 4 s
    assert lengths.sum() / ((len(offsets) - 1) * longest) > 0.998


@pytest.mark.parametrize("number", [60, pytest.param(200, marks=pytest.mark.long)])
def test_cutting_loses_no_token(number: int):
    """Compare with cutting a list of (document, position) tokens."""

    @settings(max_examples=number, deadline=None)
    @given(st.lists(st.integers(1, 4 * CAPACITY), min_size=1, max_size=40))
    def check(lengths: list[int]):
        texts = [[(document, place) for place in range(length)] for document, length in enumerate(lengths)]

        def tokens(pieces) -> list[list[tuple[int, int]]]:
            columns = (pieces.documents, pieces.firsts, pieces.lengths)
            stretches = zip(*(column.tolist() for column in columns), strict=True)
            return [texts[document][first : first + length] for document, first, length in stretches]

        pieces = split(np.array(lengths), CAPACITY)
        expected = [text[i : i + CAPACITY] for text in texts for i in range(0, len(text), CAPACITY)]
        assert tokens(pieces) == expected

        pieces, offsets = wrap(np.array(lengths), CAPACITY)
        one_text = list(itertools.chain(*texts))
        got = tokens(pieces)
        rows = [list(itertools.chain(*got[first:last])) for first, last in itertools.pairwise(offsets)]
        assert rows == [one_text[i : i + CAPACITY] for i in range(0, len(one_text), CAPACITY)]

    check()


class TestPublishedExamples:
    """Documented results of TRL 1.16's `pack_dataset` for these four sequences and length 4."""

    def rows(self, packing: str) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Ids, labels and positions of the packed rows, without padding."""
        texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
        if packing == "bfd":
            texts[0] = texts[0][:4]  # truncated before packing, where truncation is counted
        columns = Columns.join([Document(np.array(ids), np.ones(len(ids), dtype=bool)) for ids in texts])
        config = SFTDataConfig(source="-", max_length=4, packing=packing)
        arrangement = arrange(columns.lengths, config, batch_size=3)
        num_tokens, num_targets = int(columns.lengths.sum()), int(columns.num_targets.sum())
        self.report = DataReport("tokens", tokens=num_tokens, target_tokens=num_targets)
        report_packing(self.report, arrangement, columns, config)
        batch = collate(arrangement, columns, PLAIN, np.arange(len(arrangement)))
        sizes = (batch.input_ids != 0).sum(1).tolist()
        assert all((row[size:] == 0).all() for row, size in zip(batch.input_ids, sizes, strict=True))
        assert (batch.labels[batch.input_ids == 0] == -100).all()
        assert self.report.target_tokens == batch.num_targets
        columns = (batch.input_ids, batch.labels, batch.positions)
        return tuple([row[:size].tolist() for row, size in zip(c, sizes, strict=True)] for c in columns)  # pyright: ignore

    def test_bfd(self):
        ids, labels, positions = self.rows("bfd")
        assert ids == [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]
        assert labels == [[2, 3, 4, -100], [9, 10, -100, -100], [7, -100]]
        assert positions == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1]]

    def test_bfd_split(self):
        ids, labels, positions = self.rows("bfd_split")
        assert ids == [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]]
        # The cut-off token 5 is still predicted by the token before it.
        assert labels == [[2, 3, 4, 5], [9, 10, -100, -100], [7, -100, -100]]
        assert positions == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 0]]

    def test_wrapped(self):
        ids, labels, positions = self.rows("wrapped")
        assert ids == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
        # One text: the previous document predicts a document's first token; nothing predicts a row's first token.
        assert labels == [[2, 3, 4, -100], [6, 7, 8, -100], [10, 11, -100]]
        assert positions == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]
        assert "attend to each other" in str(self.report)
