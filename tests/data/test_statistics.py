"""The predicted cost of each maximum length matches prepared batches."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lean_ft.data import prepare_batches
from lean_ft.data.statistics import at_length, gather_statistics, histogram, quantiles
from lean_ft.settings import PreferenceDataConfig

Config = Callable[..., Any]
ROWS = [{"prompt": "p" * (1 + 7 * i % 40), "completion": "c" * (1 + 11 * i % 90)} for i in range(101)]


def lengths_of(rows: list[dict[str, str]]) -> list[int]:
    return [len(row["prompt"] + row["completion"]) + 1 for row in rows]


def test_nothing_is_cut_before_it_is_counted(config: Config, plain_tokenizer):
    for settings in ({"max_length": 8}, {"max_length": 8, "overflow": "raise"}, {"packing": "bfd"}):
        found = gather_statistics(config(ROWS, **settings), plain_tokenizer)
        assert found.lengths.tolist() == lengths_of(ROWS)
        assert found.num_targets.tolist() == [len(row["completion"]) + 1 for row in ROWS]
        assert (found.report.kept, found.report.truncated) == (101, 0)


@pytest.mark.parametrize("max_length", [64, 200])
def test_it_says_what_a_run_then_shows(max_length: int, config: Config, plain_tokenizer):
    settings = config(ROWS, max_length=max_length)
    said = at_length(np.array(lengths_of(ROWS)), max_length, batch_size=4, seed=3)
    batches, _ = prepare_batches(settings, plain_tokenizer, batch_size=4, seed=3)
    epoch = batches.take(batches.batches_per_epoch)
    num_tokens = sum(min(length, max_length) for length in lengths_of(ROWS))
    assert said.padding == pytest.approx(1 - num_tokens / sum(batch.num_tokens for batch in epoch))
    assert (said.rows_cut, said.lost_tokens) == (batches.report.truncated, batches.report.lost_tokens)
    packed, _ = prepare_batches(settings.model_copy(update={"packing": "bfd"}), plain_tokenizer, batch_size=4, seed=3)
    assert said.packed_rows == packed.report.packed_rows
    assert said.packing_efficiency == pytest.approx(packed.report.packing_efficiency)


def test_it_says_what_a_run_on_pairs_then_shows(write, plain_tokenizer):
    rows = [{**row, "chosen": row["completion"] + "a", "rejected": "b" * (i % 50 + 1)} for i, row in enumerate(ROWS)]
    settings = PreferenceDataConfig(source=write(rows), max_length=64)
    found = gather_statistics(settings, plain_tokenizer)
    sides = [[len(row["prompt"] + row[side]) + 1 for side in ("chosen", "rejected")] for row in rows]
    assert found.lengths.tolist() == [length for two in sides for length in two]
    said = at_length(found.lengths, 64, batch_size=4, seed=3, sides=2)
    batches, _ = prepare_batches(settings, plain_tokenizer, batch_size=4, seed=3)
    epoch = batches.take(batches.batches_per_epoch)
    assert said.lost_tokens == batches.report.lost_tokens
    assert said.rows_cut == sum(length > 64 for two in sides for length in two)
    assert said.padding == pytest.approx(1 - batches.report.tokens / sum(batch.num_tokens for batch in epoch))
    packed, _ = prepare_batches(settings.model_copy(update={"packing": "bfd"}), plain_tokenizer, 4, seed=3)
    assert said.packed_rows == packed.report.packed_rows
    assert said.packing_efficiency == pytest.approx(packed.report.packing_efficiency)


@pytest.mark.parametrize("lengths", [[5], [1, 2, 3], [10] * 500 + [9000], list(range(1, 3000)), [63, 64, 65] * 9])
def test_every_sequence_is_in_one_bin(lengths: list[int]):
    bins = histogram(np.array(lengths))
    assert len(bins) <= 17
    assert bins[0][0] == 0
    for (_, last, _), (first, _, _) in pairwise(bins):
        assert first == last + 1
    for first, last, count in bins:
        assert count == sum(first <= length and (last is None or length <= last) for length in lengths)
    assert sum(count for _, _, count in bins) == len(lengths)


def test_quantiles_are_lengths_that_occur():
    assert quantiles(np.array([1, 2, 3, 100]), [0.5, 0.51, 1.0]) == [2, 3, 100]
