"""Labels of texts: names, indices and one-hot lists."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_ft.data.classification import with_labels
from lean_ft.data.prepare import prepare_batches
from lean_ft.settings import ClassificationDataConfig

NAMES = ["damage", "money", "time"]


def config_of(tmp_path: Path, lists: list[Any], **settings: Any) -> ClassificationDataConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"t{i}", "labels": one}) + "\n" for i, one in enumerate(lists)))
    return ClassificationDataConfig.model_validate(
        {"source": str(file), "multi_label": True, "cache_dir": tmp_path / "cache", **settings}
    )


@pytest.mark.parametrize(
    ("lists", "names", "targets"),
    [
        ([[1, 0, 1], [0, 1, 0], [0, 0, 0]], NAMES, [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        ([[1, 0, 1], [0, 1, 0], [0, 0, 0]], None, [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        ([[1.0, 0.0], [0.0, 1.0]], ["a", "b"], [[1, 0], [0, 1]]),
        ([[True, False], [False, True]], None, [[1, 0], [0, 1]]),
        (["[1, 0, 1]", "[0, 1, 0]"], NAMES, [[1, 0, 1], [0, 1, 0]]),  # as in CSV
        ([[1, 0], [1, 1]], ["a", "b"], [[1, 0], [1, 1]]),  # no list of indices repeats one
        ([[0], [1], [0, 1]], ["a", "b"], [[1, 0], [0, 1], [1, 1]]),
        ([[0, 1], [2], []], NAMES, [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
        ([[0], [1]], None, [[1, 0], [0, 1]]),
        ([["0", "1"], ["1"]], None, [[1, 1], [0, 1]]),
        ([["money", "time"], ["damage"]], NAMES, [[0, 1, 1], [1, 0, 0]]),
    ],
)
def test_lists_of_labels(lists, names, targets, tmp_path, plain_tokenizer) -> None:
    config = with_labels(config_of(tmp_path, lists, labels=names))
    batches, _ = prepare_batches(config, plain_tokenizer, 1, seed=0)
    assert batches.layout.values.tolist() == targets


@pytest.mark.parametrize(
    ("lists", "names", "found"),
    [
        ([[0, 1], [1, 0]], ["a", "b"], r"only hold 0 and 1 \(lengths 2 for 2 labels\)"),
        ([[0, 1], [1, 0]], None, r"only hold 0 and 1 \(lengths 2 for 2 labels\)"),
        ([[1, 0, 1], [0, 1]], NAMES, r"repeat 0 or 1.*\(lengths 2, 3 for 3 labels\)"),
        ([[1, 0, 1], [0, 1, 2]], NAMES, "repeat 0 or 1"),
    ],
)
def test_ambiguous_lists_are_refused_until_one_hot_decides(lists, names, found, tmp_path, plain_tokenizer) -> None:
    with pytest.raises(
        ValueError, match=rf"`labels` {found}.*data.one_hot=true .*data.one_hot=false if they hold the indices"
    ):
        with_labels(config_of(tmp_path, lists, labels=names))
    if max(map(max, lists)) == 1 and {len(one) for one in lists} == {2}:
        for one_hot, targets in ((True, [[0, 1], [1, 0]]), (False, [[1, 1], [1, 1]])):
            config = with_labels(config_of(tmp_path, lists, labels=names, one_hot=one_hot))
            assert prepare_batches(config, plain_tokenizer, 1, seed=0)[0].layout.values.tolist() == targets


def test_held_out_rows_are_read_as_the_training_rows(tmp_path, plain_tokenizer) -> None:
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"text": "t", "labels": [0, 2]}))
    config = config_of(tmp_path, [[1, 0, 1], [0, 0, 0]], validation_source=f"{tmp_path}/held_out.jsonl")
    with pytest.raises(
        ValueError, match=r"held_out.jsonl, line 1: `labels` is \[0, 2\]; expected 0 or 1 for each of 3 labels"
    ):
        prepare_batches(with_labels(config), plain_tokenizer, 1, seed=0)
    with pytest.raises(
        ValueError, match=r"rows.jsonl, line 1: `labels` is \[1, 0, 1, 0\]; expected 0 or 1 for each of 3 labels"
    ):
        with_labels(config_of(tmp_path, [[1, 0, 1, 0]], labels=NAMES))
    with pytest.raises(ValueError, match="one_hot=true applies to lists of labels"):
        config_of(tmp_path, [], multi_label=False, one_hot=True)
