"""When a run saves, which checkpoints it keeps, and saving in the background."""

import threading

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.models import load_model
from lean_ft.settings.text import load_config
from lean_ft.system.run_directory import list_checkpoints
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.bad_steps import TrainingFailed
from lean_ft.training.checkpoints import kept_steps, most_checkpoints
from lean_ft.training.length import Length
from recipes import finetune
from tests.training.test_checkpoint import flip_a_byte
from tests.training.toy_runs import digests, metrics


@pytest.mark.parametrize(
    ("every", "steps_per_epoch", "due"),
    [
        (0, 5, []),
        (1, 5, list(range(1, 13))),
        (5, 7, [5, 10]),
        ("epoch", 5, [5, 10]),
        (0.5, 5, [3, 5, 8, 10]),  # at half of each epoch, rounded up, and at its end
        (0.1, 10, list(range(1, 13))),
        (0.3, 10, [3, 6, 9, 12]),
        (0.1, 3, list(range(1, 13))),  # more saves than steps
    ],
)
def test_what_is_due(every, steps_per_epoch, due, config, tmp_path):
    length = Length(config(tmp_path, gradient_accumulation_steps=1), steps_per_epoch)
    assert [step for step in range(1, 13) if length.is_due(every, step)] == due
    if steps_per_epoch > 3:
        assert length.num_due(every, 12) == len(due)


def test_the_newest_the_multiples_and_the_best_stay(config, tmp_path):
    losses = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: float("nan"), 60: 2.0}

    def kept(**settings):
        return kept_steps(losses, config(tmp_path, **settings))

    assert kept() == set(losses)
    assert kept(keep_last=2) == {50, 60}
    assert kept(keep_last=1, keep_every=30) == {30, 60}
    assert kept(keep_last=1, keep_best=2) == {20, 40, 60}
    assert kept(keep_last=1, keep_best=9) == {10, 20, 40, 60}
    assert kept(save_every="auto") == {50, 60}
    assert kept(save_every="auto", keep_last=1, keep_every=30) == {30, 60}


@pytest.mark.first(1)
@pytest.mark.parametrize("save_async", ["false", "true"])
def test_a_run_keeps_what_it_was_told_to(save_async, train, recipe, monkeypatch, tmp_path, capsys):
    log_evaluation = recipe.Run.log_evaluation
    monkeypatch.setattr(  # lowest after step 6
        recipe.Run, "log_evaluation", lambda self, **_: log_evaluation(self, abs(self._done_steps + 1 - 6.1))
    )
    settings = {"save_every": 2, "eval_every": 2, "keep_last": 1, "keep_every": 8, "keep_best": 1}
    run = train(tmp_path / "run", save_async=save_async, **settings)
    names = [p.name for p in list_checkpoints(run)]
    assert names == ["step_00000006", "step_00000008", "step_00000012"]
    assert not list(run.glob(".step_*"))
    assert "removed     step_00000010 (keep_last=1)" in capsys.readouterr().out
    assert digests(run / names[-1]) == digests(train(tmp_path / "all", eval_every=2) / names[-1])


@pytest.mark.long
def test_a_damaged_later_checkpoint_counts_for_nothing(train, tmp_path):
    """Otherwise the newest complete checkpoint would be deleted."""
    run = train(tmp_path / "run", max_steps=8, save_every=2)
    for step in (6, 8):
        flip_a_byte(run / f"step_0000000{step}/model.safetensors")
    train(run, max_steps=5, keep_last=1)
    assert [p.name for p in list_checkpoints(run)] == ["step_00000005", "step_00000006", "step_00000008"]
    train(run, max_steps=8, save_every=2, keep_last=1)
    assert [p.name for p in list_checkpoints(run)] == ["step_00000008"]


def test_room_is_asked_for_what_is_kept_and_one_more(config, tmp_path):
    def most(**settings):
        return most_checkpoints(
            Length(config(tmp_path, gradient_accumulation_steps=1, epochs=9, max_steps=100, **settings), 30), 0
        )

    assert most() == 1
    assert most(save_every=10) == 10
    assert most(save_every=10, keep_last=2) == 3
    assert most(save_every=10, keep_last=1, keep_every=50) == 4
    assert most(save_every=60, keep_last=5) == 2
    assert most(save_every="epoch") == 4  # 30, 60, 90 and the last step
    assert most(save_every=0.5) == 7
    assert most(save_every="auto") == 3


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings", [["optimizer.ema=0.9"], ["optimizer.in_backward=true", "optimizer.name=adamw_8bit"]], ids=str
)
def test_checkpoints_are_those_of_a_run_that_waits(settings, train_real, tmp_path):
    settings = [*settings, "save_every=1", "max_steps=4"]
    waited = train_real(tmp_path / "waited", *settings)
    run = train_real(tmp_path / "run", *settings, "save_async=true")
    assert [p.name for p in list_checkpoints(run)] == [p.name for p in list_checkpoints(waited)]
    for folder in list_checkpoints(waited):
        assert digests(run / folder.name) == digests(folder)
    assert metrics(run, timed=False) == metrics(waited, timed=False)


@pytest.mark.first(1)
@pytest.mark.parametrize(("dtype", "lora"), [("bfloat16", []), ("float32", ["lora.rank=4"])])
def test_averaged_weights_are_a_folder_in_the_checkpoint(dtype, lora, inputs, tmp_path):
    """The folder is read like any model's, and has the averages of the optimizer's state in the weights' dtype."""
    settings = [f"model.dtype={dtype}", *lora, "optimizer.ema=0.9", "max_steps=3", "schedule.name=constant"]
    settings += [f"model.path={inputs}", "model.random_init=true", f"data.source={inputs / 'rows.jsonl'}", "device=cpu"]
    finetune.main(load_config(finetune.Config, None, [*settings, f"output_dir={tmp_path / 'run'}"]))
    checkpoint = tmp_path / "run" / "step_00000003"
    averages = load_file(checkpoint / "training_state" / "optimizer.safetensors")
    averages = {name.removesuffix(".ema"): value for name, value in averages.items() if name.endswith(".ema")}
    if lora:
        saved = load_file(checkpoint / "ema" / "adapter_model.safetensors")
        saved = {name.removeprefix("base_model.model."): value for name, value in saved.items()}
        for name, value in averages.items():
            assert torch.equal(saved[f"{name}.weight"], value)
        assert len(saved) == len(averages)
        return
    model = load_model(checkpoint / "ema", dtype=torch.bfloat16)
    last = dict(load_model(checkpoint, dtype=torch.bfloat16).named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, averages[name].bfloat16())
    assert any(not torch.equal(param, last[name]) for name, param in model.named_parameters())
    assert load_tokenizer(checkpoint / "ema").encode("a") == load_tokenizer(checkpoint).encode("a")


def test_training_goes_on_meanwhile_and_the_last_save_waits(config, recipe, monkeypatch, tmp_path):
    """Step 2's checkpoint can only finish after step 3 has begun."""
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
    train(tmp_path / "run", max_steps=3)  # the lock is released
