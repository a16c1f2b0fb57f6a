"""reward on the embedded model: an independent loop, and equal scores from transformers, peft and `leanft score`."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from lean_ft import load_model
from lean_ft.cli.main import app
from lean_ft.data import prepare_batches
from lean_ft.export import export_folder, export_gguf
from lean_ft.frozen.scoring import open_reward_model, score, score_rows
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.models import REWARD_LABELS, save_model
from lean_ft.tokenizers import load_tokenizer
from tests.recipes import cases
from tests.recipes.conftest import Train, config_of, first_rows, planned, run_recipe, update

RECIPE = "reward"
SETTINGS = cases.SETTINGS[RECIPE]


@pytest.fixture
def rows_with_margins(tmp_path) -> str:
    rows = [json.loads(line) for line in resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()]
    file = tmp_path / "margins.jsonl"
    file.write_text("\n".join(json.dumps(row | {"margin": i % 3 / 2}) for i, row in enumerate(rows[:60])))
    return str(file)


def with_a_score(**config: Any) -> Any:
    """transformers' reward model of the embedded model, with an output layer of zeros."""
    folder = resolve_model_path("tiny")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32, **config)
    torch.nn.init.zeros_(model.score.weight)
    return model


@cache
def by_hand(source: str, packing: str, shares: bool, num_steps: int = 3) -> tuple[list[float], list[float]]:
    """A reward model trained by hand: one text at a time, transformers, torch's AdamW. Return losses and margins."""
    config = config_of("reward", *SETTINGS, f"data.packing={packing}", f"data.source={source}")
    tokenizer, rows = load_tokenizer("tiny"), [json.loads(line) for line in Path(source).read_text().splitlines()]
    batches, _ = prepare_batches(config.data, tokenizer, batch_size=4, seed=config.seed, share_prompts=shares)
    model = with_a_score()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, margins = [], []
    for _ in range(num_steps):
        (batch,) = batches.take(1)
        terms, ahead = [], []
        for row in (rows[i] for i in batch.pairs.tolist()):
            texts = [tokenizer.render(row["prompt"] + row[side])[0] for side in ("chosen", "rejected")]
            chosen, rejected = (model(torch.tensor([ids])).logits[0, 0] for ids in texts)
            terms.append(-logsigmoid(chosen - rejected - row["margin"]) + 0.1 * (chosen + rejected) ** 2)
            ahead.append((chosen - rejected).item())
        loss = torch.stack(terms).mean()
        losses.append(update(optimizer, loss))
        margins.append(sum(ahead) / len(ahead))
    return losses, margins


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        ("batch_size=2", "gradient_accumulation_steps=2"),
        ("data.shared_prompt=false",),
        ("optimizer.in_backward=true", "memory.activation_checkpointing=full"),
        ("data.packing=padding_free", "memory.tile_mlp=2"),
    ],
    ids=str,
)
def test_three_steps_equal_a_loop_by_hand(train: Train, rows_with_margins: str, settings: Any) -> None:
    given = (f"data.source={rows_with_margins}", "epochs=2", "max_steps=3", "loss.centering=0.1")
    lines = train(*given, *settings)
    packing = "padding_free" if "data.packing=padding_free" in settings else "none"
    losses, margins = by_hand(rows_with_margins, packing, "data.shared_prompt=false" not in settings)
    assert max(map(abs, margins)) > 3e-4
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert [line["rewards/margins"] for line in lines] == pytest.approx(margins, rel=1e-3, abs=1e-4)


