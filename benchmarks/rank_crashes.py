"""Kills ranks of runs on two processes at random moments, and holds each run to the one that nobody disturbed.

    python benchmarks/rank_crashes.py                       # 100 kills of tiny runs, some minutes
    python benchmarks/rank_crashes.py --kills 5 --budget-seconds 60

A run of `finetune` on two ranks, 16 steps with a checkpoint every second one, loses one of them by SIGKILL after a random
time, or a random moment after it began to write a checkpoint. The other is then told to end by SIGTERM, as torchrun's agent
does, and has to: within a minute, by itself. Both are started again, up to three times over, and at last left to end. After
every kill it is checked that every folder with a checkpoint's name is whole, and at the end that checkpoint and metrics
equal the undisturbed run's, bit for bit. What fails any of these is listed.

Writes `results/rank_crashes_<hardware>.json`.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, print_result, require_hardware, write_result
from tiny_runs import STEPS, config, digests, fork, metrics, write_inputs

from lean_ft.training.checkpoint import check_whole, list_checkpoints
from recipes import finetune

RANKS = 2
SAVE_EVERY = 2
MOST_KILLS_OF_A_RUN = 3
PATIENCE_SECONDS = 60.0  # that a rank has to end in, once another is gone
VARIANTS = {
    "cut (FSDP), AdamW": ["optimizer.name=adamw"],
    "copies (DDP), 8 bits in backward": [
        "parallel.replicate=2",
        "optimizer.name=adamw_8bit",
        "optimizer.in_backward=true",
        "model.dtype=bfloat16",
    ],
    "cut, saved in the background": ["save_async=true", "optimizer.in_backward=true", "data.packing=bfd"],
    "vocabulary cut": ["parallel.vocabulary=cut", "optimizer.name=sgd", "optimizer.momentum=0.9"],
}
COLUMNS = ["run", "kills", "before a checkpoint", "inside a save", "ranks that hung", "runs equal"]


def describe(result: dict[str, Any]) -> str:
    """What the table is of."""
    total = sum(row["kills"] for row in result["rows"])
    wrong = sum(len(row["failures"]) for row in result["rows"])
    outcome = "none failed a check" if not wrong else f"{wrong} FAILED A CHECK"
    return f"{total} kills by SIGKILL of one of {RANKS} ranks, in runs of {STEPS} steps, saved every {SAVE_EVERY}; {outcome}"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The table's text."""
    return [
        [
            row["label"],
            str(row["kills"]),
            str(row["kills_before_a_checkpoint"]),
            str(row["kills_inside_a_save"]),
            str(row["hung"]),
            f"{row['equal_runs']} of {row['runs']}",
        ]
        for row in result["rows"]
    ]


