"""The recipe on the embedded model: its initial values, an independent loop, and settings of memory and layout that change no number."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lean_ft.data import UnpairedBatch, unpaired_batches
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.plan.devices import choose_device
from lean_ft.plan.rehearsal import rehearse
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes
from lean_ft.tokenizers import load_tokenizer

RECIPE = "kto"
SETTINGS = (
    "model.path=tiny",
    "model.dtype=float32",
    "data.source=tiny/pairs_validation.jsonl",
    "data.max_length=96",
    "optimizer.lr=1e-4",
    "schedule.name=constant",
    "batch_size=4",
    "max_steps=6",
    "device=cpu",
    "plan=false",
)
WEIGHTS = ("loss.desirable_weight=1.5", "loss.undesirable_weight=0.5", "loss.beta=0.3")
LORA = ("lora.rank=4", "lora.dropout=0.1")
Train = Callable[..., list[dict[str, Any]]]


def numbers(lines: list[dict[str, Any]]) -> list[tuple]:
    return [(line["loss"], line["grad_norm"], line["baseline"], line["tokens"]) for line in lines]


BEGINNINGS = [
    (("reference.kind=cached",), 0.5),
    (("reference.kind=cached", *LORA, "data.packing=bfd", "batch_size=2"), 0.5),
    (("reference.kind=model", "data.packing=padding_free", "loss.name=apo_zero_unpaired"), 0.5),
    (("reference.kind=adapter_off", *LORA, "model.dtype=bfloat16"), 0.5),
    (("reference.kind=cached", "loss.name=bco", "memory.activation_checkpointing=full"), math.log(2)),
    (("reference.kind=model", "model.dtype=float16", "data.batch_tokens=400"), 0.5),
]


@pytest.mark.parametrize(("settings", "loss"), BEGINNINGS, ids=str)
def test_the_first_loss_is_known_and_rewards_are_exactly_0(train: Train, settings: Any, loss: float) -> None:
    first, last = train(*settings, "gradient_accumulation_steps=2", "max_steps=2")
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == first["baseline"] == 0
    assert first["rewards/accuracies"] == 0.5
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    assert last["rewards/chosen"] != 0


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_each_completion_and_each_mismatched_pair_has_its_own_reference(
    train: Train, packing: str, tmp_path: Path
) -> None:
    """With lr=0 all margins stay 0, also in the second epoch's batches and the held-out set."""
    rows = resolve_data_path("tiny/pairs_validation.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(rows[:9]))
    few = (f"data.source={tmp_path / 'few.jsonl'}", "data.validation_fraction=0.4", f"data.packing={packing}")
    size = "batch_size=4" if packing == "none" else "batch_size=1"
    *lines, evaluation = train(*few, size, "epochs=2", "max_steps=8", "optimizer.lr=0", "reference.kind=cached")
    assert lines[-1]["epoch"] > 1
    for line in [*lines, {name.removeprefix("eval_"): value for name, value in evaluation.items()}]:
        assert line["baseline"] == pytest.approx(0, abs=1e-5)
        for side in ("chosen", "rejected"):
            assert line.get(f"rewards/{side}", 0) == pytest.approx(0, abs=1e-5)


@cache
def by_hand(name: str, packing: str, num_steps: int = 8) -> tuple[list[float], list[float]]:
    """KTO written by hand: one completion at a time, whole logits, two transformers models, torch's AdamW.
    Return losses and baselines."""
    given = [*SETTINGS, "output_dir=unused", f"data.packing={packing}"]
    config = load_config(load_recipe(recipes()["kto"]).Config, None, given)
    batches, _ = unpaired_batches(config.data, load_tokenizer("tiny"), batch_size=4, seed=config.seed)
    policy, frozen = (
        AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"), dtype=torch.float32) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)

    def gain(prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        def log_prob(model: Any) -> torch.Tensor:
            ids = torch.cat([prompt, answer])[:96]
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
            return sum(log_probs[t - 1, ids[t]] for t in range(len(prompt), len(ids)))

        with torch.no_grad():
            expected = log_prob(frozen)
        return log_prob(policy) - expected

    losses, baselines, seen = [], [], []
    for _ in range(num_steps):
        (batch,) = batches.take(1)
        documents, ids, labels = [], batch.input_ids.flatten(), batch.labels.flatten()
        for start in (batch.positions.flatten() == 0).nonzero()[:, 0].tolist():
            targets = start + (labels[start:] >= 0).nonzero()[:, 0]
            if len(targets) and (batch.positions.flatten()[start + 1 : targets[0]] > 0).all():
                first = int(targets[0]) + 1
                last = first
                while last < len(labels) and labels[last] >= 0:
                    last += 1
                documents.append((ids[start:first], ids[first : last + 1]))
        assert len(documents) == 4
        with torch.no_grad():
            mismatched = [gain(documents[i][0], documents[i - 1][1]) for i in range(4)]
        z = torch.stack(mismatched).mean().clamp(min=0) if name == "kto" else torch.zeros(())
        z = torch.tensor(seen).mean() if name == "bco" and seen else z
        gained = torch.stack([gain(*document) for document in documents])
        seen += gained.tolist()
        losses_of_answers = []
        for d, desirable in zip(gained, batch.is_desirable, strict=True):
            above = 0.3 * (d - z) * (1 if desirable else -1)
            weight = 1.5 if desirable else 0.5
            losses_of_answers.append(weight * (-above.sigmoid().log() if name == "bco" else 1 - above.sigmoid()))
        loss = torch.stack(losses_of_answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        baselines.append(z.item())
    return losses, baselines


EQUAL = [
    ("kto", ()),
    ("kto", ("data.packing=padding_free", "reference.kind=model", "optimizer.in_backward=true")),
    ("kto", ("memory.activation_checkpointing=full", "memory.loss_chunk_tokens=16", "memory.tile_mlp=2")),
    ("bco", ()),
    ("bco", ("batch_size=2", "gradient_accumulation_steps=2")),
    ("apo_zero_unpaired", ("batch_size=1", "gradient_accumulation_steps=4", "memory.tied_gradient=separate")),
]


@pytest.mark.parametrize(("name", "settings"), EQUAL, ids=str)
def test_eight_steps_equal_a_loop_by_hand(train: Train, name: str, settings: tuple[str, ...]) -> None:
    """Also with micro-batches, except kto: its baseline uses the prompts and completions of one micro-batch."""
    lines = train("max_steps=8", f"loss.name={name}", *WEIGHTS, *settings)
    losses, baselines = by_hand(name, "padding_free" if "data.packing=padding_free" in settings else "none")
    assert name == "apo_zero_unpaired" or max(map(abs, baselines)) > 0.02
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=5e-5)  # as in test_dpo
    assert [line["baseline"] for line in lines] == pytest.approx(baselines, rel=1e-3, abs=1e-4)


def test_a_reference_cache_is_reused_only_where_it_fits(train: Train, capsys: pytest.CaptureFixture) -> None:
    def computed(*settings: str) -> int:
        train("reference.kind=cached", *settings, output=f"run{len(outputs)}")
        outputs.append(capsys.readouterr().out)
        return int(outputs[-1].partition("log-probabilities of ")[2].split()[0].replace(",", ""))

    outputs: list[str] = []
    assert computed() == 48  # 6 steps of 4 completions, and as many mismatched
    assert computed() == 0
    assert computed("max_steps=7") == 8
    assert computed("seed=1") == 48  # other mismatched pairs
    assert computed("loss.name=bco", "batch_size=2") == 12  # bco needs no mismatched pairs


@pytest.mark.long
def test_held_out_rows_are_evaluated_and_improve(train: Train, capsys: pytest.CaptureFixture) -> None:
    settings = ("data.source=tiny/pairs_train.jsonl", "data.validation_source=tiny/pairs_validation.jsonl")
    lines = train(*settings, "batch_size=32", "optimizer.lr=3e-4", "max_steps=40")
    (evaluation,) = [line for line in lines if "eval_loss" in line]
    assert evaluation["eval_rewards/accuracies"] > 0.55  # 0.5 before
    assert evaluation["eval_loss"] < 0.497  # 0.5 before
    assert evaluation["eval_rewards/margins"] > 0
    said = capsys.readouterr().out
    assert "1,600 answers" in said
    assert "right " in said.partition("step        40/40")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("batch_size=1",), "batch_size=1: kto needs another completion in each micro-batch"),
        (("loss.name=kot",), "Did you mean 'kto'"),
        (("loss.label_smoothing=0.1",), "label_smoothing"),
        (("reference.kind=adapter_off",), "lora is null"),
        (("data.source=tiny/validation.jsonl",), "this recipe learns from answers that are good or bad"),
        (("data.packing=wrapped",), "compared whole"),
        (("data.max_length=2", "data.max_prompt_length=1"), "nothing in .* is left to train on|no answer left"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(train: Train, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(*settings)


def test_the_planner_counts_adapter_and_full_runs() -> None:
    def peak(*settings: str) -> int:
        recipe = load_recipe(recipes()["kto"])
        cfg = load_config(recipe.Config, None, [*SETTINGS, "output_dir=unused", *settings])
        return rehearse(recipe, cfg, choose_device("A100 80GB", "cuda")).peak_bytes

    assert peak("reference.kind=model") > peak("reference.kind=cached") > peak("lora.rank=4")
    # The pass over mismatched pairs ends before the pass that needs gradients.
    assert peak("reference.kind=cached") == pytest.approx(peak("loss.name=apo_zero_unpaired"), rel=0.05)


def test_mismatched_pairs_rotate_the_completions_of_a_batch() -> None:
    recipe = load_recipe(recipes()["kto"])
    tokenizer = load_tokenizer("tiny")
    for packing in ("none", "bfd", "padding_free"):
        cfg = load_config(recipe.Config, None, [*SETTINGS, "output_dir=unused", f"data.packing={packing}"])
        batches, _ = unpaired_batches(cfg.data, tokenizer, batch_size=4, seed=0)
        for batch in batches.take(3):
            batch = batch.built
            assert isinstance(batch, UnpairedBatch)
            assert batch.mismatched is not None
            answers, turned = (
                [ids.tolist() for ids in one.label.split(one.answer_tokens[:, 0].tolist())]
                for one in (batch, batch.mismatched)
            )
            assert turned == [answers[i - 1] for i in range(len(answers))]
            assert len({*batch.pairs.tolist(), *batch.mismatched.pairs.tolist()}) == 2 * len(answers)
    row = json.loads(resolve_data_path("tiny/pairs_validation.jsonl").read_text().partition("\n")[0])
    cfg = load_config(recipe.Config, None, [*SETTINGS, "output_dir=unused", "batch_size=412"])
    (batch,) = unpaired_batches(cfg.data, tokenizer, batch_size=412, seed=0)[0].take(1)
    places, labels = batch.pairs.tolist(), batch.is_desirable.tolist()
    answers = batch.label.split(batch.answer_tokens[:, 0].tolist())
    for number, (side, desirable) in enumerate((("chosen", True), ("rejected", False))):
        place = places.index(number)
        assert labels[place] is desirable
        assert tokenizer.decode(answers[place].tolist()) == row[side][0]["content"] + "<|end|>"
