"""distill with teacher=self: the losses of TRL's SDFT, kinds of teachers, on-policy steps, plans, the preset."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_ft.data import Batch, prepare_batches
from lean_ft.hub.paths import resolve_data_path, resolve_model_path
from lean_ft.models import load_model
from lean_ft.settings import TaughtDataConfig
from lean_ft.tokenizers import load_tokenizer
from tests.recipes.conftest import Train, config_of, planned, update

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

RECIPE = "distill"
MODEL = "tiny-tools"
ITSELF = ("data.columns.context=context", "distill.teacher=self")
OWN = (
    *(f"model.path={MODEL}", "data.source=tiny-tools/calls_train.jsonl", "data.max_length=96"),
    *("data.max_teacher_length=256", *ITSELF),
)


@pytest.fixture
def own_settings() -> tuple[str, ...]:
    return OWN


def numbers(lines: list[dict[str, Any]], *more: str) -> list[tuple[float, ...]]:
    return [tuple(line[name] for name in ("loss", "divergence", "tokens", "grad_norm", *more)) for line in lines]


# TRL
# ----------------------------------------------------------------------------------------------------------------------


def trl_trainer(model: Any, alpha: float) -> Any:
    """TRL's trainer without its loop: it tokenizes the teacher's prompts, and computes logits and the loss."""
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder, SDFTTrainer

    trainer: Any = object.__new__(SDFTTrainer)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(MODEL))
    trainer.args = SimpleNamespace(
        teacher_prompt_template="{privileged_context}\n\n{prompt}",
        teacher_model_kind="base",
        distillation_mode="full_logits",
        distillation_alpha=alpha,
        distillation_is_clip=None,
    )
    trainer.model, trainer._tokenizer, trainer.processing_class = model, tokenizer, tokenizer
    trainer.chat_template_kwargs, trainer.max_prompt_length = {}, None
    trainer.num_loss_tokens_to_skip, trainer.temperature, trainer.model_kwarg_keys = 0, 1.0, {"logits_to_keep"}
    trainer.accelerator = SimpleNamespace(gather=lambda value: value)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.builder = DemonstrationTeacherContextBuilder(trainer)
    return trainer


def sides(batch: Batch) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """The student's prompt, the teacher's, and the completion of each row."""
    for (own, ids), (others, same) in zip(batch.questions(), batch.for_teacher.questions(), strict=True):
        assert ids == same
        yield own.ids.tolist(), others.ids.tolist(), ids


def trl_loss(trainer: Any, teacher: Any, rows: list[tuple[list[int], list[int], list[int]]]) -> torch.Tensor:
    """TRL's loss of a batch, whose completions have one length: its mean over rows is then the mean over tokens."""
    prompts, others, completions = zip(*rows, strict=True)

    def padded(texts: tuple[list[int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, texts))
        ids = [[0] * (width - len(text)) + text for text in texts]
        mask = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
        return torch.tensor(ids), torch.tensor(mask)

    (prompt_ids, prompt_mask), (teacher_ids, teacher_mask) = padded(prompts), padded(others)
    ids = torch.tensor(completions)
    mask = torch.ones_like(ids)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "teacher_input_ids": torch.cat([teacher_ids, ids], 1),
        "teacher_attention_mask": torch.cat([teacher_mask, mask], 1),
    }
    logits = trainer._compute_teacher_student_logits(trainer.model, teacher, inputs)
    return trainer._compute_self_distillation_loss(trainer.model, inputs, logits)


