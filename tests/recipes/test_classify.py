"""classify on the embedded model: an independent loop, transformers and peft with equal logits, and `leanft score`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from lean_ft import load_model, open_model
from lean_ft.cli.main import app
from lean_ft.data import prepare_batches
from lean_ft.data.classification import label_weights, with_labels
from lean_ft.export import export_folder
from lean_ft.frozen.scoring import open_reward_model, score_rows
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.losses import output_scores
from lean_ft.losses.classification import classification_losses
from lean_ft.models import stored_labels
from lean_ft.settings import ClassificationDataConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, presets, recipes
from lean_ft.tokenizers import load_tokenizer
from tests.recipes import cases
from tests.recipes.conftest import Train, config_of, update

RECIPE = "classify"
SETTINGS = cases.SETTINGS[RECIPE]
TOPICS = ["arithmetic", "comparison", "geography", "words"]
ROWS = [json.loads(line) for line in resolve_data_path("tiny/topics_validation.jsonl").read_text().splitlines()]
TEXTS = [row["text"] for row in ROWS]
SINGLE, MULTI = "single_label_classification", "multi_label_classification"


@pytest.fixture
def several(tmp_path: Path) -> str:
    """Rows with a list of labels: the topic, and whether the text is a question."""
    file = tmp_path / "several.jsonl"
    rows = [{"text": row["text"], "labels": [row["label"], *["question"] * ("?" in row["text"])]} for row in ROWS]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def classifier(names: list[str], problem: str) -> Any:
    """transformers' classifier on the embedded model, with an output layer of zeros."""
    settings = {"num_labels": len(names), "problem_type": problem, "dtype": torch.float32}
    model = AutoModelForSequenceClassification.from_pretrained(resolve_model_path("tiny"), **settings)
    torch.nn.init.zeros_(model.score.weight)
    return model


@torch.no_grad()
def logits_of(model: Any, folder: Path) -> torch.Tensor:
    """Of all texts, as one padded batch."""
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", padding=True)
    assert (tokens["attention_mask"] == 0).any()
    return model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits


@pytest.mark.first(1)
@pytest.mark.parametrize("is_multi", [False, True], ids=["single", "multi"])
@pytest.mark.parametrize(
    "settings",
    [("batch_size=2", "gradient_accumulation_steps=2"), (), ("data.packing=padding_free", "memory.tile_mlp=2")],
    ids=str,
)
def test_four_steps_are_those_of_a_loop_by_hand(train: Train, several: str, is_multi: bool, settings: Any) -> None:
    own = ("data.multi_label=true", f"data.source={several}") if is_multi else ()
    lines = train(*own, *settings, "max_steps=4")
    given = config_of("classify", *SETTINGS, *own, *settings)
    data, tokenizer = with_labels(given.data), load_tokenizer("tiny")
    names = [*TOPICS[:3], "question", "words"] if is_multi else TOPICS
    assert data.labels == names
    rows = [json.loads(line) for line in resolve_data_path(data.source).read_text().splitlines()]
    batches, _ = prepare_batches(data, tokenizer, given.batch_size, given.seed)
    model = classifier(names, MULTI if is_multi else SINGLE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(4):
        numbers = [i for batch in batches.take(given.gradient_accumulation_steps) for i in batch.documents.tolist()]
        terms = []
        for row in (rows[i] for i in numbers):
            label = torch.tensor(names.index(row["label"])) if not is_multi else torch.tensor([[float(name in row["labels"]) for name in names]])  # fmt: skip  # noqa: E501
            ids = tokenizer.encode(row["text"], add_special_tokens=True)
            terms.append(model(torch.tensor([ids]), labels=label).loss)
        loss = torch.stack(terms).mean()
        losses.append(update(optimizer, loss))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_transformers_opens_it_with_equal_logits_and_gradients(train: Train, tmp_path: Path) -> None:
    train("max_steps=3")
    folder = tmp_path / "run" / "step_00000003"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["problem_type"] == SINGLE
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.id2label == dict(enumerate(TOPICS)) and theirs.config.num_labels == 4
    scored = list(score_rows(*open_reward_model(tmp_path / "run", "cpu"), "tiny/topics_validation.jsonl"))
    expected = logits_of(theirs, folder).softmax(1)
    assert expected.std(0).max() > 0.01
    found = torch.tensor([[row["probabilities"][name] for name in TOPICS] for row in scored])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [row["prediction"] for row in scored] == [TOPICS[i] for i in expected.argmax(1)]

    config = with_labels(ClassificationDataConfig(source="tiny/topics_validation.jsonl", max_length=96))
    (batch,) = prepare_batches(config, load_tokenizer("tiny"), 8, 0)[0].take(1)
    ours = load_model(folder, scores=stored_labels(folder))
    scores, _ = output_scores(ours, batch.built, batch.last)
    classification_losses(scores, batch.targets).mean().backward()
    theirs(batch.input_ids, attention_mask=batch.is_token.long(), labels=batch.targets).loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)

    # It trains on with the same labels, and with no others.
    (first,) = train(f"model.path={folder}", "max_steps=1", "batch_size=80", "optimizer.lr=0", output="again")
    right = torch.tensor([TOPICS.index(row["label"]) for row in ROWS])
    assert first["loss"] == pytest.approx(float(torch.nn.functional.nll_loss(expected.log(), right)), abs=1e-4)
    with pytest.raises(ValueError, match="expected the labels of the data: words, geography"):
        train(f"model.path={folder}", "data.labels=[words,geography,comparison,arithmetic]", output="others")