def texts_of(count: int) -> list[str]:
    """Return rendered chats of several lengths."""
    rows = [json.loads(line) for line in resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer("tiny")
    return [tokenizer.decode(tokenizer.render(row["prompt"] + row["chosen"])[0]) for row in rows[:count]]


@torch.no_grad()
def scores_of_transformers(model: Any, folder: Path) -> list[float]:
    """Return the scores of `texts_of(6)` in one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts_of(6), return_tensors="pt", padding=True, add_special_tokens=False)
    assert (tokens["attention_mask"] == 0).any()
    return model(**tokens).logits[:, 0].tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("reward") / "run"
    run_recipe("reward", folder, *SETTINGS, "max_steps=2", "pad_token=<|user|>")
    return folder


@pytest.mark.long
def test_transformers_and_another_run_open_it_with_the_same_scores(train: Train, trained: Path, tmp_path: Path) -> None:
    folder = trained / "step_00000002"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == load_tokenizer("tiny").added_tokens["<|user|>"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    expected = scores_of_transformers(model, folder)
    assert max(expected) - min(expected) > 1e-3
    ours, tokenizer = open_reward_model(trained, "cpu")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts_of(6)]
    assert [values[-1] for values in score(ours, ids)] == pytest.approx(expected, abs=1e-5)
    assert [values[-1] for values in score(ours, ids, tokens_at_a_time=1)] == pytest.approx(expected, abs=1e-5)

    few = first_rows("tiny/pairs_validation.jsonl", 24, tmp_path)
    row = json.loads((tmp_path / "few.jsonl").read_text().splitlines()[0])
    (first,) = train(f"model.path={folder}", few, "max_steps=1", "batch_size=24", "optimizer.lr=0", output="again")
    scored = list(score_rows(ours, tokenizer, str(tmp_path / "few.jsonl")))
    chosen, rejected = ([row[f"{side}_score"] for row in scored] for side in ("chosen", "rejected"))
    assert scored[0] == row | {"chosen_score": chosen[0], "rejected_score": rejected[0]}
    assert first["rewards/chosen"] == pytest.approx(sum(chosen) / 24, abs=1e-5)
    assert first["rewards/margins"] == pytest.approx((sum(chosen) - sum(rejected)) / 24, abs=1e-5)
    # Saving an opened reward model gives the same bytes.
    save_model(ours, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.long
def test_peft_opens_an_adapter_with_its_output_layer(train: Train, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    train("max_steps=2", "lora.rank=4", "lora.lr_ratio=4")
    folder = tmp_path / "run" / "step_00000002"
    adapted = peft.PeftModel.from_pretrained(with_a_score(), folder)
    expected = scores_of_transformers(adapted, folder)
    assert max(expected) - min(expected) > 1e-3
    ours, tokenizer = open_reward_model(folder, "cpu", "float32")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts_of(6)]
    assert [values[-1] for values in score(ours, ids)] == pytest.approx(expected, abs=1e-5)

    export_folder(folder, tmp_path / "merged", "float32", merge=True)
    export_folder(tmp_path / "merged", tmp_path / "exported")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert scores_of_transformers(merged, tmp_path / "exported") == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="is a reward model"):
        export_gguf(tmp_path / "merged", tmp_path / "merged.gguf")


@pytest.mark.long
def test_the_planner_counts_a_reward_model(train: Train, tmp_path: Path) -> None:
    """A plan reads no adapter. With a reward model, two models are in memory."""
    train("max_steps=1", "lora.rank=4")
    rewards = ("exact_answer", tmp_path / "run" / "step_00000001")
    without, with_it = (planned("grpo", *cases.PROBLEMS, f"rewards=[{one}]").peak for one in rewards)
    assert with_it.bytes_by_label["weights"] > 1.5 * without.bytes_by_label["weights"]


@pytest.mark.long
def test_token_rewards_have_the_trained_mean(train: Train, tmp_path: Path) -> None:
    train("loss.per_token=true", "max_steps=2")
    again = (f"model.path={tmp_path / 'run' / 'step_00000002'}", "loss.per_token=true", "max_steps=1", "batch_size=24")
    (line,) = train(*again, first_rows("tiny/pairs_validation.jsonl", 24, tmp_path), output="again")
    rows = list(score_rows(*open_reward_model(tmp_path / "run", "cpu"), str(tmp_path / "few.jsonl"), per_token=True))
    means = [sum(row["chosen_token_scores"]) / len(row["chosen_token_scores"]) for row in rows]
    assert line["rewards/chosen"] == pytest.approx(sum(means) / 24, abs=1e-5)
    assert rows[0]["chosen_token_scores"][-1] == rows[0]["chosen_score"]


def test_pairs_equal_after_truncation_are_dropped_and_counted(train: Train, tmp_path: Path, capsys: Any) -> None:
    row = {"prompt": "q", "chosen": "one two three four five six", "rejected": "one two three four five seven"}
    other = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [row, other, other])))
    train(f"data.source={tmp_path / 'rows.jsonl'}", "data.max_completion_length=8", "max_steps=1")
    assert "1 dropped (chosen equals rejected within the lengths); 2 pairs" in capsys.readouterr().out


def test_score_writes_lines_of_json(trained: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "yes", "number": 1},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]},
    ]
    for i, row in enumerate(rows):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(row))
        command = ["score", str(trained), str(tmp_path / f"{i}.jsonl"), str(tmp_path / f"scored{i}.jsonl")]
        assert CliRunner().invoke(app, command).exit_code == 0
    scored = [json.loads((tmp_path / f"scored{i}.jsonl").read_text()) for i in range(2)]
    assert scored == [row | {"score": scored[0]["score"]} for row in rows]
    (tmp_path / "renamed.jsonl").write_text('{"prompt": "q", "answer": "yes"}')
    renamed = ["score", str(trained), str(tmp_path / "renamed.jsonl"), "data.columns.completion=answer"]
    assert json.loads(CliRunner().invoke(app, renamed).stdout)["score"] == pytest.approx(scored[0]["score"], abs=1e-6)
    assert scored[0]["score"] != 0
    (tmp_path / "bad.jsonl").write_text('{"prompt": "q"}')
    for arguments, message in (
        (command[1:], "exists already"),
        ([str(trained), str(tmp_path / "bad.jsonl")], "bad.jsonl, line 1"),
        (["tiny", str(tmp_path / "0.jsonl")], "not a reward model"),
    ):
        assert message in str(CliRunner().invoke(app, ["score", *arguments]).exception)


def test_language_models_reward_models_and_classifiers_are_told_apart(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "step_00000002", tmp_path / "copy")
    with pytest.raises(ValueError, match="is a reward model: it gives scores and no text"):
        load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(ValueError, match="id2label has 2 labels; expected 1"):
        load_model(folder, scores=REWARD_LABELS)
    config["model_type"] = "granite"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="lean_ft has no sequence classification model"):
        load_model(folder, scores=REWARD_LABELS)


def test_a_margin_must_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "chosen": "yes", "rejected": "no", "margin": "much"}\n')
    with pytest.raises(ValueError, match="rows.jsonl, line 1: `margin` is a string"):
        run_recipe("reward", tmp_path / "run", *SETTINGS, f"data.source={tmp_path / 'rows.jsonl'}")


@pytest.mark.long
def test_the_documented_lines_score_from_python(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "preferences.md").read_text()
    [block] = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "open_reward_model" in one]
    monkeypatch.chdir(tmp_path)
    run_recipe("reward", Path("runs/tiny_reward"), *SETTINGS)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(block, names)
    *pairs, last = capsys.readouterr().out.splitlines()
    assert len(pairs) == len(resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines())
    [checkpoint] = Path("runs/tiny_reward").glob("step_*")
    theirs = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert float(last) == pytest.approx(theirs(torch.tensor([names["ids"]])).logits.item(), rel=1e-4)
