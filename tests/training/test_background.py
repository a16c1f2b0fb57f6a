"""Saving while training goes on writes what a run that waits writes."""

import threading

import pytest
import torch

from lean_ft.memory import apply_memory
from lean_ft.models import load_model
from lean_ft.settings import MemoryConfig
from lean_ft.training.background import BackgroundWriter, host_copy
from lean_ft.training.bad_steps import TrainingFailed
from lean_ft.training.checkpoint import list_checkpoints
from tests.training.toy_runs import digests, metrics


@pytest.mark.parametrize("settings", [[], ["optimizer.in_backward=true", "optimizer.name=adamw_8bit"]], ids=str)
def test_checkpoints_are_those_of_a_run_that_waits(settings, train_real, tmp_path):
    waited = train_real(tmp_path / "waited", *settings, "save_every=1")
    run = train_real(tmp_path / "run", *settings, "save_every=1", "save_async=true")
    assert [p.name for p in list_checkpoints(run)] == [p.name for p in list_checkpoints(waited)]
    for folder in list_checkpoints(waited):
        assert digests(run / folder.name) == digests(folder)
    assert metrics(run, timed=False) == metrics(waited, timed=False)


def test_training_goes_on_meanwhile_and_the_last_save_waits(config, recipe, monkeypatch, tmp_path):
    """Step 2's checkpoint can only be finished once step 3 has begun."""
    began, finished = threading.Event(), []
    save, take = recipe.Tokenizer.save, recipe.Batches.take
    calls = iter(range(100))

    def slow(self, path):
        if path.name.startswith(".step_00000002"):
            assert began.wait(timeout=60)
        save(self, path)
        finished.append(path.name[:14])

    def noted(self, count):
        if next(calls) == 2:
            began.set()
        return take(self, count)

    monkeypatch.setattr(recipe.Tokenizer, "save", slow)
    monkeypatch.setattr(recipe.Batches, "take", noted)
    recipe.main(config(tmp_path / "run", save_every=2, max_steps=5, save_async="true"))
    assert finished == [".step_00000002", ".step_00000004", ".step_00000005"]
    assert not [t for t in threading.enumerate() if t.name == "checkpoint writer"]


def test_an_error_ends_the_run_after_a_later_step(config, recipe, train, monkeypatch, tmp_path):
    def fail(self, path):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recipe.Tokenizer, "save", fail)
        with pytest.raises(TrainingFailed, match="checkpoint of step 2 was not written: No space left"):
            recipe.main(config(tmp_path / "run", save_every=2, max_steps=9, save_async="true"))
    assert not list((tmp_path / "run").glob("*step_*"))
    assert 2 <= len(metrics(tmp_path / "run")) <= 4
    train(tmp_path / "run", max_steps=3)  # the lock is free


def test_a_host_copy_is_no_view_and_shares_what_is_frozen(model_folder):
    model = load_model(model_folder, random_init=True)
    frozen = next(model.parameters()).requires_grad_(False)
    apply_memory(model, MemoryConfig(activation_checkpointing="full"), compile=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: pytest.fail("hooks stay with the model"))
    copy = host_copy(model)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), copy.named_parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.data_ptr() == theirs.data_ptr()) == (ours is frozen), name
        assert not theirs._post_accumulate_grad_hooks
    assert copy.source.config == model.source.config


def test_the_next_write_waits_and_errors_come_out_once():
    writer, order = BackgroundWriter(), []
    gate = threading.Event()

    def first():
        gate.wait(timeout=60)
        order.append(1)
        raise OSError("first")

    writer.start(first)
    writer.check()  # still writing
    gate.set()
    with pytest.raises(OSError, match="first"):
        writer.start(lambda: order.append(2))
    writer.start(lambda: order.append(3))
    writer.wait()
    writer.wait()
    assert order == [1, 3]