def own_rows(folder: Path, count: int = 12) -> list[dict[str, Any]]:
    """Write rows whose completions have equally many tokens, of one product each; return them."""
    lines = resolve_data_path("tiny-tools/calls_train.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "*" in row["prompt"]][:count]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


ALPHAS = {
    0.0: ("distill.divergence=forward_kl",),
    1.0: ("distill.divergence=reverse_kl",),
    0.5: ("distill.divergence=jsd",),
    0.2: ("distill.divergence=jsd", "distill.beta=0.2"),
}


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "padding_free", "bfd"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_steps_equal_trls_sdft(train: Train, tmp_path: Path, alpha: float, packing: str) -> None:
    """Losses and gradients of all parameters over three steps, from whole logits of two transformers models."""
    if packing == "bfd" and alpha != 0.5:
        pytest.skip("one divergence is enough")
    own_rows(tmp_path)
    settings = ("data.source=TMP/rows.jsonl", f"data.packing={packing}", *ALPHAS[alpha], "max_steps=3", "batch_size=4")
    settings += ("schedule.name=constant", "optimizer.name=sgd", "optimizer.lr=1e-3", "optimizer.weight_decay=0")
    lines = train(*settings)
    config = config_of("distill", *OWN, *(one.replace("TMP", str(tmp_path)) for one in settings))
    batches, _ = prepare_batches(config.data, load_tokenizer(MODEL), batch_size=4, seed=config.seed)
    folder = resolve_model_path(MODEL)
    learner, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    trainer, optimizer = trl_trainer(learner, alpha), torch.optim.SGD(learner.parameters(), lr=1e-3)
    for line in lines:
        (batch,) = batches.take(1)
        loss = trl_loss(trainer, teacher, list(sides(batch)))
        assert line["loss"] == pytest.approx(loss.item(), rel=2e-5, abs=1e-8)
        update(optimizer, loss)
        norm = torch.stack([parameter.grad.norm() for parameter in learner.parameters()]).norm()
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ours = dict(load_model(max((tmp_path / "run").glob("step_*"))).named_parameters())
    for name, parameter in learner.named_parameters():
        torch.testing.assert_close(ours[name], parameter.data, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_prompts_with_a_template_are_those_of_trl(tmp_path: Path) -> None:
    rows = own_rows(tmp_path, 3)
    config = TaughtDataConfig(
        source=str(tmp_path / "rows.jsonl"),
        columns={"context": "context"},
        context_template="{context}\n\n{prompt}",
        shuffle=False,
    )
    (batch,) = prepare_batches(config, load_tokenizer(MODEL), batch_size=3, seed=0)[0].take(1)
    trainer = trl_trainer(None, 0.5)
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    theirs = trainer.builder.select_generation_prompts(prompts, [row["context"] for row in rows])
    found = list(sides(batch))
    assert [own for own, _, _ in found] == trainer._tokenize_prompts(prompts)
    assert [other for _, other, _ in found] == trainer._tokenize_prompts(theirs)


# Kinds of teachers
# ----------------------------------------------------------------------------------------------------------------------

ADAPTER = ("lora.rank=4", "optimizer.lr=3e-3", "schedule.name=constant", "batch_size=8", "max_steps=5")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("others", "rel", "steps"),
    [
        (("distill.teacher_kind=model",), 1e-5, 5),
        (("distill.teacher=tiny-tools",), 1e-5, 5),
        (("distill.teacher_kind=adapter_off", "compile=true"), 1e-4, 5),
        (("distill.teacher_kind=adapter_off", "model.dtype=float16"), 0.01, 1),
        (("distill.teacher_dtype=bfloat16",), 0.05, 5),
    ],
    ids=str,
)
def test_an_adapter_that_is_off_teaches_like_a_copy(train: Train, others, rel: float, steps: int, capsys) -> None:
    off = train(*ADAPTER)
    assert "teacher     the student itself, without its adapter: no memory" in capsys.readouterr().out
    for line, expected in zip(train(*ADAPTER, *others, output="other")[:steps], off[:steps], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=rel, abs=1e-6)
    assert off[-1]["loss"] < 0.5 * off[0]["loss"]


def test_the_weights_that_train_teach_with_the_context_alone(train: Train) -> None:
    """With lr=0, they are the weights before training. Without a context, the divergence would be 0."""
    settings = ("distill.teacher_kind=current", "max_steps=2", "data.packing=padding_free")
    current = train(*settings, "optimizer.lr=0")
    before = train("distill.teacher_kind=model", *settings[1:], "optimizer.lr=0", output="model")
    for line, expected in zip(numbers(current), numbers(before), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    assert current[0]["loss"] > 0.1
    moved = train(*settings, "optimizer.lr=1e-2", "schedule.name=constant", output="moved")
    assert moved[0]["loss"] == current[0]["loss"]
    assert abs(moved[1]["loss"] / current[1]["loss"] - 1) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("lora.rank=4",), ("optimizer.in_backward=true", "batch_size=2")], ids=str)
