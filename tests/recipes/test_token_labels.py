"""classify with labels per token on the embedded model: a loop by hand, transformers and peft with equal logits, and
`leanft score`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForTokenClassification, AutoTokenizer
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
from typer.testing import CliRunner

from lean_ft import load_model, load_tokenizer
from lean_ft.cli.main import app
from lean_ft.export import export_folder
from lean_ft.frozen.scoring import open_reward_model, score_rows
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import label_fields
from lean_ft.models.config_json import SCORE_ARCHITECTURES, WITHOUT_TOKEN_LABELS, score_config
from tests.recipes.cases import TINY
from tests.recipes.conftest import Train, update

RECIPE = "classify"
NAMES = ["B-NAME", "I-NAME", "O"]
WORDS = {"Anna Berg": ["B-NAME", "I-NAME"], "the river": ["O", "O"], "Elbe": ["B-NAME"], "sees": ["O"], ".": ["O"]}


def rows_of(*numbers: int) -> list[dict[str, Any]]:
    rows = []
    for number in numbers:
        some = [list(WORDS)[(number * 7 + k * k) % len(WORDS)] for k in range(3 + number % 4)]
        labels = [label for one in some for label in WORDS[one]]
        rows.append({"tokens": " ".join(some).split(), "ner_tags": labels})
    return rows


@pytest.fixture
def own_settings(tmp_path: Path) -> tuple[str, ...]:
    for name, rows in {"rows": rows_of(*range(24)), "held_out": rows_of(*range(30, 36))}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ("data.source=TMP/rows.jsonl", "data.validation_source=TMP/held_out.jsonl", "data.labels_per=token")
    return (*TINY, *settings, "data.max_length=96", "batch_size=4", "schedule.name=constant", "optimizer.lr=1e-3")


def tagger() -> Any:
    """transformers' model on the embedded model, with an output layer of zeros."""
    named = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    model = AutoModelForTokenClassification.from_pretrained(resolve_model_path("tiny"), **named, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    return model.eval()  # without the dropout before its output layer, which is 0.1 in training


@cache
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model_path("tiny"))


def encoded(row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels of a row, (1, T), as transformers' examples make them."""
    found = theirs()(" ".join(row["tokens"]), return_offsets_mapping=True)
    labels, start = torch.full((1, len(found["input_ids"])), -100), 0
    for word, tag in zip(row["tokens"], row["ner_tags"], strict=True):
        end = start + len(word)
        first = next(i for i, (a, b) in enumerate(found["offset_mapping"]) if a < end and b > start)
        labels[0, first] = NAMES.index(tag)
        start = end + 1
    return torch.tensor([found["input_ids"]]), labels


@torch.no_grad()
def probabilities_of(model: Any, rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [model(ids).logits[labels != -100].softmax(1) for ids, labels in map(encoded, rows)]


def check_scores(path: Path, source: Path, model: Any) -> None:
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    expected = probabilities_of(model, rows)
    assert torch.cat(expected).std(0).max() > 0.01
    for row, one in zip(score_rows(*open_reward_model(path, "cpu", "float32"), str(source)), expected, strict=True):
        found = torch.tensor([row["probabilities"][name] for name in NAMES]).T
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-5)
        assert row["predictions"] == [NAMES[i] for i in one.argmax(1)]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        ("optimizer.name=sgd", "optimizer.lr=0.1", "batch_size=1", "gradient_accumulation_steps=2"),
        ("data.packing=padding_free", "epochs=2"),
        ("data.packing=bfd", "batch_size=24", "epochs=10", "memory.activation_checkpointing=full"),
        ("loss.class_weights={O: 0.5}", "batch_size=8", "epochs=4"),
    ],
    ids=str,
)
def test_ten_steps_are_those_of_a_loop_by_hand(train: Train, settings: tuple[str, ...], tmp_path: Path) -> None:
    lines = train(*settings, "max_steps=10", "data.shuffle=false", "save_every=10")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    model = tagger()
    if settings[0] == "optimizer.name=sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    weights = torch.tensor([1.0, 1.0, 0.5]) if "class_weights" in str(settings) else None
    size = {"bfd": 24, "sgd": 2, "O: 0.5}": 8}.get(settings[0].rpartition("=")[2].rpartition("{")[2], 4)
    losses = []
    for step in range(10):
        some = [rows[(step * size + i) % len(rows)] for i in range(size)]
        given = [encoded(row) for row in some]
        logits = torch.cat([model(ids).logits[0] for ids, _ in given])
        labels = torch.cat([labels[0] for _, labels in given])
        terms = torch.nn.functional.cross_entropy(logits, labels, weights, ignore_index=-100, reduction="sum")
        if weights is None and step == 0:  # what transformers computes for one row
            torch.testing.assert_close(
                model(given[0][0], labels=given[0][1]).loss,
                torch.nn.functional.cross_entropy(model(given[0][0]).logits[0], given[0][1][0]),
            )
        losses.append(update(optimizer, terms / (labels != -100).sum()))
    train_lines = [line["loss"] for line in lines if "loss" in line]
    assert train_lines == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert losses[-1] < losses[0]
    folder = tmp_path / "run" / "step_00000010"
    opened = AutoModelForTokenClassification.from_pretrained(folder)
    assert opened.config.architectures == ["LlamaForTokenClassification"]
    assert opened.config.id2label == dict(enumerate(NAMES))
    torch.testing.assert_close(opened.score.bias, model.score.bias, rtol=1e-3, atol=1e-5)
    check_scores(tmp_path / "run", tmp_path / "held_out.jsonl", opened)
    (held_out,) = [line for line in lines if "eval_loss" in line][-1:]
    assert {"eval_accuracy", "eval_macro_f1", "eval_entity_precision", "eval_entity_f1"} <= held_out.keys()


