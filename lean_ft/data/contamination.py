"""Words that training rows share with the questions of evaluation tasks.

A question overlaps with the training rows if a row has one of its runs of N words, in which punctuation, white space
and case do not count. N is the 5th percentile of the lengths of a task's questions, at least 8 and at most 13 words. A
shorter question is not compared. Runs that more than half of a task's questions have, such as an instruction, do not
count.

Source: Brown et al. 2020, "Language Models are Few-Shot Learners", https://arxiv.org/abs/2005.14165, appendix C, which
has N and its limits. `lean_ft.data.row_words` says which words a row has.

Legend: N words of a run, Q questions of a task, R runs of words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from lean_ft.data.formats import RowReader
from lean_ft.data.row_words import RowContents, batched, numbers_of, runs_of, words_of, words_of_rows
from lean_ft.data.rows import Row

LEAST, MOST = 8, 13  # words of a run
QUANTILE = 0.05  # of the lengths of questions, for the words of a run
FEW_QUESTIONS = 4  # of which any may have equal beginnings
_FILTER_BITS = 24


@dataclass(frozen=True)
class Overlap:
    """A question of which a training row has a run of words."""

    number: int
    """Of the question in its task, from 1."""
    share: float
    """Of the question's runs that training rows have."""
    place: str
    """Of the row that has most of them."""
    words: str
    """The first words in a sequence that training rows have."""


@dataclass(frozen=True)
class TaskOverlaps:
    """The questions of a task that overlap with the training rows, the most similar first."""

    task: str
    num_questions: int
    num_compared: int
    """Number of questions of at least `run` words."""
    run: int
    """Words of a run."""
    overlaps: list[Overlap]


@dataclass(frozen=True)
class _Task:
    """The questions of a task and their runs."""

    name: str
    words: list[list[str]]
    run: int
    hashes: np.ndarray  # (R,) uint64
    counts: np.ndarray  # (R,) bool: of less than half of the questions
    firsts: np.ndarray  # (Q + 1,) first run of each question

    @classmethod
    def of(cls, name: str, questions: Iterable[str]) -> "_Task":
        texts = list(questions)
        words = [words_of(text, symbols=False) for text in texts]
        lengths = [len(one) for one in words] or [0]
        run = int(np.clip(np.quantile(lengths, QUANTILE, method="inverted_cdf"), LEAST, MOST))
        numbers = [numbers_of([text], symbols=False).words for text in texts]
        offsets = np.append(0, np.cumsum([len(one) for one in numbers], dtype=np.int64))
        joined = np.concatenate([np.empty(0, dtype=np.uint32), *numbers])
        hashes, firsts = runs_of(joined, offsets, run, of_short=False)
        question = np.repeat(np.arange(len(words)), np.diff(firsts))
        distinct = np.unique(np.stack([hashes, question.astype(np.uint64)]), axis=1)[0]
        found, times = np.unique(distinct, return_counts=True)
        most = len(words) / 2 if len(words) >= FEW_QUESTIONS else len(words)
        counts = times[np.searchsorted(found, hashes)] <= most if len(found) else np.empty(0, dtype=bool)
        return cls(name, words, run, hashes, counts, firsts)


class _Lookup:
    """The runs of all questions, and the first training row that has each."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes = np.unique(hashes)  # (U,)
        self._rows = np.full(len(self._hashes), -1, dtype=np.int64)
        self._maybe = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self._maybe[self._places(self._hashes)] = True

    def add(self, hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Note the row of each hash that is a question's; return the rows, without repetition, that are the first."""
        maybe = np.flatnonzero(self._maybe[self._places(hashes)])
        hashes, rows = hashes[maybe], rows[maybe]
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        is_new = (self._hashes[at] == hashes) & (self._rows[at] < 0)
        self._rows[at[is_new][::-1]] = rows[is_new][::-1]  # the first row is written last
        return np.unique(rows[is_new])

    def rows_of(self, hashes: np.ndarray) -> np.ndarray:
        """The first training row that has each run of a question; -1 without one."""
        return self._rows[np.searchsorted(self._hashes, hashes)]

    def _places(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)


def task_overlaps(
    questions: Iterable[tuple[str, str]], rows: Iterable[Row], reader: RowReader
) -> tuple[list[TaskOverlaps], int]:
    """Return what each task's questions share with the training rows, and the number of rows.

    questions: the name of a task and the text of a question, all of a task one after the other. Rows that cannot be
    read have no words. Raises ValueError if there is no question.
    """
    tasks = [_Task.of(name, (text for _, text in some)) for name, some in groupby(questions, key=lambda one: one[0])]
    if not any(task.words for task in tasks):
        raise ValueError("the tasks have no questions to compare.")
    lookup = _Lookup(np.concatenate([task.hashes[task.counts] for task in tasks]))
    places, number = dict[int, str](), 0
    lengths = sorted({task.run for task in tasks if task.counts.any()})
    read = list[str]()  # the places of the rows of a batch

    def contents() -> Iterator[RowContents]:
        for row in rows:
            read.append(row.place)
            yield RowContents.of(row, reader)

    for some in batched(contents()):
        words = words_of_rows(some, symbols=False)
        for length in lengths:
            hashes, firsts = runs_of(words.words, words.offsets, length, of_short=False)
            found = lookup.add(hashes, np.repeat(np.arange(number, number + len(some)), np.diff(firsts)))
            places |= {row: read[row - number] for row in found.tolist()}
        number += len(some)
        read.clear()
    return [_overlaps(task, lookup, places) for task in tasks], number


def _overlaps(task: _Task, lookup: _Lookup, places: dict[int, str]) -> TaskOverlaps:
    """The overlaps of a task, when all rows are noted."""
    overlaps, num_compared = list[Overlap](), 0
    for i, words in enumerate(task.words):
        own = slice(task.firsts[i], task.firsts[i + 1])
        num_compared += own.stop > own.start
        counted = np.flatnonzero(task.counts[own])
        if not len(counted):
            continue
        rows = lookup.rows_of(task.hashes[own][counted])
        met = counted[rows >= 0]
        if len(met):
            [(row, _)] = Counter(rows[rows >= 0].tolist()).most_common(1)
            gaps = np.flatnonzero(np.diff(met) > 1)
            last = met[gaps[0]] if len(gaps) else met[-1]
            shared = " ".join(words[met[0] : last + task.run])
            overlaps.append(Overlap(i + 1, len(met) / len(counted), places[row], shared))
    overlaps.sort(key=lambda one: (-one.share, one.number))
    return TaskOverlaps(task.name, len(task.words), num_compared, task.run, overlaps)