@pytest.mark.long
def test_peft_opens_an_adapter_and_a_merged_model_has_the_labels(train: Train, several: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    train(f"data.source={several}", "data.multi_label=true", "lora.rank=4", "lora.lr_ratio=4", "max_steps=3")
    folder, names = tmp_path / "run" / "step_00000003", [*TOPICS[:3], "question", "words"]
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    expected = logits_of(peft.PeftModel.from_pretrained(classifier(names, MULTI), folder), folder).sigmoid()
    rows = list(score_rows(*open_reward_model(folder, "cpu", "float32"), several))
    found = torch.tensor([[row["probabilities"][name] for name in names] for row in rows])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [row["predictions"] for row in rows] == [
        [n for n in names if row["probabilities"][n] >= 0.5] for row in rows
    ]
    export_folder(folder, tmp_path / "merged", "float32", merge=True)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.problem_type == MULTI and [merged.config.id2label[i] for i in range(5)] == names
    torch.testing.assert_close(logits_of(merged, tmp_path / "merged").sigmoid(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_a_classifier_and_its_adapter_are_called_a_classifier(train: Train, tmp_path: Path) -> None:
    train("max_steps=1", output="whole")
    train("max_steps=1", "lora.rank=2", output="adapter")
    message = "a classifier of 4 labels.* gives scores and no text. Use `leanft score`"
    for folder in (tmp_path / "whole", tmp_path / "adapter"):
        for verb in (["generate", "prompt=hi"], ["evaluate", "data.source=tiny/validation.jsonl"], ["chat"]):
            result = CliRunner().invoke(app, ["run", verb[0], f"model.path={folder}", *verb[1:]])
            assert "a classifier of 4 labels" in f"{result.exception} {result.output}"
        with pytest.raises(ValueError, match=message):
            open_model(folder)
        assert open_reward_model(folder, "cpu")[0].config.num_scores == 4
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "whole" / "step_00000001")


def test_an_adapter_that_peft_made_of_a_classifier_opens(tmp_path: Path) -> None:
    """PEFT's files do not state the labels; transformers saves no problem_type either if none was given."""
    peft = pytest.importorskip("peft")
    base = AutoModelForSequenceClassification.from_pretrained(
        resolve_model_path("tiny"), num_labels=3, dtype=torch.float32
    )
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 30)[None]
    expected = model.eval()(ids).logits
    opened, tokenizer = open_reward_model(tmp_path / "adapter", "cpu", "float32")
    torch.testing.assert_close(opened(ids)[:, -1], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="adapts a classifier of 3 labels, which gives scores and no text"):
        open_model(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_model(tmp_path / "merged", scores=stored_labels(tmp_path / "merged"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a text"}')
    (row,) = score_rows(merged, tokenizer, str(tmp_path / "rows.jsonl"))
    assert list(row["probabilities"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.long
def test_the_preset_learns_what_was_held_out(tmp_path: Path) -> None:
    recipe = load_recipe(recipes()["classify"])
    settings = (f"output_dir={tmp_path}", "device=cpu", "plan=false")
    recipe.main(load_config(recipe.Config, presets()["tiny/classify"], settings))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval_accuracy"] for line in lines if "eval_loss" in line]
    assert accuracies[0] < 0.8 and accuracies[-1] > 0.9
    table = json.loads((tmp_path / "confusion.json").read_text())
    assert table["labels"] == TOPICS and sum(map(sum, table["confusion"])) == 80
    hits = sum(table["confusion"][i][i] for i in range(4))
    assert table["eval_accuracy"] == accuracies[-1] == hits / 80


def test_labels_are_names_or_integers(tmp_path: Path) -> None:
    def labels(*values: Any, **settings: Any) -> tuple[list[str], list[int]]:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(json.dumps({"text": f"text {i}", "label": one}) for i, one in enumerate(values)))
        config = with_labels(ClassificationDataConfig(source=str(file), shuffle=False, **settings))
        (batch,) = prepare_batches(config, load_tokenizer("tiny"), len(values), 0)[0].take(1)
        return config.labels or [], batch.targets.tolist()

    assert labels("b", "a", "b") == (["a", "b"], [1, 0, 1])
    assert labels(10, 2, "10") == (["2", "10"], [1, 0, 1])
    assert labels(1, 0, "no", labels=["no", "yes"]) == (["no", "yes"], [1, 0, 0])
    config = with_labels(ClassificationDataConfig(source=str(tmp_path / "rows.jsonl"), labels=["no", "yes"]))
    batches, _ = prepare_batches(config, load_tokenizer("tiny"), 3, 0)
    assert label_weights("balanced", batches, ["no", "yes"]) == pytest.approx([3 / (2 * 2), 3 / (2 * 1)])
    assert label_weights({"yes": 3.0}, batches, ["no", "yes"]) == [1.0, 3.0]


def test_rows_that_are_too_long_are_cut_before_their_last_token(train: Train, capsys: pytest.CaptureFixture) -> None:
    train("data.max_length=12", "max_steps=1", "data.packing=bfd", "loss.class_weights=balanced")
    assert "truncated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "x", "label": None}, (), r"rows.jsonl, line 3: no field `label`"),
        ({"text": "x", "label": 0.5}, (), r"rows.jsonl, line 3: the label is a number \(0.5\)"),
        ({"text": "x", "label": " "}, (), r"rows.jsonl, line 3: the label is a string"),
        ({"text": " ", "label": "a"}, (), r"rows.jsonl, line 3: `text` is empty"),
        ({"text": "x", "label": "a"}, ("data.multi_label=true",), r"rows.jsonl, line 1: no field `labels`"),
    ],
    ids=str,
)
def test_rows_without_a_label_are_refused(train: Train, tmp_path: Path, row: Any, settings: Any, message: str) -> None:
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}, row]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        train(f"data.source={tmp_path / 'rows.jsonl'}", *settings)


def test_score_labels_the_rows_of_a_file(train: Train, tmp_path: Path) -> None:
    train("max_steps=1")
    (tmp_path / "rows.jsonl").write_text('{"text": "What is 3 plus 4?", "id": 7}\n')
    files = [str(tmp_path / "rows.jsonl"), str(tmp_path / "labeled.jsonl")]
    result = CliRunner().invoke(app, ["score", str(tmp_path / "run"), *files])
    assert result.exit_code == 0, result.output
    row = json.loads((tmp_path / "labeled.jsonl").read_text())
    assert (row["id"], row["prediction"] in TOPICS) == (7, True)
    assert sum(row["probabilities"].values()) == pytest.approx(1) and [*row["probabilities"]] == TOPICS
