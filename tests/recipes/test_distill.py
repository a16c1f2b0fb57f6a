"""distill with the embedded model as the teacher: an independent loop, cached teachers, on-policy steps, refusals."""

import json
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lean_ft.data import prepare_batches
from lean_ft.frozen.teacher_cache import keep_teacher
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.settings import KeepTeacherConfig
from lean_ft.settings.text import load_config
from lean_ft.tokenizers import load_tokenizer
from tests.recipes import cases
from tests.recipes.cases import LIVE, TINY
from tests.recipes.conftest import Train, config_of, planned, update

RECIPE = "distill"
ROWS = ("data.source=tiny/validation.jsonl", "data.max_length=64")
SETTINGS = cases.SETTINGS[RECIPE]
V = 768  # of the embedded model


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the embedded model's tokenizer and a padded vocabulary."""
    folder = tmp_path_factory.mktemp("student")
    tiny = resolve_model_path("tiny")
    for file in tiny.glob("*token*"):
        shutil.copy(file, folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": V + 8}
    (folder / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text()) | sizes))
    torch.manual_seed(0)
    save_model(load_model(folder, random_init=True), folder)
    return folder


@pytest.fixture
def own_settings(student: Path) -> tuple[str, ...]:
    return (f"model.path={student}",)


def keep(destination: Path, *settings: str, top_k: int = V) -> tuple[str]:
    """Cache the embedded model's predictions for the rows; return the setting that names the cache."""
    given = [*TINY[:3], *ROWS, f"top_k={top_k}", f"destination={destination}", *settings]
    keep_teacher(load_config(KeepTeacherConfig, None, given))
    return (f"distill.cached={destination}",)


def numbers(lines: list[dict[str, Any]], *more: str) -> list[tuple]:
    return [tuple(line[name] for name in ("loss", "divergence", "tokens", "grad_norm", *more)) for line in lines]


# Against a loop by hand
# -----------------------------------------------------------------------------------------------------


@cache
def by_hand(student: Path, divergence: str, packing: str, num_steps: int = 4) -> list[float]:
    """Distillation written by hand: one document at a time, whole logits, two transformers models, torch's AdamW."""
    config = config_of("distill", *SETTINGS, f"model.path={student}", *LIVE, f"data.packing={packing}")
    batches, _ = prepare_batches(config.data, load_tokenizer("tiny"), batch_size=4, seed=config.seed)
    learner = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(num_steps):
        (batch,) = batches.take(1)
        total, count = torch.zeros(()), 0
        num_columns = batch.input_ids.shape[1]
        begins = [*(batch.positions.flatten() == 0).nonzero().flatten().tolist(), batch.num_tokens]
        for span in (slice(begin, min(end, begin + num_columns)) for begin, end in pairwise(begins)):
            ids, labels = batch.input_ids.flatten()[span], batch.labels.flatten()[span]
            s = learner(ids[None]).logits[0, :, :V]
            with torch.no_grad():
                t = teacher(ids[None]).logits[0].div(2.0).softmax(-1)
            for place in (labels >= 0).nonzero().flatten().tolist():
                p, q = t[place], s[place].div(2.0).softmax(-1)
                middle = 0.75 * q + 0.25 * p
                kl = {
                    "forward_kl": p * (p / q).log(),
                    "jsd": 0.25 * p * (p / middle).log() + 0.75 * q * (q / middle).log(),
                }[divergence].sum()
                total = total + 0.8 * kl - 0.2 * s[place].log_softmax(-1)[labels[place]]
                count += 1
        losses.append(update(optimizer, total / count))
    return losses


MEMORY: list[tuple[str, ...]] = [
    ("batch_size=1", "gradient_accumulation_steps=4", "distill.divergence=jsd", "distill.beta=0.25"),
    ("distill.divergence=jsd", "distill.beta=0.25"),
    ("data.packing=padding_free", "optimizer.in_backward=true"),
    ("memory.activation_checkpointing=full", "memory.loss_chunk_tokens=16", "memory.tile_mlp=2"),
    ("memory.activation_checkpointing=selective", "memory.tied_gradient=separate", "optimizer.in_backward=true"),
]


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", MEMORY, ids=str)
def test_four_steps_equal_a_loop_by_hand(train: Train, student: Path, settings: tuple[str, ...]) -> None:
    mixed = ("distill.temperature=2", "distill.cross_entropy_weight=0.2", "max_steps=4")
    lines = train(*LIVE, *mixed, *settings)
    losses = by_hand(
        student,
        "jsd" if "distill.divergence=jsd" in settings else "forward_kl",
        "padding_free" if "data.packing=padding_free" in settings else "none",
    )
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=5e-5)
    for line in lines:
        assert line["loss"] == pytest.approx(0.8 * line["divergence"] + 0.2 * line["cross_entropy"], rel=1e-6)