def test_averages_teach(train: Train, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Each step's loss is TRL's for the weights of the checkpoint before it, taught by the averages in its folder."""
    from peft import PeftModel

    rows = own_rows(tmp_path)
    settings = ("data.source=TMP/rows.jsonl", "optimizer.lr=1e-3", "schedule.name=constant", "batch_size=4", *more)
    settings = (*settings, "distill.teacher_kind=ema", "optimizer.ema=0.5", "max_steps=4", "save_every=1")
    lines = train(*settings, "keep_last=9")
    config = config_of("distill", *OWN, *(one.replace("TMP", str(tmp_path)) for one in settings))
    batches, _ = prepare_batches(config.data, load_tokenizer(MODEL), batch_size=config.batch_size, seed=config.seed)

    def loaded(folder: Path) -> Any:
        if "lora.rank=4" not in more:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(resolve_model_path(MODEL), dtype=torch.float32)
        return PeftModel.from_pretrained(base, folder).merge_and_unload()

    assert len(rows) == 12
    for step, line in enumerate(lines):
        (batch,) = batches.take(1)
        if step:
            before = tmp_path / "run" / f"step_{step:08d}"
            loss = trl_loss(trl_trainer(loaded(before), 0.0), loaded(before / "ema"), list(sides(batch)))
            assert line["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-7)


@pytest.mark.long
def test_another_model_reads_the_context_too(train: Train) -> None:
    """The teacher in a second folder is the student's model, so it equals the copy; on policy too."""
    for more in ((), ("distill.on_policy=1", "generation.max_new_tokens=8")):
        name = str(len(more))
        copy = train("distill.teacher_kind=model", "max_steps=2", *more, output=f"copy{name}")
        other = train("distill.teacher=tiny-tools", "max_steps=2", *more, output=f"other{name}")
        assert numbers(copy, "target_tokens") == numbers(other, "target_tokens")


@pytest.mark.long
def test_without_a_context_a_model_is_held_near_its_own_weights(train: Train) -> None:
    """The loss is then the cross-entropy, and the divergence from the weights before training, which begins at 0."""
    given = ("data.columns={}", "data.max_teacher_length=null", "distill.cross_entropy_weight=0.5")
    lines = train(*given, "max_steps=4", "schedule.name=constant")
    assert lines[0]["divergence"] == pytest.approx(0, abs=1e-6)
    assert lines[0]["loss"] == pytest.approx(0.5 * lines[0]["cross_entropy"], rel=1e-5)
    assert lines[-1]["divergence"] > 1e-4


# On policy
# ----------------------------------------------------------------------------------------------------------------------


def test_on_policy_completions_follow_both_prompts(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lr=0 and greedy sampling, the targets are the student's likeliest tokens behind the prompt without a
    context, and the divergence is that from the likeliest tokens with it."""
    from lean_ft.online import OnPolicy

    seen, answered = [], OnPolicy.answered
    monkeypatch.setattr(OnPolicy, "answered", lambda *args: seen.append(answered(*args)) or seen[-1])
    settings = ("optimizer.lr=0", "max_steps=1", "generation.max_new_tokens=9", "generation.temperature=0")
    (line,) = train(*settings, "distill.on_policy=1", "gradient_accumulation_steps=2", "batch_size=2")
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path(MODEL), dtype=torch.float32)
    divergence, count = 0.0, 0
    for own, others, ids in [row for batch in seen[0] for row in sides(batch)]:
        with torch.no_grad():
            s, t = (
                model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                for prompt in (own, others)
            )
        assert s.argmax(-1).tolist() == ids
        divergence, count = divergence + float((t.exp() * (t - s)).sum()), count + len(ids)
    assert (line["token_accuracy"], line["target_tokens"]) == (1, count)
    assert line["loss"] == pytest.approx(divergence / count, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "padding_free"])
def test_completions_leave_room_for_the_context(train: Train, packing: str) -> None:
    lines = train(
        *("distill.on_policy=1", f"data.packing={packing}", "data.max_teacher_length=150", "generation.temperature=3"),
        *("max_steps=2", "generation.max_new_tokens=64", "data.max_length=96"),
    )
    for line in lines:  # the teacher's prompts have 111 to 118 tokens
        assert 4 <= line["target_tokens"] <= 4 * 39


# Plans
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_plan_counts_the_teachers_pass() -> None:
    def plan(*settings: str) -> Any:
        return planned("distill", *OWN, "model.dtype=float32", "batch_size=8", *settings)

    copied, off = plan("distill.teacher_kind=model"), plan("lora.rank=4")
    size = sum(parameter.nbytes for parameter in load_model(MODEL).parameters())
    weights = [one.peak.bytes_by_label["weights"] for one in (copied, off)]
    assert weights[0] - weights[1] == pytest.approx(size, rel=0.1)
    short, long = (plan("lora.rank=4", f"data.max_teacher_length={n}") for n in (96, 2048))
    assert long.peak_bytes > short.peak_bytes
    assert long.step_seconds > short.step_seconds


def test_the_preset_learns_the_calls_without_the_description(tmp_path: Path) -> None:
    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_preset
    from tests.recipes.conftest import recipe_module

    preset = find_preset("tiny/self_distill")
    given = ["device=cpu", "plan=false", "max_steps=8", "eval_every=8", f"output_dir={tmp_path / 'run'}"]
    recipe_module("distill").main(load_config(recipe_module("distill").Config, preset, given))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["cross_entropy"] > 0.4
    assert lines[-1]["eval_cross_entropy"] < 0.2
    assert lines[-1]["eval_loss"] < 0.1 * lines[0]["loss"]
