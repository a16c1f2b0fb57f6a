"""Runs: bitwise equal results across restarts, and a consistent state after every kind of end."""

import itertools
import json
import pickletools
import zipfile
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.settings.text import load_config
from lean_ft.training.bad_steps import TrainingFailed
from tests.training.toy_runs import TIMES, digests, metrics

FIELDS = {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "target_tokens", *TIMES} - {"sampling_seconds"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    """An uninterrupted run of 12 steps that saves after every step."""
    return train(tmp_path_factory.mktemp("whole") / "run", save_every=1)


@pytest.mark.first(1)
@pytest.mark.parametrize("step", range(1, 12))
def test_resumed_at_any_step_equals_uninterrupted(step, whole, train, tmp_path, capsys):
    # max_steps ends the first part like a scheduler's time limit: the state is saved and the process ends.
    train(tmp_path / "run", max_steps=step)
    train(tmp_path / "run")
    assert f"after step {step} of 12" in capsys.readouterr().out
    assert digests(tmp_path / "run/step_00000012") == digests(whole / "step_00000012")
    trained = [row for row in metrics(tmp_path / "run", timed=False) if "loss" in row]
    assert trained == [row for row in metrics(whole, timed=False) if "loss" in row]


def test_metrics_have_the_promised_fields(whole, train, tmp_path):
    rows = metrics(train(tmp_path / "run", eval_every=5))
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 13))
    assert all(row.keys() == FIELDS for row in trained)
    assert [row["epoch"] for row in trained] == [step / 2 for step in range(1, 13)]
    # 7 rows of 8 positions in batches of 2: a step of two batches, then one of 2 + 1 rows.
    assert [row["tokens"] for row in trained[:2]] == [32, 24]
    assert [row["target_tokens"] for row in trained[:2]] == [30, 22]
    for row in trained:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["step_seconds"])
        assert row["target_tokens_per_second"] == pytest.approx(row["target_tokens"] / row["step_seconds"])
        assert row["peak_memory_bytes"] >= row["rss_bytes"] * 0.98 > 50e6
    evaluations = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [5, 10, 12]
    assert evaluations[0] == {"step": 5, "epoch": 2.5, "eval_loss": 1.5, "num_eval_tokens": 12}
    assert rows.index(evaluations[0]) == 5  # right after its step's line


@pytest.mark.long
def test_growth_of_memory_counts_from_the_step_at_which_it_has_settled(train, tmp_path, monkeypatch, capsys):
    resident = itertools.count(2**26, 2**20)
    monkeypatch.setattr("lean_ft.training.metrics.own_rss_bytes", lambda: next(resident))
    monkeypatch.setattr("lean_ft.training.metrics.SETTLED_STEPS", 3)
    rows = [row for row in metrics(train(tmp_path / "run")) if "loss" in row]
    assert [row["rss_growth_bytes"] for row in rows] == [None, None, *(n * 2**20 for n in range(10))]
    assert "resident +9.0 MiB since step 10" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("log_every", [3, 5, 100])
def test_seldom_written_metrics_are_the_same_lines(log_every, whole, train, tmp_path):
    rows = metrics(train(tmp_path / "run", log_every=log_every), timed=False)
    assert rows == metrics(whole, timed=False)


LIMITS = [  # of a run with 2 steps per epoch: settings, its steps, what ends it, and a larger value that extends it
    ({"epochs": 2}, 4, "epochs", {"epochs": 3}),
    ({"epochs": 1.1}, 3, "epochs", {"epochs": 2}),
    ({"epochs": 2, "max_steps": 3}, 3, "max_steps", {"max_steps": 4}),
    ({"epochs": 2, "max_steps": 4}, 4, "max_steps and epochs", {"max_steps": 5, "epochs": 3}),
    ({"epochs": 2, "max_steps": 7}, 4, "epochs (max_steps=7 needs epochs=4)", {"epochs": 4}),
    ({"epochs": 0.5, "max_steps": 8}, 1, "epochs (max_steps=8 needs epochs=4)", {"epochs": 4}),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("bounds", "steps", "limits", "more"), LIMITS, ids=str)
