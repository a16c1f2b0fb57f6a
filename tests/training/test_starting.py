"""A run resumes only with matching settings; errors explain how to resume."""

import json
import shutil

import pytest

from lean_ft.settings.text import load_config
from lean_ft.system.run_directory import RecordedRun
from lean_ft.training.starting import hold_rate
from tests.settings.cases import load_recipe
from tests.training.toy_runs import digests, metrics


def restart(train, run, **settings):
    return train(run, **{"max_steps": 6, "save_every": 2, **settings})


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("setting", "value", "old", "new"),
    [
        ("batch_size", 3, "2", "3"),
        ("gradient_accumulation_steps", 1, "2", "1"),
        ("seed", 1, "0", "1"),
        ("optimizer.name", "adafactor", '"adamw"', '"adafactor"'),
        ("optimizer.in_backward", "true", "false", "true"),
        ("optimizer.betas", "[0.9,0.95]", r"\[0.9, 0.999\]", r"\[0.9, 0.95\]"),
        ("model.dtype", "bfloat16", '"float32"', '"bfloat16"'),
        ("num_rows", 9, "7", "9"),
    ],
)
def test_a_setting_that_makes_it_another_run_is_refused(setting, value, old, new, run, train):
    before = digests(run / "step_00000004")
    with pytest.raises(ValueError, match=rf"\n  {setting}: {old} then, {new} now\n.*new output_dir") as refusal:
        restart(train, run, **{setting.replace(".", "__"): value})
    assert "step_00000004 was written with other settings" in str(refusal.value)
    assert digests(run / "step_00000004") == before
    restart(train, run)  # the run is unchanged


def test_another_model_or_recipe_is_refused(run, train, model_folder, monkeypatch, tmp_path):
    shutil.copytree(model_folder, tmp_path / "other")
    with pytest.raises(ValueError, match=r"model\.path: .*other"):
        restart(train, run, model__path=tmp_path / "other")
    monkeypatch.setattr("lean_ft.training.starting.recipe_name", lambda cfg: "lora")
    with pytest.raises(ValueError, match=r'recipe: "toy_recipe" then, "lora" now'):
        restart(train, run)


@pytest.mark.long
def test_how_long_and_how_often_are_free(run, train, capsys):
    restart(train, run, save_every=3, eval_every=1, log_every=2, epochs=40)
    assert "changed" not in capsys.readouterr().out
    assert (run / "step_00000006").exists()


@pytest.mark.long
def test_what_moves_the_numbers_is_allowed_and_said(run, train, capsys):
    ratios = {"optimizer__lr_ratios": "{embed_tokens: 0.1}"}
    restart(train, run, optimizer__lr=0.5, clip_grad_norm=1.0, schedule__warmup_steps=2, **ratios)
    said = capsys.readouterr().out
    changed = ("optimizer.lr", "optimizer.lr_ratios", "clip_grad_norm", "schedule.warmup_steps")
    assert all(f"changed     {name}: " in said for name in changed)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_steps": 2}, ["max_steps: 4 then, 2 now"]),
        ({"max_steps": 4, "optimizer__lr": 0.5, "log_every": 3}, ["log_every: 1 then, 3 now", "optimizer.lr: "]),
        ({"max_steps": 5, "epochs": 1}, ["max_steps: 4 then, 5 now", "epochs: "]),  # an epoch has 4 steps
    ],
)
def test_a_complete_run_is_not_taken_for_one_with_other_settings(settings, named, run, train, capsys):
    before = digests(run)
    with pytest.raises(ValueError, match=r"holds a complete run of 4 steps with other settings:\n") as refusal:
        train(run, **{"save_every": 2, **settings})
    for change in named:
        assert f"\n  {change}" in str(refusal.value)
    assert "Set a new output_dir" in str(refusal.value)
    assert "complete  " not in capsys.readouterr().out
    assert digests(run) == before