class Campaign:
    """All runs of one variant."""

    def __init__(self, label: str, settings: list[str], inputs: Path, place: Path, chance: random.Random):
        self.inputs, self.place, self.chance = inputs, place, chance
        self.settings = [f"save_every={SAVE_EVERY}", *settings]
        self.row: dict[str, Any] = {"label": label, "settings": self.settings, "status": "ok", "reason": None}
        self.row |= {"runs": 0, "equal_runs": 0, "kills": 0, "kills_before_a_checkpoint": 0}
        self.row |= {"kills_inside_a_save": 0, "hung": 0, "failures": []}
        whole = place / "whole"
        began = time.perf_counter()
        if any(codes := self._ends(self._start(whole))):
            raise RuntimeError(
                f"{label}: the undisturbed run ended with {codes}:\n{(place / 'log').read_text()[-3000:]}"
            )
        self.seconds = time.perf_counter() - began
        self.last = whole / f"step_{STEPS:08d}"
        self.digests, self.metrics = digests(self.last), metrics(whole)

    def disturb_one_run(self, most_kills: int) -> None:
        """Start a run, kill one of its ranks and start it again, let it end, and compare it."""
        run = self.place / f"run{self.row['runs']}"
        self.row["runs"] += 1
        failures = len(self.row["failures"])
        for _ in range(self.chance.randint(1, min(MOST_KILLS_OF_A_RUN, most_kills))):
            ranks = self._start(run)
            self._wait_for_the_moment(run, ranks)
            victim = self.chance.choice(ranks)
            os.kill(victim, signal.SIGKILL)
            codes = self._ends(ranks, hurry=True)
            if codes[ranks.index(victim)] == 0:
                break  # it was done before
            self._judge_the_dead(run)
        if any(codes := self._ends(self._start(run))):
            self._fail(run, f"exit codes {codes} at the last start: {(self.place / 'log').read_text()[-500:]}")
        elif digests(run / self.last.name) != self.digests:
            self._fail(run, "the last checkpoint differs")
        elif metrics(run) != self.metrics:
            self._fail(run, "the metrics differ")
        elif list(run.glob(".step_*")):
            self._fail(run, "half a checkpoint is left behind")
        if len(self.row["failures"]) == failures:
            self.row["equal_runs"] += 1
            shutil.rmtree(run)

    def _start(self, run: Path) -> list[int]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        return [fork(lambda rank=rank: self._train(run, rank, port), self.place / "log") for rank in range(RANKS)]

    def _train(self, run: Path, rank: int, port: int) -> None:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in own.items()}
        finetune.main(config(self.inputs, run, self.settings, finetune))

    def _ends(self, ranks: list[int], hurry: bool = False) -> list[int]:
        """The exit codes of all; with `hurry` those that are left are asked to end, and killed where they do not."""
        codes: dict[int, int] = {}
        asked, deadline = False, time.perf_counter() + PATIENCE_SECONDS + 10 * (0 if hurry else 60)
        while len(codes) < len(ranks):
            for process in set(ranks) - codes.keys():
                if (ended := os.waitpid(process, os.WNOHANG))[0]:
                    codes[process] = os.waitstatus_to_exitcode(ended[1])
            if hurry and codes and not asked:
                asked = True
                for process in set(ranks) - codes.keys():
                    os.kill(process, signal.SIGTERM)
            if time.perf_counter() > deadline:
                for process in set(ranks) - codes.keys():
                    self.row["hung"] += 1
                    self.row["failures"].append(f"process {process} did not end by itself")
                    os.kill(process, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)
        return [codes[process] for process in ranks]

    def _wait_for_the_moment(self, run: Path, ranks: list[int]) -> None:
        """Half of the times any, half of the times one inside of a save."""
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(0, self.seconds))
            return
        saves_to_pass = self.chance.randint(0, STEPS // SAVE_EVERY - 1)
        seen: set[str] = set()
        deadline = time.perf_counter() + 2 * self.seconds + 5
        while time.perf_counter() < deadline and not any(map(_has_ended, ranks)):
            with contextlib.suppress(FileNotFoundError):
                seen |= {name for name in os.listdir(run) if name.startswith(".step_")}
            if len(seen) > saves_to_pass:
                time.sleep(self.chance.uniform(0, 0.03))
                return

    def _judge_the_dead(self, run: Path) -> None:
        checkpoints = list_checkpoints(run)
        self.row["kills"] += 1
        self.row["kills_before_a_checkpoint"] += not checkpoints
        self.row["kills_inside_a_save"] += bool(run.is_dir() and list(run.glob(".step_*")))
        for folder in checkpoints:
            try:
                check_whole(folder)
            except ValueError as error:
                self._fail(run, str(error))

    def _fail(self, run: Path, what: str) -> None:
        self.row["failures"].append(f"{run.name}: {what}")


def _has_ended(process: int) -> bool:
    """Whether a child has, leaving it to be waited for."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main(
    kills: Annotated[int, typer.Option(help="Kills in all.")] = 100,
    budget_seconds: Annotated[float, typer.Option(help="No further run is begun after this.")] = 1800.0,
    only: Annotated[str, typer.Option(help="A pattern for the runs to kill.")] = "",
    seed: Annotated[int, typer.Option(help="Of the moments; the machine's own timing differs all the same.")] = 0,
    results_dir: Annotated[Path, typer.Option(help="Where the result goes.")] = RESULTS,
) -> None:
    """Kills, compares, prints and writes; exits with 1 where a check failed."""
    hardware, started, chance = require_hardware("cpu"), time.perf_counter(), random.Random(seed)
    chosen = {label: settings for label, settings in VARIANTS.items() if re.search(only, label)}
    if not chosen:
        raise typer.BadParameter("no run has a name like that", param_hint="--only")
    with tempfile.TemporaryDirectory(prefix="lean_ft_rank_crashes_") as folder:
        inputs, campaigns = write_inputs(Path(folder) / "inputs"), []
        for label, settings in chosen.items():
            (place := Path(folder) / str(len(campaigns))).mkdir()
            campaigns.append(Campaign(label, settings, inputs, place, chance))
        while (left := kills - sum(c.row["kills"] for c in campaigns)) > 0:
            if time.perf_counter() - started > budget_seconds:
                break
            min(campaigns, key=lambda c: c.row["kills"]).disturb_one_run(left)
    rows = [campaign.row for campaign in campaigns]
    settings = {"kills": kills, "seed": seed, "steps": STEPS, "save_every": SAVE_EVERY, "ranks": RANKS}
    path = write_result(
        "rank_crashes",
        benchmark="rank_crashes",
        hardware=hardware,
        settings=settings,
        rows=rows,
        folder=results_dir,
        seconds=round(time.perf_counter() - started, 1),
    )
    print_result(path, describe, COLUMNS, table_cells)
    failures = [f"{row['label']}: {failure}" for row in rows for failure in row["failures"]]
    for failure in failures:
        print(failure)
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