@pytest.mark.long
def test_peft_opens_an_adapter_and_a_merged_model_labels_tokens(train: Train, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    train("lora.rank=4", "max_steps=3", "optimizer.lr=1e-2")
    folder = tmp_path / "run" / "step_00000003"
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "TOKEN_CLS"
    check_scores(folder, tmp_path / "held_out.jsonl", peft.PeftModel.from_pretrained(tagger(), folder).eval())
    export_folder(folder, tmp_path / "merged", "float32", merge=True)
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    check_scores(folder, tmp_path / "held_out.jsonl", merged)


@pytest.mark.long
def test_a_saved_model_trains_on_and_other_labels_are_refused(train: Train, tmp_path: Path) -> None:
    first = train("max_steps=4", output="whole")
    folder = tmp_path / "whole" / "step_00000004"
    again = train(f"model.path={folder}", "max_steps=1", "optimizer.lr=0", output="again")
    assert again[0]["loss"] < 0.9 * first[0]["loss"]
    with pytest.raises(ValueError, match="the model labels tokens, and this run labels texts"):
        load_model(folder, scores=label_fields(NAMES, is_multi=False))
    with pytest.raises(ValueError, match=r"gives scores and no text"):
        load_model(folder)


def test_rows_of_texts_and_steps_are_scored(tmp_path: Path) -> None:
    names = ["B-X", "I-X", "O"]
    model = load_model("tiny", scores=label_fields(names, is_multi=False, per_token=True))
    assert model.score is not None
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.constant_(model.score.bias, 0.0)
    with torch.no_grad():
        model.score.bias[0] = 5.0
    (tmp_path / "rows.jsonl").write_text('{"text": "a bc, d", "id": 3}\n')
    (row,) = score_rows(model, load_tokenizer("tiny"), str(tmp_path / "rows.jsonl"))
    assert (row["id"], row["predictions"], row["words"]) == (3, ["B-X"] * 4, [(0, 1), (2, 4), (4, 5), (6, 7)])
    assert row["predicted_spans"][1] == {"start": 2, "end": 4, "label": "X"}
    assert row["probabilities"]["B-X"] == pytest.approx([float(torch.tensor([5.0, 0, 0]).softmax(0)[0])] * 4)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What?", "completions": ["a", "b"]}\n')
    (row,) = score_rows(model, load_tokenizer("tiny"), str(tmp_path / "rows.jsonl"))
    assert len(row["probabilities"]["O"]) == 2


def test_families_whose_token_classifiers_lean_ft_writes_are_those_with_transformers_generic_class() -> None:
    known = {*MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()}
    for family, architecture in SCORE_ARCHITECTURES.items():
        name = architecture.replace("Sequence", "Token")
        of_transformers = getattr(transformers, name, None) if name in known else None
        is_generic = of_transformers is not None and issubclass(of_transformers, GenericForTokenClassification)
        assert is_generic == (family not in WITHOUT_TOKEN_LABELS), family
    with pytest.raises(ValueError, match="no token classification model of that family"):
        score_config({"model_type": "olmo2"}, "config.json", label_fields(NAMES, is_multi=False, per_token=True))


@pytest.mark.long
def test_the_command_scores_a_run(train: Train, tmp_path: Path) -> None:
    train("max_steps=1")
    result = CliRunner().invoke(app, ["score", str(tmp_path / "run"), str(tmp_path / "held_out.jsonl")])
    assert result.exit_code == 0, result.output