def test_another_model_is_refused_even_before_the_first_checkpoint(train, interrupted, tmp_path, model_folder):
    interrupted(tmp_path / "run", 2)
    shutil.copytree(model_folder, tmp_path / "other")
    with pytest.raises(ValueError, match=r"holds another run.*\n  model.path"):
        train(tmp_path / "run", model__path=tmp_path / "other")
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.long
def test_never_refuses_a_directory_with_a_run(run, train, tmp_path):
    with pytest.raises(ValueError, match=r"holds a run, and resume=never"):
        restart(train, run, resume="never")
    restart(train, tmp_path / "new", resume="never")
    assert (tmp_path / "new/step_00000006").exists()


def test_a_path_continues_in_a_new_directory(run, train, tmp_path):
    whole = train(tmp_path / "whole", max_steps=6)
    branch = restart(train, tmp_path / "branch", resume=run / "step_00000002")
    assert digests(branch / "step_00000006") == digests(whole / "step_00000006")
    assert [row["step"] for row in metrics(branch) if "loss" in row] == [3, 4, 5, 6]
    start = json.loads((branch / "run.json").read_text())["starts"][0]
    assert (start["start_step"], start["resumed_from"]) == (2, str(run / "step_00000002"))


@pytest.mark.long
def test_a_branch_that_saved_nothing_begins_again(run, train, interrupted, tmp_path):
    interrupted(tmp_path / "branch", 3, resume=run / "step_00000002")
    branch = restart(train, tmp_path / "branch", resume=run / "step_00000002")
    assert [row["step"] for row in metrics(branch) if "loss" in row] == [3, 4, 5, 6]
    assert (branch / "metrics.previous.jsonl").exists()


def test_a_path_is_held_to_the_same_settings(run, train, tmp_path):
    with pytest.raises(ValueError, match="batch_size: 2 then, 3 now"):
        restart(train, tmp_path / "branch", resume=run / "step_00000002", batch_size=3)
    assert not (tmp_path / "branch").exists()


def test_a_path_does_not_bury_later_checkpoints(run, train, tmp_path):
    with pytest.raises(ValueError, match=r"would overwrite step_00000004"):
        restart(train, run, resume=run / "step_00000002")
    restart(train, run, resume=run / "step_00000004")  # auto uses the newest checkpoint
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    branch = restart(train, tmp_path / "branch", resume=run / "step_00000002")
    with pytest.raises(ValueError, match=r"would overwrite step_00000004, step_00000006.*resume=auto"):
        restart(train, branch, resume=run / "step_00000002")


def test_a_path_that_is_no_checkpoint(run, train, tmp_path, model_folder):
    cases = {
        tmp_path / "absent": "no such folder. Expected auto, never, or a checkpoint",
        run: r"It is a run directory. Its newest checkpoint is .*step_00000004",
        model_folder: "set model.path to its folder",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            restart(train, tmp_path / "branch", resume=path)


def test_output_dir_with_unrelated_files_is_refused(train, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("...")
    with pytest.raises(ValueError, match=r"files that do not belong to a run \(chapter.tex\)"):
        train(tmp_path / "thesis")
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    with pytest.raises(ValueError, match="is a file"):
        train(tmp_path / "thesis/chapter.tex")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/slurm-17.out").write_text("")  # a scheduler's log is no obstacle
    train(tmp_path / "run", max_steps=1)


def test_an_adapters_run_keeps_the_default_rate_that_it_began_with():
    given = ["model.path=tiny", "data.source=rows.jsonl", "lora={}"]
    started = RecordedRun(state={"settings": {"optimizer.lr": 2e-5}})  # before adapters had a default of their own

    def rate(earlier, *settings):
        config = load_config(load_recipe("finetune").Config, None, [*given, *settings])
        return hold_rate(config, earlier).optimizer.lr

    assert rate(RecordedRun()) == 2e-4
    assert rate(started) == 2e-5
    assert rate(started, "optimizer.lr=2e-4") == 2e-4
    assert rate(RecordedRun(state={"settings": {"optimizer.lr": 1e-3}})) == 2e-4, "that run's own value is no default"