def test_a_run_names_the_limit_that_ends_it_and_its_advice_extends_it(
    bounds, steps, limits, more, train, tmp_path, capsys
):
    run, trained = tmp_path / "run", lambda: len([row for row in metrics(run) if "loss" in row])
    for _ in range(2):  # the second start trains nothing
        train(run, **bounds)
        assert trained() == steps
        said = capsys.readouterr().out
        assert f"{steps} step{'s' * (steps > 1)} done, limited by {limits}" in said
    assert f"To continue training, raise {limits}. To" in said
    if "needs" in limits:  # a larger max_steps alone would change nothing
        with pytest.raises(ValueError, match=r"raise epochs \(max_steps=50 needs epochs=25\) to extend that run"):
            train(run, **bounds | {"max_steps": 50})
    train(run, **bounds | more)
    assert trained() == (bounds | more).get("max_steps", 2 * (bounds | more)["epochs"]) > steps


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("step_seconds", "save_seconds", "saved"),
    [
        (1, 0.4, [2, 6, 10, 12]),  # saving takes a tenth of the time
        (1, 0, [2, 4, 6, 8, 10, 12]),  # after each epoch
        (1000, 0, [2, 4, 6, 8, 10, 12]),
        (2000, 0, list(range(1, 13))),  # every 30 minutes
        (1, 0.2, [2, 4, 6, 8, 10, 12]),
        (1, 100, [2, 12]),
    ],
)
def test_left_to_itself_a_run_saves_often_enough_and_keeps_the_last_two(
    step_seconds, save_seconds, saved, train, recipe, monkeypatch, tmp_path, capsys
):
    from lean_ft.training import checkpoints as module

    seconds = [0.0]
    take, write = recipe.Batches.take, module.write_checkpoint
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    def passing(function, amount):
        def call(*args, **given):
            seconds[0] += amount
            return function(*args, **given)

        return call

    monkeypatch.setattr(recipe.Batches, "take", passing(take, step_seconds))
    monkeypatch.setattr(module, "write_checkpoint", passing(write, save_seconds))
    run = train(tmp_path / "run", save_every="auto")
    out = capsys.readouterr().out
    assert [int(line.split("step_")[1].split()[0]) for line in out.splitlines() if line.startswith("saved ")] == saved
    assert sorted(p.name for p in run.glob("step_*")) == [f"step_{step:08d}" for step in saved[-2:]]
    assert "save_every=auto; checkpoints kept: 2" in out
    assert len(saved) < 3 or "(save_every=auto)" in out


def raise_at(call, where, function):
    """Return the function with an error in call number `call`, counted from 0, before or after its work."""
    count = iter(range(10**6))

    def failing(*args, **given):
        fails = next(count) == call
        if fails and where == "before":
            raise KeyError("the loop's body failed")
        result = function(*args, **given)
        if fails:
            raise KeyError("the loop's body failed")
        return result

    return failing


@pytest.mark.first
@pytest.mark.parametrize("in_backward", ["false", "true"])
@pytest.mark.parametrize(
    ("name", "call", "where", "saved"),
    [
        ("lean_ft.optim.optimizer.Optimizer.apply_rules", "last", "before", "unless in backward"),
        ("lean_ft.training.run.Run.evaluation_due", 5, "after", 6),
        ("torch.nn.functional.cross_entropy", 1, "after", 0),  # in the 1st step: there is nothing to save
        ("tests.training.toy_recipe.Batches.take", 5, "after", 5),
        ("torch.nn.functional.cross_entropy", 11, "after", 5),  # gradients of one of two micro-batches
        ("lean_ft.optim.optimizer.Optimizer.apply_rules", "last", "after", None),
        ("lean_ft.optim.optimizer.Optimizer.zero_grad", 5, "after", None),
        ("lean_ft.training.run.Run.log", 5, "before", None),
    ],
)
def test_a_loop_that_fails_has_saved_what_is_whole(
    name, call, where, saved, in_backward, whole, train, monkeypatch, tmp_path, capsys
):
    """The saved state is bitwise equal to the uninterrupted run's. Nothing is saved during an update."""
    from operator import attrgetter

    if saved == "unless in backward":  # the other parameters are already updated
        saved = None if in_backward == "true" else 5
    module, _, attribute = name.rpartition(".")
    owner = attrgetter(module.removeprefix("torch."))(torch) if module.startswith("torch.") else None
    if owner is None:
        path, _, kind = module.rpartition(".")
        owner = getattr(__import__(path, fromlist=[kind]), kind)
    if call == "last":  # of step 6: one call per step, or one per parameter
        parameters = 14 if in_backward == "true" else 1
        call = 6 * parameters - 1
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, raise_at(call, where, getattr(owner, attribute)))
        with pytest.raises(KeyError):
            train(tmp_path / "run", optimizer__in_backward=in_backward)
    names = [p.name for p in (tmp_path / "run").glob("step_*")]
    assert names == ([f"step_{saved:08d}"] if saved else [])
    out = capsys.readouterr().out
    assert ("not saved   step 6 was interrupted during its update" in out) == (saved is None)
    train(tmp_path / "run", optimizer__in_backward=in_backward)
    assert digests(tmp_path / "run/step_00000012") == digests(whole / "step_00000012")