# What was kept of a teacher
# -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("packing", ["bfd", "none", "padding_free"])
def test_a_cache_of_all_tokens_equals_the_live_teacher(train: Train, tmp_path: Path, packing: str) -> None:
    """Also when rows are shuffled, packed, weighted and held out differently than when the cache was made."""
    settings = (
        f"data.packing={packing}",
        "data.validation_fraction=0.2",
        "epochs=2",
        "max_steps=3",
        "eval_every=3",
        "batch_size=2",
    )
    kept = keep(tmp_path / "kept", "data.packing=bfd", "batch_size=3")
    live, recalled = train(*settings, *LIVE), train(*settings, *kept, output="kept_run")
    assert len(live) == len(recalled) == 4
    for line, expected in zip(recalled, live, strict=True):
        assert line.keys() == expected.keys()
        for name in ("loss", "divergence", "eval_loss", "eval_divergence", "grad_norm"):
            if name in expected:
                assert line[name] == pytest.approx(expected[name], rel=2e-4), name


@pytest.mark.long
def test_a_cache_of_64_tokens_keeps_most_of_the_divergence_in_half_a_kilobyte(train: Train, tmp_path: Path) -> None:
    kept = keep(tmp_path / "kept", top_k=64)
    live, recalled = train(*LIVE, "max_steps=1"), train(*kept, "max_steps=1", output="kept_run")
    assert 0.6 * live[0]["divergence"] < recalled[0]["divergence"] < live[0]["divergence"]
    about = json.loads((tmp_path / "kept" / "about.json").read_text())
    num_targets = about["arrays"]["ids"]["shape"][0] // 64
    size = sum((tmp_path / "kept" / name).stat().st_size for name in ("ids", "log_probs"))
    assert size == num_targets * (64 * 8 + 4)


