"""Labels of tokens, compared with transformers' offsets and with the rows of TRL's trainer of process rewards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from lean_ft.data import Batches, EvalBatches, prepare_batches
from lean_ft.data.classification import label_weights, with_labels
from lean_ft.data.keys import settings_of_batches
from lean_ft.data.token_labels import LABEL, first_tokens, spans_of
from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings import ClassificationDataConfig
from lean_ft.tokenizers import load_tokenizer

WORDS = ["Anna", "unbelievably", "lives", "in", "New", "York", "éé", "(NY)", "!"]
TAGS = ["B-PER", "O", "O", "O", "B-LOC", "I-LOC", "B-LOC", "O", "O"]
TEXT = "In New York-based Łódź, anti-Elbe."
SPANS = [
    {"start": 3, "end": 11, "label": "LOC"},
    {"start": 18, "end": 22, "label": "LOC"},
    {"start": 26, "end": 33, "label": "X"},
]


def config_of(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> ClassificationDataConfig:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"source": str(file), "labels_per": "token", "cache_dir": tmp_path / "cache", "shuffle": False}
    return ClassificationDataConfig.model_validate(given | settings)


def prepared(tmp_path: Path, *rows: dict[str, Any], batch_size: int = 1, **settings: Any) -> tuple[list[str], Batches]:
    config = with_labels(config_of(tmp_path, *rows, **settings))
    batches, _ = prepare_batches(config, load_tokenizer("tiny"), batch_size, seed=0)
    return config.labels or [], batches


def labels_of(batches: Batches | EvalBatches, names: list[str]) -> list[list[tuple[int, str]]]:
    """(id, label) of each labeled token of each row."""
    found = []
    for document in batches.layout.columns:
        labels = document.per_token[LABEL]
        found.append([(int(document.ids[i]), names[int(labels[i])]) for i in np.flatnonzero(labels != -100)])
    return found


def expected_of(text: str, labels: list[tuple[int, int, str]]) -> tuple[list[int], list[tuple[int, str]]]:
    """All ids, and the id of the first token of each (start, end, label), by transformers. A word without a token of
    its own has none."""
    encoded = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))(text, return_offsets_mapping=True)
    first = dict[int, str]()
    for start, end, label in labels:
        over = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > start]
        first.setdefault(over[0], label)
    return encoded["input_ids"], [(encoded["input_ids"][i], label) for i, label in first.items()]


def test_the_first_token_of_a_word_has_its_label(tmp_path: Path) -> None:
    starts = [sum(len(word) + 1 for word in WORDS[:i]) for i in range(len(WORDS))]
    places = [(start, start + len(word), tag) for start, word, tag in zip(starts, WORDS, TAGS, strict=True)]
    ids, expected = expected_of(" ".join(WORDS), places)
    for field, tags, more in (
        ("ner_tags", TAGS, {}),
        ("labels", [sorted({*TAGS}).index(tag) for tag in TAGS], {"labels": sorted({*TAGS})}),
        ("tags", json.dumps(TAGS), {}),  # as in CSV
    ):
        names, batches = prepared(tmp_path, {"tokens": WORDS, field: tags, "id": "7"}, **more)
        assert names == sorted({*TAGS})
        assert batches.layout.columns[0].ids.tolist() == ids
        assert labels_of(batches, names) == [expected]
    # null and -100 are no labels, and `data.separator` joins words.
    tags = [None, -100, *TAGS[2:]]
    names, batches = prepared(tmp_path, {"tokens": WORDS, "labels": tags}, separator="")
    assert load_tokenizer("tiny").decode(batches.layout.columns[0].ids.tolist(), skip_special_tokens=True) == "".join(
        WORDS
    )
    assert [label for _, label in labels_of(batches, names)[0]][:1] == ["O"]


def test_spans_become_b_i_and_o(tmp_path: Path) -> None:
    words = [(0, 2, "O"), (3, 6, "B-LOC"), (7, 11, "I-LOC"), (11, 12, "O"), (12, 17, "O"), (18, 22, "B-LOC")]
    words += [(22, 23, "O"), (24, 26, "O"), (26, 28, "B-X"), (28, 29, "I-X"), (29, 33, "I-X"), (33, 34, "O")]  # an|ti
    ids, expected = expected_of(TEXT, words)
    names, batches = prepared(tmp_path, {"text": TEXT, "spans": SPANS}, {"text": "Ha", "spans": []})
    assert names == ["B-LOC", "B-X", "I-LOC", "I-X", "O"]
    assert batches.layout.columns[0].ids.tolist() == ids
    found, other = labels_of(batches, names)
    assert found == expected and [label for _, label in other] == ["O"]
    labels = [label for _, _, label in words]
    assert spans_of([word[:2] for word in words], labels) == SPANS


def test_first_tokens_with_shared_and_absent_tokens() -> None:
    """A token covers two words, a word has none, and a token without characters belongs to the next character."""
    starts, ends = np.array([0, 0, 2, 4, 6]), np.array([0, 2, 4, 6, 9])
    words = [(0, 2), (2, 3), (3, 4), (4, 6), (7, 8), (9, 10)]
    assert first_tokens(starts, ends, words).tolist() == [0, 2, -1, 3, 4, -1]


def test_steps_are_tokenized_as_trl_does(tmp_path: Path) -> None:
    row = {"prompt": "What is 2 + 3?", "completions": ["It is 5.", "So the\nanswer is 6"], "labels": [True, False]}
    theirs = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    for separator in (None, " ки", "\n\n"):
        # TRL 0.29: PRMTrainer.tokenize_row
        end = theirs.encode("\n" if separator is None else separator, add_special_tokens=False)
        steps = [theirs(step, add_special_tokens=False)["input_ids"] + end for step in row["completions"]]
        prompt = [theirs.bos_token_id, *theirs(row["prompt"], add_special_tokens=False)["input_ids"]]
        labels = [-100] * len(prompt)
        for step, label in zip(steps, row["labels"], strict=True):
            labels += [-100] * (len(step) - 1) + [int(label)]
        names, batches = prepared(tmp_path, row, separator=separator)
        assert names == ["false", "true"]
        document = batches.layout.columns[0]
        assert document.ids.tolist() == [*prompt, *steps[0], *steps[1]]
        assert document.per_token[LABEL].tolist() == labels
    _, batches = prepared(tmp_path, row | {"labels": [0.25, 1]})
    assert batches.take(1)[0].built.targets.tolist() == [0.25, 1.0]


@pytest.mark.parametrize("packing", ["none", "bfd", "padding_free"])
def test_labels_follow_their_tokens_into_batches_and_are_cut_with_them(packing: str, tmp_path: Path) -> None:
    rows = [{"tokens": WORDS[: 2 + i % 5], "labels": TAGS[: 2 + i % 5]} for i in range(7)]
    names, batches = prepared(tmp_path, *rows, batch_size=7 if packing != "bfd" else 2, packing=packing, max_length=64)
    expected = [pair for row in labels_of(batches, names) for pair in row]
    found, count = [], 0
    for batch in batches.take(batches.batches_per_epoch):
        count += batch.num_texts  # without building the batch
        ids = batch.input_ids.flatten()[batch.last].tolist()
        found += [(id, names[target]) for id, target in zip(ids, batch.targets.tolist(), strict=True)]
        assert len(set(batch.text_of.tolist())) <= 7 and batch.text_of.diff().min() >= 0
        assert batch.num_targets == len(batch.targets) and LABEL not in batch.inputs
    assert sorted(found) == sorted(expected) and count == len(expected) == sum(len(row["labels"]) for row in rows)
    weights = label_weights("balanced", batches, names)
    counts = [sum(row["labels"].count(name) for row in rows) for name in names]
    assert weights == pytest.approx([sum(counts) / len(counts) / n for n in counts])

    _, cut = prepared(tmp_path, *rows, packing="none", max_length=8)
    lost = len(expected) - sum(map(len, labels_of(cut, names)))
    assert lost > 0 and f"{lost} labels lost, because" in str(cut.report)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": WORDS, "labels": TAGS[1:]}, "line 2: `labels` is 8 labels, and `tokens` has 9 words"),
        ({"tokens": ["a"], "labels": "O"}, "`labels` is a string"),
        ({"tokens": ["a", " "], "labels": ["O", "O"]}, "word 2 of `tokens` is ' '"),
        ({"tokens": "a b", "labels": ["O", "O"]}, "`tokens` is a string"),
        ({"tokens": ["a"], "labels": ["B-LOK"]}, "the label is 'B-LOK'; expected one of .* Did you mean 'B-LOC'"),
        ({"tokens": ["a"], "labels": [0.5]}, "the label of a word is a number"),
        ({"tokens": ["a"], "tagz": ["O"]}, "no field `labels` or `ner_tags` or `tags` beside `tokens`"),
    ],
)
def test_bad_words(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{message.removeprefix('line 2: ')}"):
        prepared(tmp_path, {"tokens": WORDS, "labels": TAGS}, row, labels=sorted({*TAGS}))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([SPANS[0], {"start": 7, "end": 13, "label": "X"}], "the spans from 3 to 11 and from 7 to 13 overlap"),
        ([{"start": 3, "end": 99, "label": "X"}], "the span from 3 to 99 is not in the text of 34 characters"),
        ([{"start": 5, "end": 5, "label": "X"}], "the span from 5 to 5 is not in the text"),
        ([{"start": 2, "end": 3, "label": "X"}], "the span from 2 to 3 covers only spaces"),
        ([{"start": 0, "end": 2}], "a span is .* expected"),
    ],
)
def test_bad_spans(spans: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 1: {message}"):
        prepared(tmp_path, {"text": TEXT, "spans": spans})


def test_other_bad_rows_and_settings(tmp_path: Path) -> None:
    steps = {"prompt": "a", "completions": ["b", "c"]}
    with pytest.raises(ValueError, match=r"line 1: `labels` is 1 labels, and `completions` has 2 steps"):
        prepared(tmp_path, steps | {"labels": [True]})
    with pytest.raises(ValueError, match=r"line 1: the label of a step is 3; expected true or 1"):
        prepared(tmp_path, steps | {"labels": [True, 3]})
    with pytest.raises(ValueError, match="a step has 2 labels"):
        prepared(tmp_path, steps | {"labels": [True, False]}, labels=["a", "b", "c"])
    with pytest.raises(ValueError, match="no field `spans` beside `text`"):
        prepared(tmp_path, {"text": "a", "label": "b"})
    with pytest.raises(ValueError, match="a token has one label"):
        config_of(tmp_path, multi_label=True)
    _, batches = prepared(tmp_path, steps | {"labels": [1, 0]}, steps | {"labels": [1]}, on_bad_row="skip")
    assert batches.report.bad_rows == 1


def test_a_run_from_before_labels_per_token_is_the_same_run():
    config = ClassificationDataConfig(source="rows.jsonl")
    assert "labels_per" not in settings_of_batches(config)
    assert settings_of_batches(config.model_copy(update={"labels_per": "token"}))["labels_per"] == "token"
