"""`leanft run --nproc-per-node 2` when a process dies, gets a signal or refuses its input."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lean_ft.cli.run import _planned
from lean_ft.parallel import join
from lean_ft.settings import ParallelConfig
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.launch import Launch, launch
from tests.parallel.processes import free_port, on_ranks, refusal
from tests.parallel.test_finetune import SETTINGS
from tests.training.toy_runs import digests

LONG = ("data.source=tiny/train.jsonl", "optimizer.name=adamw_8bit", "optimizer.in_backward=true", "save_every=5")


class Launched:
    """A launched run and its processes by rank. Without `given`, the run chooses its folder below the current one,
    `cwd`."""

    def __init__(self, folder: Path, *arguments: str, given: bool = True, cwd: Path | None = None) -> None:
        settings = [argument for argument in arguments if "=" in argument and argument[0] != "-"]  # the last one counts
        flags = [argument for argument in arguments if argument not in settings]
        command = [sys.executable, "-W", "ignore", "-m", "lean_ft", "run", *flags]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, *SETTINGS, *LONG, *[f"output_dir={folder}"] * given, *settings],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, name: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not (self.folder / name).exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.02)

    def pid_of_rank(self, rank: int) -> int:
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment:
                    return int(child)
        raise AssertionError(f"no process of rank {rank}")

    def end(self, seconds: float = 120) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.mark.long
def test_a_killed_rank_is_restarted_and_changes_no_bit(tmp_path):
    two, flags = tmp_path / "runs/tiny_finetune", ("--nproc-per-node", "2", "--max-restarts=1")
    launched = Launched(two, "finetune", *flags, "max_steps=14", given=False, cwd=tmp_path)
    launched.wait_for("step_00000005")
    os.kill(launched.pid_of_rank(1), signal.SIGKILL)
    code, out, err = launched.end()
    assert code == 0, (out, err)
    assert "exitcode: -9" in err  # the agent prints the reason
    assert out.count(f"output_dir  {two.relative_to(tmp_path)}: a new run\n") == 1  # one decision, kept by the restart
    assert "resuming " in out
    assert "2 processes; model sharded over 2; the others log to rank_*.log in output_dir; restart 1" in out
    recipe = load_recipe(find_recipe("finetune"))
    recipe.main(load_config(recipe.Config, None, [*SETTINGS, *LONG, "max_steps=14", f"output_dir={tmp_path / 'one'}"]))
    assert digests(two / "step_00000014") == digests(tmp_path / "one" / "step_00000014")


@pytest.mark.long
def test_a_killed_rank_ends_the_run_with_its_rank_host_and_reason(tmp_path):
    launched = Launched(tmp_path / "run", "--nproc-per-node=2", "full_finetune_distributed", "max_steps=500")
    launched.wait_for("step_00000005")
    pid = launched.pid_of_rank(1)
    os.kill(pid, signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 1
    assert "Traceback" not in err
    *_, message, advice = err.strip().splitlines()  # the other process may print a warning about its lost peer first
    assert message.startswith("error: rank 1 on ")
    assert f"(process {pid}) was killed by SIGKILL" in message
    assert "resumes from the newest checkpoint" in advice


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_and_stops(tmp_path, number):
    launched = Launched(tmp_path / "run", "finetune", "--nproc-per-node", "2", "max_steps=500", "save_every=400")
    launched.wait_for("metrics.jsonl")
    time.sleep(1)
    launched.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while not list(launched.folder.glob("step_*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launched.process.send_signal(number)
    code, out, err = launched.end()
    assert code == 128 + number, (out, err)
    assert len(list(launched.folder.glob("step_*"))) == 2
    assert "leanft run finetune --nproc-per-node 2" in out  # how to resume
    assert (out + err).count("will save and stop after this step") == 1  # rank 0 alone answers


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "parallel.replicate=3"], "parallel.replicate=3 needs a multiple of 3 processes, and there are 2"),
        (["full_finetune_single_device"], "so it needs one process, and 2 were started"),
        (["finetune", "data.source=nowhere.jsonl"], "nowhere.jsonl"),
        (["finetune", "optimizer.lr=x"], "optimizer.lr"),
    ],
)
def test_wrong_input_is_reported_once(tmp_path, arguments, message):
    code, _, err = Launched(tmp_path / "run", "--nproc-per-node", "2", *arguments).end()
    assert code == 2
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert message in err


@pytest.mark.long
def test_an_error_on_one_machine_ends_the_other_with_the_reason(tmp_path):
    meet = ["--nproc-per-node=1", "--nnodes=2", f"--rdzv-endpoint=localhost:{free_port()}"]
    wrong = "memory.activation_offload=true"
    nodes = [
        Launched(tmp_path / "run", "finetune", *meet, f"--node-rank={number}", *settings)
        for number, settings in enumerate(([], [wrong]))
    ]
    for code, out, err in [node.end() for node in nodes]:
        assert code == 2, (out, err)
        assert "waiting     at most 10 minutes for 2 machines to meet" in out
        assert err.startswith("error: ") and len(err.splitlines()) == 1
        assert f"{wrong} supports one process only, and there are 2" in err


def test_a_rendezvous_machine_that_does_not_answer_is_reported(monkeypatch):
    monkeypatch.setattr("lean_ft.system.launch.JOIN_SECONDS", 0)
    with pytest.raises(ValueError, match=r"no answer from --rdzv-endpoint localhost:\d+ within .* \(Connection refu"):
        launch(Launch(2, 2, 2, f"localhost:{free_port()}", is_host=False), [])


def test_a_rendezvous_host_that_does_not_exist_is_reported_at_once(monkeypatch):
    with pytest.raises(ValueError, match="--rdzv-endpoint nowhere.invalid:29500: cannot resolve 'nowhere.inv"):
        launch(Launch(2, 2, 2, "nowhere.invalid:29500"), [])
    given = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR=nowhere.invalid: cannot resolve 'nowhere.invalid'"):
        join(ParallelConfig(), torch.device("cpu"))


def join_with_different_settings() -> str:
    return refusal(join, ParallelConfig(tensor=1 + int(os.environ["RANK"])), torch.device("cpu"))


@pytest.mark.long
def test_ranks_with_different_parallel_settings_are_refused_at_once():
    for message in on_ranks(2, join_with_different_settings, timeout=100):
        assert "parallel.tensor: 1 on rank 0, 2 on rank 1" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("2", "1", None), Launch(2)),
        (("8", "2", "node1:29500"), Launch(8, 2, 2, "node1:29500")),
        (("8", "1:4", "node1:29500"), Launch(8, 1, 4, "node1:29500")),
        (("0", "1", None), "--nproc-per-node 0: expected a number from 1"),
        (("many", "1", None), "--nproc-per-node many: expected a number from 1"),
        (("2", "4:1", "a:1"), "--nnodes 4:1: expected a number of machines"),
        (("2", "x", None), "--nnodes x: expected a number of machines"),
        (("2", "2", None), "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (("2", "2", "node1"), "--rdzv-endpoint node1: expected a machine's name and a port"),
    ],
    ids=str,
)
def test_launch_flags(given, expected):
    if isinstance(expected, Launch):
        assert _planned(*given, "leanft", 0) == expected
        return
    assert expected in refusal(_planned, *given, "leanft", 0)
