"""The source of every row and label of held-out batches. Each source writes its texts with a letter of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lean_ft.data import EvalBatches, prepare_batches
from lean_ft.data.by_source import means_by_source
from lean_ft.settings import DataSource, PreferenceDataConfig, SFTDataConfig, UnpairedDataConfig

LETTERS = "abc"
NUM_ROWS = (11, 7, 0)  # the last source has only rows that are dropped


@pytest.fixture
def sources(write: Callable[..., str]) -> Callable[..., list[DataSource]]:
    """Write a file for each source: rows are made from a letter and a length."""

    def make(row: Callable[[str, int], dict[str, Any]], **of_all: Any) -> list[DataSource]:
        lengths = np.random.default_rng(0)
        listed = []
        for letter, number in zip(LETTERS, NUM_ROWS, strict=True):
            rows = [row(letter, int(lengths.integers(2, 40))) for _ in range(number)]
            listed.append(DataSource(path=write(rows or [row("", 0)], f"{letter}.jsonl"), **of_all))
        return listed

    return make


def text(letter: str, length: int) -> dict[str, Any]:
    return {"text": letter * length}


def letters_of(ids: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([one]) for one in ids]


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("packing", ["none", "bfd", "bfd_split", "wrapped", "padding_free"])
def test_each_label_has_the_source_that_wrote_it(sources, plain_tokenizer, packing: str, num_parts: int) -> None:
    listed = sources(text)
    lengths = {"max_length": 16, "packing": packing}
    data = SFTDataConfig(source=listed[0].path, validation_source=listed, **lengths)
    batches, held_out = prepare_batches(data, plain_tokenizer, 3, seed=0)
    assert held_out is not None
    assert all(batch.sources is None for batch in batches.take(1))
    counts = np.zeros(3, dtype=int)
    for whole in held_out:
        if whole.labels.shape[1] % num_parts:
            continue
        for batch in (whole.part_of_rows(i, num_parts) for i in range(num_parts)):
            assert batch.sources is not None
            assert batch.sources.names == ("a", "b", "c")
            is_label = batch.labels.flatten() != -100
            found = batch.sources.of_positions.flatten()
            assert (found[~is_label] == -1).all()
            labels = letters_of(batch.labels.flatten()[is_label].tolist(), plain_tokenizer)
            inputs = letters_of(batch.input_ids.flatten()[is_label].tolist(), plain_tokenizer)
            # The end of a text is predicted by its last letter.
            own = [
                LETTERS.index(ours if ours in LETTERS else before) for ours, before in zip(labels, inputs, strict=True)
            ]
            assert found[is_label].tolist() == own
            counts += np.bincount(own, minlength=3)
    assert counts[:2].all() or num_parts == 2
    column = held_out.layout.columns.sources
    assert column is not None
    assert column.num_rows(held_out.layout.columns, 1) == {"a": 11, "b": 7, "c": 0}


def pair(letter: str, length: int) -> dict[str, Any]:
    return {"prompt": letter * length, "chosen": letter + "x", "rejected": letter + "yz" if letter else "x"}


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("packing", ["none", "bfd", "padding_free"])
def test_each_pair_has_its_source(sources, plain_tokenizer, packing: str, share_prompts: bool) -> None:
    listed = sources(pair)
    data = PreferenceDataConfig(source=listed[0].path, validation_source=listed, max_length=48, packing=packing)
    _, held_out = prepare_batches(data, plain_tokenizer, 3, seed=0, share_prompts=share_prompts)
    assert held_out is not None
    num_pairs = 0
    for batch in held_out:
        starts = batch.answer_tokens.flatten().cumsum(0) - batch.answer_tokens.flatten()
        firsts = letters_of(batch.label[starts[::2]].tolist(), plain_tokenizer)
        assert batch.sources.of_rows.tolist() == [LETTERS.index(letter) for letter in firsts]
        assert batch.without_targets().sources.of_rows.shape == (0,)
        num_pairs += batch.num_pairs
    assert num_pairs == sum(NUM_ROWS)


def test_a_pair_is_two_completions_of_one_source(sources, plain_tokenizer) -> None:
    listed = sources(pair)
    data = UnpairedDataConfig(source=listed[0].path, validation_source=listed, max_length=48)
    _, held_out = prepare_batches(data, plain_tokenizer, 5, seed=0)
    assert held_out is not None
    found = np.concatenate([batch.sources.of_rows for batch in held_out])
    assert np.bincount(found).tolist() == [22, 14]
    assert all(batch.mismatched.sources is None for batch in held_out)  # pyright: ignore[reportAttributeAccessIssue]


def test_rows_that_are_drawn_keep_their_sources(sources, plain_tokenizer) -> None:
    one, two, _ = sources(text)
    weighted = [one.model_copy(update={"weight": 0.5}), two.model_copy(update={"weight": 2.0})]
    data = SFTDataConfig(source=weighted, validation_fraction=0.3, max_length=64)
    batches, held_out = prepare_batches(data, plain_tokenizer, 4, seed=1)
    assert held_out is not None
    for layout in (batches.layout, held_out.layout):
        column, columns = layout.columns.sources, layout.columns
        assert column is not None
        own = [LETTERS.index(letters_of(columns[i].ids[:1].tolist(), plain_tokenizer)[0]) for i in range(len(columns))]
        assert column.of_documents(columns).tolist() == own
    # `leanft evaluate` reads training rows as held-out ones.
    rows = EvalBatches(batches.layout, batches.report)
    assert all(batch.sources is not None for batch in rows)


def test_equal_names_join_sources_and_one_name_is_none(sources, plain_tokenizer) -> None:
    listed = sources(text)
    joined = [one.model_copy(update={"name": name}) for one, name in zip(listed, "xyx", strict=True)]
    data = SFTDataConfig(source=listed[0].path, validation_source=joined, max_length=64)
    _, held_out = prepare_batches(data, plain_tokenizer, 4, seed=1)
    assert held_out is not None
    column = held_out.layout.columns.sources
    assert column is not None
    assert column.num_rows(held_out.layout.columns, 1) == {"x": 11, "y": 7}
    alone = [one.model_copy(update={"name": "x"}) for one in listed]
    _, held_out = prepare_batches(data.model_copy(update={"validation_source": alone}), plain_tokenizer, 4, seed=1)
    assert held_out is not None
    assert held_out[0].sources is None


def test_means_leave_out_values_that_are_missing() -> None:
    assert means_by_source("r", ["a", "b", "a", "b"], [1.0, None, 2.0, None]) == {"r/a": 1.5}
    assert means_by_source("r", [None, None], [1.0, 2.0]) == {}
