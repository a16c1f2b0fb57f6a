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
        ([[0, 1], [1, 0]], ["a", "b"], [[0, 1], [1, 0]]),
        ([[0, 1], [1, 0]], None, [[0, 1], [1, 0]]),
        ([[1, 0], [1, 1]], ["a", "b"], [[1, 0], [1, 1]]),
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
    assert batches.layout.columns.per_document("row_values").tolist() == targets


@pytest.mark.parametrize(
    ("lists", "names", "found"),
    [
        ([[1, 0, 1], [0, 1]], NAMES, r"rows.jsonl, line 1: `labels` is \[1, 0, 1\]"),
        ([[1, 0, 1], [0, 2]], NAMES, r"rows.jsonl, line 1: `labels` is \[1, 0, 1\]"),
        ([[1, 0]] * 16 + [[1]], ["a", "b"], r"rows.jsonl, line 17: `labels` is \[1\]"),
        ([[0, 1, 2], [1, 0, 1]], NAMES, r"rows.jsonl, line 2: `labels` is \[1, 0, 1\]"),
        ([[1, 0, 1, 0]], NAMES, r"line 1: `labels` is \[1, 0, 1, 0\]"),
        ([[True], [False, True]], None, r"line 1: `labels` is \[True\]"),
        ([[0.0], [0, 1]], ["a", "b"], r"line 1: `labels` is \[0.0\]"),
    ],
)
def test_lists_of_0_and_1_without_an_entry_for_each_label_are_refused(
    lists, names, found, tmp_path, plain_tokenizer
) -> None:
    with pytest.raises(ValueError, match=rf"{found}.*expected either a 0 or 1 for every label in all rows"):
        prepare_batches(with_labels(config_of(tmp_path, lists, labels=names)), plain_tokenizer, 1, seed=0)


def test_several_labels_are_detected_from_the_rows(tmp_path, plain_tokenizer) -> None:
    config = with_labels(config_of(tmp_path, [["money"], []], multi_label="auto", labels=NAMES))
    assert config.multi_label is True
    batches, _ = prepare_batches(config, plain_tokenizer, 1, seed=0)
    assert batches.layout.columns.per_document("row_values").tolist() == [[0, 1, 0], [0, 0, 0]]
    rows = (tmp_path / "rows.jsonl").read_text().replace('{"text"', '{"label": "time", "text"')
    (tmp_path / "rows.jsonl").write_text(rows)
    assert with_labels(config.model_copy(update={"multi_label": "auto"})).multi_label is False  # `label` is read


def test_each_source_is_read_by_its_own_rows(tmp_path, plain_tokenizer) -> None:
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"text": "t", "labels": [0, 2]}))
    config = config_of(tmp_path, [[1, 0, 1], [0, 0, 0]], validation_source=f"{tmp_path}/held_out.jsonl")
    batches, held_out = prepare_batches(with_labels(config), plain_tokenizer, 1, seed=0)
    assert held_out is not None
    assert (
        batches.layout.columns.per_document("row_values").tolist(),
        held_out.layout.columns.per_document("row_values").tolist(),
    ) == ([[1, 0, 1], [0, 0, 0]], [[1, 0, 1]])


def read_both(tmp_path, tokenizer, trained, held_out, **settings):
    """The targets of held-out labels, beside training rows with other labels. A list is one row's `labels`."""
    for name, labels in (("rows", trained), ("held_out", held_out)):
        field = "labels" if isinstance(labels[0], list) else "label"
        lines = [json.dumps({"text": f"t{i}", field: one}) for i, one in enumerate(labels)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    given = {
        "source": f"{tmp_path}/rows.jsonl",
        "validation_source": f"{tmp_path}/held_out.jsonl",
        "cache_dir": tmp_path / "cache",
    }
    config = ClassificationDataConfig.model_validate({**given, **settings})
    _, batches = prepare_batches(with_labels(config), tokenizer, 1, seed=0)
    values = batches.layout.columns.per_document("row_values")
    return (values if isinstance(trained[0], list) else values[:, 0]).tolist()


STARS, WORDS = [1, 2, 3, 4, 5], ["World", "Sports", "Business"]
NO_ORDER = (
    "data.labels is null, so the labels of the training rows are in alphabetical order: Business, Sports, World. Set "
    "data.labels"
)


@pytest.mark.first(8)
@pytest.mark.parametrize(
    ("trained", "held_out", "settings", "expected"),
    [
        (STARS, [1, 5, "3"], {}, [0, 4, 2]),
        (STARS, [0], {}, "the label is '0'; expected one of 1, 2, 3, 4, 5"),
        (STARS, [1, 0], {"labels": ["1", "2", "3", "4", "5"]}, "the label is '0'; expected one of 1, 2, 3, 4, 5"),
        (["1.0", "2.0"], [1], {}, "the label is '1'; expected one of 1.0, 2.0"),
        (["-1", "1"], [0], {}, "the label is '0'; expected one of 1, -1"),
        (WORDS, ["Sports"], {}, [1]),
        (WORDS, [1], {}, f"the label is '1', and {NO_ORDER}"),
        (WORDS, ["1"], {}, f"the label is '1', and {NO_ORDER}"),
        (WORDS, [1, "World", "2"], {"labels": WORDS}, [1, 0, 2]),
        (WORDS, [3], {"labels": WORDS}, "the label is '3'; expected one of World, Sports, Business"),
        ([0, 1], [True, False], {}, "the label is 'True'; expected one of 0, 1"),
        ([True, False], [1], {}, r"the label is '1', and data.labels is null, .*: False, True"),
        ([0, "World"], [0], {}, r"several kinds: 0 \(a number\), 'World' \(a name\)"),
        ([True, 1], [1], {}, r"several kinds: True \(a boolean\), 1 \(a number\)"),
        ([0, "World"], [1], {"labels": WORDS}, [1]),
        (["404", "lost"], ["404"], {}, [0]),
        ([WORDS, ["World"]], [[0, 1, 1]], {}, f"a 0 or 1 for each label, and {NO_ORDER}"),
        ([WORDS, ["World"]], [[0, 2]], {}, f"the label is '0', and {NO_ORDER}"),
        ([[0], [1], [0, 1]], [[0, 1], [1, 0]], {}, [[1, 1], [1, 1]]),  # indices, as in training
        ([[0, 1], [1, 1]], [[0, 1], [1, 0]], {}, [[0, 1], [1, 0]]),
        ([[0], [1], [0, 1]], [[0, 1], [1, 1]], {}, [[0, 1], [1, 1]]),  # [1, 1] cannot be indices
    ],
)  # fmt: skip
def test_held_out_labels_of_another_convention(
    trained, held_out, settings, expected, tmp_path, plain_tokenizer
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read_both(tmp_path, plain_tokenizer, trained, held_out, **settings)
    else:
        assert read_both(tmp_path, plain_tokenizer, trained, held_out, **settings) == expected
