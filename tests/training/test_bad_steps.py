"""NaN and infinite values in the real recipe: no weight becomes NaN, and every such step is reported."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.data.batches import Batches
from lean_ft.losses import cross_entropy
from lean_ft.training.bad_steps import BadSteps, TrainingFailed
from recipes import full_finetune_single_device as recipe
from tests.training.toy_runs import metrics


@pytest.fixture
def poison(monkeypatch):
    """Make the losses of these calls NaN, counted from 0. The run has 3 steps over 13 rows, with two micro-batches
    each."""

    def at(*calls):
        real, count = cross_entropy.linear_cross_entropy, iter(range(10**6))

        def loss(*args, **kwargs):
            value = real(*args, **kwargs)
            return value * math.nan if next(count) in calls else value

        monkeypatch.setattr(cross_entropy, "linear_cross_entropy", loss)

    return at


def weights(run, step):
    return load_file(run / f"step_{step:08d}/model.safetensors")


def optimizer_state(run, step):
    return load_file(run / f"step_{step:08d}/training_state/optimizer.safetensors")


@pytest.mark.first(2)
@pytest.mark.parametrize("bad_micro_batch", [0, 1])
@pytest.mark.parametrize("settings", [[], ["optimizer.in_backward=true"], ["model.dtype=float16"]], ids=str)
def test_a_step_whose_loss_is_not_finite_leaves_weights_and_state_as_they_were(
    settings, bad_micro_batch, poison, train_real, tmp_path, capsys
):
    poison(2 + bad_micro_batch)
    run = train_real(tmp_path / "run", *settings, "max_steps=4", "save_every=1", "log_every=3")
    assert all(torch.equal(a, weights(run, 1)[name]) for name, a in weights(run, 2).items())
    before, after = optimizer_state(run, 1), optimizer_state(run, 2)
    assert {name for name, tensor in after.items() if not torch.equal(tensor, before[name])} == {"skipped_steps"}
    assert not all(torch.equal(a, weights(run, 2)[name]) for name, a in weights(run, 3).items())
    rows = metrics(run)
    assert rows[1]["loss"] is None
    assert rows[1]["skipped"] is True
    assert rows[1]["non_finite"]["loss"] == "nan"
    assert "skipped" not in rows[0] | rows[2]
    assert "bad step    step 2: loss is nan" in capsys.readouterr().out

    kept = load_file(run / "bad_batches/step_00000002.safetensors")
    assert kept["1.input_ids"].shape == kept["1.labels"].shape
    report = json.loads((run / "bad_batches/step_00000002.json").read_text())
    assert report["metrics"]["step"] == 2
    assert "times" in report["texts"][0][0]
    assert len(list((run / "bad_batches").iterdir())) == 2


@pytest.mark.first(1)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_gradient_that_is_not_finite_reaches_no_weight(in_backward, train_real, monkeypatch, tmp_path):
    """The loss is finite. With updates in backward, the other parameters are already updated and this gradient is
    zeroed."""
    real = recipe.load_model
    count = iter(range(100))

    def load_model(*args, **kwargs):
        model = real(*args, **kwargs)
        bad = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        bad.register_hook(lambda grad: grad * (math.inf if next(count) == 3 else 1.0))  # step 2's second micro-batch
        return model

    monkeypatch.setattr(recipe, "load_model", load_model)
    settings = ["optimizer.name=sgd", f"optimizer.in_backward={in_backward}", "max_steps=3", "save_every=1"]
    run = train_real(tmp_path / "run", *settings)
    moved = {name for name, tensor in weights(run, 2).items() if not torch.equal(tensor, weights(run, 1)[name])}
    assert "model.layers.0.mlp.up_proj.weight" not in moved
    assert bool(moved) == in_backward
    assert all(tensor.isfinite().all() for tensor in weights(run, 3).values())
    row = metrics(run)[1]
    assert row["loss"] is not None
    assert row["grad_norm"] is None
    assert row.get("skipped", False) != in_backward
    assert (run / "bad_batches/step_00000002.json").exists()


@pytest.mark.long
def test_too_many_bad_steps_end_the_run_with_its_weights_saved(poison, train_real, tmp_path):
    poison(*range(2, 8))
    with pytest.raises(
        TrainingFailed, match=r"2 steps .* 2, 3\), more than max_bad_steps=1.*newest .*step_00000003"
    ) as e:
        train_real(tmp_path / "run", "max_bad_steps=1", "max_steps=6")
    assert "Set a larger max_bad_steps to continue anyway" in str(e.value)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run", 3).values())
    # The run's restarts share the count, and the limit may be raised.
    with pytest.raises(TrainingFailed, match=r"^3 steps of this run"):
        train_real(tmp_path / "run", "max_bad_steps=2", "max_steps=6")
    poison()
    train_real(tmp_path / "run", "max_bad_steps=9", "max_steps=6")
    assert (tmp_path / "run/step_00000006").exists()


def test_weights_that_are_not_finite_are_not_saved(train_real, monkeypatch, tmp_path):
    """If the recipe itself makes weights NaN, the last good checkpoint stays the newest."""
    real = recipe.build_optimizer

    def build(model, cfg):
        optimizer = real(model, cfg)
        step = optimizer.step

        def poisoned():
            step()
            if optimizer.step_count == 2:
                next(model.parameters()).data.fill_(math.nan)

        optimizer.step = poisoned
        return optimizer

    monkeypatch.setattr(recipe, "build_optimizer", build)
    with pytest.raises(TrainingFailed, match=r"weights are not finite after step 4.*newest .*step_00000002"):
        train_real(tmp_path / "run", "save_every=2")
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000002"]


def test_overflows_that_the_loss_scale_is_there_for_are_no_bad_steps(tmp_path):
    steps = BadSteps(tmp_path, None, max_bad_steps=0)
    row = {"step": 1, "loss": 2.0, "grad_norm": None, "non_finite": {"grad_norm": "inf"}, "skipped": True}
    steps.look_at(row, loss_scale=2.0**15)
    assert not steps.count
    steps.look_at(row, loss_scale=1.0)
    assert steps.too_many


@pytest.mark.parametrize(("losses", "times_said"), [([math.log(64)] * 25, 1), ([math.log(64), 4.2] * 12, 0)])
def test_a_model_that_predicts_nothing_is_told_of_once(losses, times_said, tmp_path, capsys):
    steps = BadSteps(tmp_path, None, max_bad_steps=0, vocab_size=64)
    for step, loss in enumerate(losses, 1):
        steps.look_at({"step": step, "loss": loss, "grad_norm": 1.0})
    assert capsys.readouterr().out.count("the model predicts nothing: for 10 steps") == times_said


@pytest.mark.first(1)
@pytest.mark.parametrize("settings", [[], ["optimizer.in_backward=true"]], ids=str)
def test_of_a_masked_out_step_nothing_was_measured_and_it_is_no_bad_one(
    settings, train_real, monkeypatch, tmp_path, capsys
):
    take = Batches.take
    count = iter(range(100))

    def masked(self, n):
        batches = take(self, n)
        if next(count) != 1:
            return batches
        return [replace(one.built, labels=torch.full_like(one.labels, -100), num_targets=0) for one in batches]

    monkeypatch.setattr(Batches, "take", masked)
    run = train_real(tmp_path / "run", *settings, "max_steps=3")
    row = metrics(run)[1]
    assert (row["loss"], row["target_tokens"], row["grad_norm"]) == (None, 0, 0.0)
    assert not {"token_accuracy", "entropy", "non_finite"} & row.keys()
    assert "not finite" not in (said := capsys.readouterr().out)
    assert not (run / "bad_batches").exists()
    assert "2 micro-batches had no target tokens" in said