@pytest.fixture(scope="module")
def few_kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    (setting,) = keep(tmp_path_factory.mktemp("teacher") / "kept", top_k=4)
    return setting


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.max_length=24",), r"lacks \d+ of this run's \d+ .*data.max_length=64 there, 24 here"),
        (("distill.temperature=2",), "at temperature 1, but distill.temperature is 2"),
        (("data.train_on=all",), r"lacks 206 of this run's 206 documents.*train_on=assistant there, all here"),
        (
            ("data.source=tiny/train.jsonl",),
            r"lacks [\d,]+ of this run's [\d,]+ documents.* including the held-out rows",
        ),
        (("data.validation_source=tiny/train.jsonl",), "lacks"),
        (("data.packing=wrapped",), "data.packing=wrapped cuts documents"),
        (("distill.teacher=tiny",), "expected one of teacher=MODEL and cached=FOLDER.*found both"),
        (("distill.teacher_dtype=nf4",), "teacher_dtype=nf4 needs a teacher in memory"),
        (("distill.teacher_streamed=true",), "teacher_streamed=true reads a 16-bit or 32-bit teacher"),
        (("distill.on_policy=0.5",), "needs a teacher that reads the student's completions"),
    ],
    ids=str,
)
def test_a_cache_that_does_not_fit_the_run_is_refused(train: Train, few_kept: str, settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(few_kept, *settings)


@pytest.mark.long
def test_a_damaged_cache_is_refused(train: Train, tmp_path: Path) -> None:
    kept = keep(tmp_path / "kept", top_k=4)
    with pytest.raises(ValueError, match="already exists"):
        keep(tmp_path / "kept")
    (tmp_path / "kept" / "ids").write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged"):
        train(*kept)


@pytest.mark.long
@pytest.mark.parametrize(("num_rows", "top_k"), [(V + 40, 8), (V, 8), (V + 8, 8), (V + 32, 8), (V, V)], ids=str)
def test_a_student_that_is_the_padded_cached_teacher_has_a_loss_of_0(train: Train, tmp_path, num_rows, top_k) -> None:
    """The teacher has 32 rows without a token, copies of tokens' rows, so that they are among the likeliest ids."""
    for name, rows in (("teacher", V + 32), ("student", num_rows)):
        model, folder = AutoModelForCausalLM.from_pretrained(resolve_model_path("tiny")), tmp_path / name
        model.resize_token_embeddings(V + 40, mean_resizing=False)
        weight = model.get_input_embeddings().weight.data
        weight[V:] = weight[V - 60 : V - 20]
        model.resize_token_embeddings(rows)
        model.save_pretrained(folder)
        for file in resolve_model_path("tiny").glob("*token*"):
            shutil.copy(file, folder)
    kept = keep(tmp_path / "kept", f"model.path={tmp_path / 'teacher'}", top_k=top_k)
    for line in train(*kept, f"model.path={tmp_path / 'student'}", "max_steps=2"):
        assert abs(line["loss"]) < 1e-6
        assert line["grad_norm"] < 1e-5


# The student's own answers
# --------------------------------------------------------------------------------------------------


def test_on_policy_steps_train_on_the_students_completions(train: Train, student: Path) -> None:
    """With lr=0 and greedy sampling, the targets are the student's likeliest tokens: its token accuracy is 1."""
    settings = ("optimizer.lr=0", "max_steps=2", "generation.max_new_tokens=5", "generation.temperature=0")
    own = train(*LIVE, *settings, "distill.on_policy=1", "distill.divergence=reverse_kl")
    for line in own:
        assert line["token_accuracy"] == 1
        assert line["target_tokens"] <= 4 * 5
        assert line["divergence"] > 0.5
    drawn = train(*LIVE, *settings[:3], "distill.on_policy=1", output="drawn")
    assert all(line["token_accuracy"] < 0.2 for line in drawn)


@pytest.mark.long
def test_the_seed_draws_on_policy_steps_and_resuming_changes_nothing(train: Train) -> None:
    settings = (*LIVE, "distill.on_policy=0.4", "generation.max_new_tokens=3", "max_steps=12")
    settings += ("data.packing=padding_free",)
    whole = train(*settings, output="whole")
    train(*settings, "max_steps=5", output="parts")
    assert numbers(train(*settings, output="parts")) == numbers(whole)
    sampled = [line["target_tokens"] <= 4 * 3 for line in whole]
    expected = [bool(np.random.default_rng([0, step]).random() < 0.4) for step in range(12)]
    assert sampled == expected
    assert 2 <= sum(sampled) <= 10
    other = train(*settings, "seed=1", output="other")
    assert [line["target_tokens"] <= 4 * 3 for line in other] != sampled


# Resuming, precision, planning
# ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_teacher_in_fewer_bits_is_close(train: Train) -> None:
    exact = train(*LIVE, "max_steps=1")[0]["divergence"]
    for kept_as, bound in (("bfloat16", 0.01), ("float16", 0.01), ("nf4", 0.1)):
        (line,) = train(*LIVE, "max_steps=1", f"distill.teacher_dtype={kept_as}", output=kept_as)
        assert 0 < abs(line["divergence"] / exact - 1) < bound
    (line,) = train(*LIVE, "max_steps=1", "model.dtype=float16", "distill.teacher_dtype=float32", output="mixed")
    assert line["divergence"] == pytest.approx(exact, rel=0.01)


@pytest.mark.first(1)
@pytest.mark.parametrize("live", [True, False], ids=["live", "cached"])
def test_a_teacher_with_another_tokenizer_is_refused(train: Train, tmp_path: Path, live: bool) -> None:
    other = shutil.copytree(resolve_model_path("tiny"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (next(token for token, number in vocabulary.items() if number == wanted) for wanted in (300, 301))
    vocabulary[a], vocabulary[b] = 301, 300
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    teacher = (f"distill.teacher={other}",) if live else keep(tmp_path / "kept", f"model.path={other}", top_k=4)
    with pytest.raises(
        ValueError, match=r"different tokenizer: id 300 is '.*' for the student and '.*' for the teacher"
    ):
        train(*teacher)


@pytest.mark.long
def test_a_cache_that_does_not_state_its_tokenizer_is_read_with_a_remark(train: Train, tmp_path, capsys) -> None:
    kept, file = keep(tmp_path / "kept", top_k=4), tmp_path / "kept" / "about.json"
    expected = numbers(train(*kept, "max_steps=1"))
    assert "does not state its tokenizer" not in capsys.readouterr().out
    about = json.loads(file.read_text())
    del about["tokens"]
    file.write_text(json.dumps(about))
    assert numbers(train(*kept, "max_steps=1", output="again")) == expected
    assert "does not state its tokenizer" in capsys.readouterr().out


@pytest.mark.long
def test_the_planner_counts_a_live_teacher_but_not_a_cached_one(student: Path, tmp_path: Path) -> None:
    def weights(*settings: str) -> int:
        return planned("distill", *SETTINGS, f"model.path={student}", *settings).peak.bytes_by_label["weights"]

    def num_bytes(path: Any) -> int:
        return sum(parameter.nbytes for parameter in load_model(path).parameters())

    live, recalled = weights(*LIVE), weights(*keep(tmp_path / "kept", top_k=4))
    assert live - recalled == pytest.approx(num_bytes("tiny"), rel=0.01)
    assert recalled == pytest.approx(num_bytes(student), rel=0.05)
    assert weights(*LIVE, "distill.teacher_dtype=bfloat16") < live - 0.45 * num_bytes("tiny")
    assert weights(*LIVE, "distill.teacher_streamed=true") < live - 0.3 * num_bytes("tiny")
