"""Signals sent to a training process."""

import os
import pty
import shlex
import signal
import sys
import time

import pytest
import torch

from lean_ft.data.batches import ArrangedDocuments
from lean_ft.settings.text import load_config
from tests.parallel.processes import FORKS
from tests.training import toy_recipe
from tests.training.toy_runs import RECIPE, digests, metrics


@pytest.fixture
def launch(overrides, tmp_path):
    """Start the toy recipe in its own process. Return it when its 3rd step, which is slow, has begun."""
    started = []

    def start(output_dir, sleep_seconds=30.0, **settings):
        arguments = (overrides(output_dir, **settings), sleep_seconds, tmp_path / "out", tmp_path / "err")
        started.append(FORKS.Process(target=run_toy_recipe, args=arguments))
        started[-1].start()
        wait_for(tmp_path / "out", "began step 2\n", started[-1])
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def run_toy_recipe(arguments, sleep_seconds, out, err):
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    toy_recipe.SLEEP_SECONDS = sleep_seconds
    sys.argv = [str(RECIPE), *arguments]
    toy_recipe.main(load_config(toy_recipe.Config, None, arguments))


def wait_for(file, text, process):
    while not file.exists() or text not in file.read_text():
        assert process.is_alive(), file.with_name("err").read_text()
        time.sleep(0.01)


@pytest.mark.first(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_same_command_goes_on(number, code, launch, train, recipe, tmp_path):
    # log_every: metrics that were not written before the signal are written too.
    process = launch(tmp_path / "run", sleep_seconds=1.0, log_every=5)
    os.kill(process.pid, number)
    process.join(120)
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert process.exitcode == code
    assert f"{number.name}: will save and stop" in err
    assert "stopped     after step 3 of 12; all steps are saved. To resume, run:" in out
    command = next(line.strip() for line in out.splitlines() if "toy_recipe.py" in line)
    assert [p.name for p in (tmp_path / "run").glob("step_*")] == ["step_00000003"]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]

    recipe.main(load_config(recipe.Config, None, [*shlex.split(command)[2:], "max_steps=4"]))
    whole = train(tmp_path / "whole", max_steps=4)
    assert digests(tmp_path / "run/step_00000004") == digests(whole / "step_00000004")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="os.login_tty and hang-ups of terminals differ")
def test_a_closed_terminal_saves(overrides, tmp_path):
    """The terminal sends SIGHUP, and all that is printed afterwards fails."""
    arguments = overrides(tmp_path / "run", log_every=1, max_steps=500, save_every=0)
    command = (
        "import time; from tests.training import toy_recipe as t; from lean_ft.settings.text import load_config as l; "
    )
    command += f"t.SLEEP_SECONDS = 0.05; t.main(l(t.Config, None, {arguments!r}))"
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", command])
    lines = tmp_path / "run" / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        os.read(terminal, 65536)  # OSError if the process has ended
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
    (checkpoint,) = (tmp_path / "run").glob("step_*")
    assert metrics(tmp_path / "run")[-1]["step"] == int(checkpoint.name[5:]) < 500


def test_a_second_signal_ends_at_once(launch, tmp_path):
    process = launch(tmp_path / "run", save_every=1)
    os.kill(process.pid, signal.SIGINT)
    wait_for(tmp_path / "err", "will save and stop", process)
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    assert process.exitcode == -signal.SIGINT  # a shell reports 130
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000001", "step_00000002"]


@pytest.mark.first(1)
@pytest.mark.parametrize("save_every", [2, "auto"])
def test_killed_while_training_the_run_goes_on_from_its_checkpoint(save_every, launch, train, tmp_path, capsys):
    process = launch(tmp_path / "run", save_every=save_every, max_steps=4)
    process.kill()
    process.join()
    train(tmp_path / "run", save_every=save_every, max_steps=4)
    assert "after step 2 of 4" in capsys.readouterr().out
    whole = train(tmp_path / "whole", max_steps=4)
    assert digests(tmp_path / "run/step_00000004") == digests(whole / "step_00000004")
    assert [row["step"] for row in metrics(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]


@pytest.mark.long
def test_sigusr1_saves_and_the_run_goes_on(recipe, config, monkeypatch, tmp_path, capfd):
    take = recipe.Batches.take
    count = iter(range(100))

    def signalled(self, n):
        if next(count) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take(self, n)

    monkeypatch.setattr(recipe.Batches, "take", signalled)
    recipe.main(config(tmp_path / "run"))
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000003", "step_00000012"]
    assert "SIGUSR1: will save after this step and continue." in capfd.readouterr().err


@pytest.mark.first(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_an_evaluation_the_step_before_it_is_saved_at_once(
    number, train_real, inputs, monkeypatch, tmp_path, capsys
):
    settings = ["save_every=0", "eval_every=2", "max_steps=4", f"data.validation_source={inputs / 'rows.jsonl'}"]
    count = iter(range(100))
    batch = ArrangedDocuments.batch

    def signalled(self, rows, *more):
        if not torch.is_grad_enabled() and next(count) == 3:  # the 4th of 7
            os.kill(os.getpid(), number)
        return batch(self, rows, *more)

    with monkeypatch.context() as patch:
        patch.setattr(ArrangedDocuments, "batch", signalled)
        with pytest.raises(SystemExit) as stopped:
            train_real(tmp_path / "run", *settings)
    assert stopped.value.code == 128 + number
    assert next(count) == 4  # no batch was computed after it
    out = capsys.readouterr().out
    assert "stopped     after step 2 of 4; all steps are saved. To resume, run:" in out
    assert "interrupted; " in out
    train_real(tmp_path / "run", *settings)
    whole = train_real(tmp_path / "whole", *settings)
    assert digests(tmp_path / "run/step_00000004") == digests(whole / "step_00000004")
    assert metrics(tmp_path / "run", timed=False) == metrics(whole, timed=False)


def test_two_runs_do_not_share_a_directory(launch, train, tmp_path):
    process = launch(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"in use by process {process.pid} on "):
        train(tmp_path / "run")
    process.kill()
    process.join()
    train(tmp_path / "run", max_steps=1)  # a dead process holds no lock


def test_actions_come_back_after_a_failing_loop(config, recipe, monkeypatch, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(recipe, "FAILING_STEP", 1)
    try:
        recipe.main(config(tmp_path / "run"))
    except KeyError:  # in the handler, the traceback still references the loop's frame
        assert signal.getsignal(signal.SIGINT) == before