@pytest.mark.long
def test_the_last_evaluation_finds_everything_saved(train, recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(recipe.Run, "log_evaluation", raise_at(0, "before", recipe.Run.log_evaluation))
    monkeypatch.setattr(recipe.Run, "_save_complete_steps", lambda self: None)  # as if killed
    with pytest.raises(KeyError):
        train(tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").glob("step_*")] == ["step_00000012"]


@pytest.mark.parametrize(("num_calls", "message"), [(0, "Step 1 ended without run.log"), (2, "twice in one step")])
def test_a_recipe_logs_each_step_once(num_calls, message, train, recipe, monkeypatch, tmp_path):
    log = recipe.Run.log
    monkeypatch.setattr(recipe.Run, "log", lambda self, **given: [log(self, **given) for _ in range(num_calls)])
    with pytest.raises(RuntimeError, match=message):
        train(tmp_path / "run")


@pytest.mark.long
def test_the_run_ends_where_evaluations_stop_getting_better(train, recipe, monkeypatch, tmp_path, capsys):
    losses = [0, 3.0, 2.0, None, 2.0, 2.5, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]  # by step
    log_evaluation = recipe.Run.log_evaluation

    def log(self, **_):
        log_evaluation(self, float("nan") if losses[self._step] is None else losses[self._step])

    monkeypatch.setattr(recipe.Run, "log_evaluation", log)
    settings = {"eval_every": 1, "stop_after_evals": 3}
    for output in ("whole", "parts"):
        if output == "parts":
            train(tmp_path / output, **settings, max_steps=4, save_every=1)
        capsys.readouterr()
        run = train(tmp_path / output, **settings)
        assert max(row["step"] for row in metrics(run)) == 5
        said = (
            "ended       stopped early, after step 5: the held-out loss has not been below 2 since step 2 "
            "(stop_after_evals=3)"
        )
        assert said in capsys.readouterr().out
    assert digests(tmp_path / "whole/step_00000005") == digests(tmp_path / "parts/step_00000005")
    train(run, **settings)
    assert "complete    stopped early, after step 5" in (out := capsys.readouterr().out)
    assert "began step" not in out
    train(run, eval_every=1, stop_after_evals=4)  # a higher limit continues the run
    assert max(row["step"] for row in metrics(run)) == 10


@pytest.mark.long
def test_a_run_that_is_all_warm_up_is_warned_of(train, tmp_path, capsys):
    train(tmp_path / "a", max_steps=4, schedule__warmup_steps=20)
    assert (
        "the whole run is warm-up: it has 4 steps and 20 warm-up steps, so the learning rate stays at or below 0.0015"
        in (capsys.readouterr().out)
    )
    run = train(tmp_path / "b", max_steps=4, schedule__warmup_ratio=0.5)
    assert "is warm-up" not in (out := capsys.readouterr().out)
    assert "lr 0.01 after 2 warm-up steps" in out
    assert [row["lr"] for row in metrics(run) if "loss" in row] == [0.0, 0.005, 0.01, 0.01]


def test_nothing_is_pickled(train, tmp_path):
    for path in train(tmp_path / "run", max_steps=2).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not zipfile.is_zipfile(path), path
            with pytest.raises(Exception):  # noqa: B017  pickletools raises what it likes
                list(pickletools.genops(content))
            if path.suffix == ".safetensors":
                load_file(path)


def test_a_checkpoint_is_a_hugging_face_folder(train, tmp_path, model_folder):
    transformers = pytest.importorskip("transformers")
    checkpoint = train(tmp_path / "run", max_steps=3) / "step_00000003"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float32
    assert json.loads((checkpoint / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert (checkpoint / "tokenizer.json").exists()
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())


@pytest.mark.long
def test_a_finished_run_started_again_trains_nothing(train, tmp_path, capsys):
    run = train(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    train(run)
    said = capsys.readouterr().out
    assert "complete    12 steps done, limited by" in said
    assert "began step" not in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }


@pytest.mark.long
def test_extending_a_schedule_that_ends_is_said(train, tmp_path, capsys):
    train(tmp_path / "run", epochs=3, schedule__name="cosine")
    train(tmp_path / "run", epochs=4, schedule__name="cosine")
    assert "6 then, 8 now. schedule.name=cosine" in capsys.readouterr().out


@pytest.mark.long
def test_a_wsd_run_is_extended_exactly_from_before_its_decay(train, tmp_path, capsys):
    """8 steps decay from step 6 on. From the checkpoint after step 4, the run to step 12 equals one of 12 steps."""
    wsd = {"schedule__name": "wsd", "schedule__decay": 2, "schedule__warmup_steps": 2}
    short = train(tmp_path / "short", max_steps=8, save_every=4, **wsd)
    capsys.readouterr()
    long = train(tmp_path / "long", max_steps=12, resume=short / "step_00000004", **wsd)
    assert "changed" not in capsys.readouterr().out
    whole = train(tmp_path / "whole", max_steps=12, **wsd)
    assert digests(long / "step_00000012") == digests(whole / "step_00000012")
    train(tmp_path / "short", max_steps=12, save_every=4, **wsd)
    assert "8 then, 12 now. schedule.name=wsd uses the new total" in capsys.readouterr().out


@pytest.mark.long
def test_a_schedule_of_ones_own_fails_before_the_first_step(train, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def fn(step, total_steps):\n    return 1 / (total_steps - 1 - step)\n")
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", schedule__name=f"{tmp_path / 'mine.py'}:fn")
    assert "began step" not in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("def fn(step, total_steps):\n    return 0.5 + step\n")
    run = train(tmp_path / "run", schedule__name=f"{tmp_path / 'mine.py'}:fn")
    assert [row["lr"] for row in metrics(run) if "lr" in row] == pytest.approx(
        [0.005 + 0.01 * step for step in range(12)]
    )
    assert "mine.py" in (run / "config.yaml").read_text().partition("hash of")[2]


def test_metrics_are_trimmed_to_the_checkpoint(whole, train, interrupted, tmp_path):
    """If a run dies after its last checkpoint, resuming removes the lines written since."""
    run = interrupted(tmp_path / "run", 8, save_every=3)
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # torn by the crash
    train(run, save_every=3)
    assert metrics(run, timed=False) == metrics(whole, timed=False)


def test_lines_not_yet_written_survive_a_failing_body(interrupted, tmp_path):
    run = interrupted(tmp_path / "run", 4, killed=False, log_every=100)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]


def test_a_failed_start_without_checkpoint_keeps_its_metrics_aside(interrupted, train, tmp_path, capsys):
    first = (interrupted(tmp_path / "run", 2) / "metrics.jsonl").read_bytes()
    train(tmp_path / "run", batch_size=4)  # as after running out of memory: other settings, same directory
    assert (tmp_path / "run/metrics.previous.jsonl").read_bytes() == first
    assert "saved no checkpoint" in capsys.readouterr().out


@pytest.mark.first(1)
@pytest.mark.parametrize("log_every", [1, 4])
def test_one_bad_step_more_than_allowed_stops_the_run(log_every, config, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "BAD_STEP", 4)
    with pytest.raises(
        TrainingFailed, match=r"(?s)1 step of this run had .* not finite .*: 5\), more than max_bad_steps=0"
    ):
        recipe.main(config(tmp_path / "run", save_every=2, max_steps=9, log_every=log_every, max_bad_steps=0))
    rows = metrics(tmp_path / "run")
    assert rows[4]["loss"] is None
    assert (rows[4]["non_finite"]["loss"], rows[4]["skipped"]) == ("inf", True)
    # The step is detected when its line is written. The weights, without that step, are saved then.
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*"))[-1] == f"step_0000000{5 if log_every == 1 else 6}"


def test_a_disk_too_small_is_refused_before_training(config, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("lean_ft.training.checkpoints.free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match=r"A checkpoint of this run needs up to 2.0 MiB.*1000 B free"):
        recipe.main(config(tmp_path / "run"))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(config, recipe, train, tmp_path, monkeypatch):
    free = iter([2**30, 2**30, 1000])
    monkeypatch.setattr("lean_ft.training.checkpoint.free_bytes", lambda _: next(free))
    with pytest.raises(TrainingFailed, match=r"checkpoint of step 9 was not written: it needs .*Nothing was written"):
        recipe.main(config(tmp_path / "run", save_every=3))
    names = sorted(p.name for p in (tmp_path / "run").iterdir() if "step" in p.name)
    assert names == ["step_00000003", "step_00000006"]
    monkeypatch.undo()
    train(tmp_path / "run", save_every=3)  # the run continues once there is free space


def test_config_yaml_loads_again_and_tells_where_it_came_from(recipe, train, config, tmp_path):
    run = train(tmp_path / "run", max_steps=1)
    assert load_config(recipe.Config, run / "config.yaml", []) == config(run, max_steps=1)
    text = (run / "config.yaml").read_text()
    start = json.loads((run / "run.json").read_text())["starts"][0]
    assert start["torch"] == torch.__version__
    assert start["data_fingerprint"] == "7 rows"
    for name in ("lean_ft", "python", "torch", "git_commit", "data_fingerprint"):
        assert f"#   {name}: {start[name]}\n" in text
