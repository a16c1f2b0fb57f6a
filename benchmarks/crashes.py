"""Kill runs at random moments and compare the result with an uninterrupted run.

    python benchmarks/crashes.py                       # 240 kills of tiny runs, some minutes
    python benchmarks/crashes.py --kills 12 --budget-seconds 60
    python benchmarks/crashes.py --kills 200 --only online    # while they sample, score, train or save
    python benchmarks/crashes.py --kills 100 --ranks 2        # runs on two processes, one of which is killed

A run of 16 steps saves every 2 steps. SIGKILL ends it after a random time, or at a random moment of a save. The run is
restarted up to three times and then runs to its end. After every kill the script checks that

- every folder with a checkpoint's name is complete,
- metrics.jsonl has at most the steps between two saves after the newest checkpoint (twice that with `save_async`),
- the next start resumes from that checkpoint.

At the end, the checkpoint, metrics and samples must equal those of the uninterrupted run, bit for bit. Failures are
listed.

With several ranks, one rank is killed, and the others get SIGTERM, as from torchrun's agent. Each must end within a
minute.

Writes `results/crashes_<hardware>.json`, or `results/rank_crashes_<hardware>.json` with several ranks.
"""

import contextlib
import json
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
from tiny_runs import STEPS, digests, fork, metrics, recipe, train, write_inputs

from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.system.run_directory import check_whole, checkpoint_step, list_checkpoints

SAVE_EVERY = 2
MOST_KILLS_OF_A_RUN = 3
PATIENCE_SECONDS = 60.0  # for a rank to end after another was killed
VARIANTS = {
    "AdamW": ["optimizer.name=adamw"],
    "8-bit AdamW in backward, packed": [
        "optimizer.name=adamw_8bit",
        "optimizer.in_backward=true",
        "data.packing=bfd",
        "model.dtype=bfloat16",
    ],
    "AdamW, float16 with loss scaling": ["optimizer.name=adamw", "model.dtype=float16"],
    "AdamW, stochastic rounding": ["model.dtype=bfloat16", "optimizer.stochastic_rounding=true", "keep_last=2"],
    "Adafactor, activation checkpointing, keep_last=1": [
        "optimizer.name=adafactor",
        "memory.activation_checkpointing=full",
        "keep_last=1",
    ],
    "AdamW, save_async, keep_last=1": ["optimizer.name=adamw", "save_async=true", "keep_last=1"],
    "online: grpo": ["loss.kl_weight=0.1", "loss.entropy_share=0.8", "generation.most_attempts=2"],
    "online: ppo": ["optimizer.name=adamw_8bit", "save_async=true"],
    "online: online_dpo": ["lora.rank=2", "lora.dropout=0.1"],
}
# Variants of `finetune` on several ranks.
RANK_VARIANTS = {
    "sharded (FSDP), AdamW": ["optimizer.name=adamw"],
    "replicated (DDP), 8-bit AdamW in backward": [
        "parallel.replicate=2",
        "optimizer.name=adamw_8bit",
        "optimizer.in_backward=true",
        "model.dtype=bfloat16",
    ],
    "sharded, save_async": ["save_async=true", "optimizer.in_backward=true", "data.packing=bfd"],
    "vocabulary parallelism": ["parallel.vocabulary=cut", "optimizer.name=sgd", "optimizer.momentum=0.9"],
}
COLUMNS = [
    "run",
    "kills",
    "before the first checkpoint",
    "during a save",
    "most steps lost",
    "hung",
    "bitwise equal at the end",
]


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    total = sum(row["kills"] for row in result["rows"])
    wrong = sum(len(row["failures"]) for row in result["rows"])
    outcome = "all checks passed" if not wrong else f"{wrong} CHECKS FAILED"
    ranks = result["settings"].get("ranks", 1)
    target = f"one of {ranks} ranks" if ranks > 1 else "the process"
    return f"{total} SIGKILLs of {target}, in runs of {STEPS} steps that save every {SAVE_EVERY} steps; {outcome}"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    return [
        [
            row["label"],
            str(row["kills"]),
            str(row["kills_before_a_checkpoint"]),
            str(row["kills_inside_a_save"]),
            *(str(row.get(name, "-")) for name in ("most_steps_lost", "hung")),
            f"{row['equal_runs']} of {row['runs']}",
        ]
        for row in result["rows"]
    ]


class Campaign:
    """All runs of one variant."""

    def __init__(self, label: str, settings: list[str], inputs: Path, place: Path, chance: random.Random, ranks: int):
        self.inputs, self.place, self.chance, self.ranks = inputs, place, chance, ranks
        name = "finetune" if ranks > 1 else label.removeprefix("online: ") if label.startswith("online") else None
        self.recipe = recipe if name is None else load_recipe(find_recipe(name))
        self.settings = [f"save_every={SAVE_EVERY}", *settings]
        self.most_lost = SAVE_EVERY * (2 if "save_async=true" in settings else 1)
        self.row: dict[str, Any] = {
            "label": label,
            "settings": self.settings,
            "status": "ok",
            "reason": None,
            "runs": 0,
            "equal_runs": 0,
            "kills": 0,
            "kills_before_a_checkpoint": 0,
            "kills_inside_a_save": 0,
            "most_steps_lost": 0,
            "hung": 0,
            "failures": [],
        }
        whole = place / "whole"
        began = time.perf_counter()
        if any(codes := self._ends(self._start(whole))):
            raise RuntimeError(
                f"{label}: the undisturbed run ended with {codes}:\n{(place / 'log').read_text()[-3000:]}"
            )
        self.seconds = time.perf_counter() - began
        self.last = whole / f"step_{STEPS:08d}"
        self.digests, self.metrics, self.samples = digests(self.last), metrics(whole), _samples(whole)

    def disturb_one_run(self, most_kills: int) -> None:
        """Start a run, kill and restart it, let it end, and compare the result."""
        run = self.place / f"run{self.row['runs']}"
        self.row["runs"] += 1
        failures = len(self.row["failures"])
        for _ in range(self.chance.randint(1, min(MOST_KILLS_OF_A_RUN, most_kills))):
            processes = self._start(run)
            self._wait_for_the_moment(run, processes)
            victim = self.chance.choice(processes)
            os.kill(victim, signal.SIGKILL)
            code = self._ends(processes, hurry=True)[processes.index(victim)]
            if code == 0:
                break  # the run was already complete
            if code != -signal.SIGKILL:
                self._fail(run, f"exit code {code} where it was to be killed")
                break
            self._judge_the_dead(run)
            if self.ranks == 1:
                self._check_next_start(run)
        if any(codes := self._ends(self._start(run))):
            self._fail(run, f"exit codes {codes} at the last start: {(self.place / 'log').read_text()[-500:]}")
        elif digests(run / self.last.name) != self.digests:
            self._fail(run, "the last checkpoint differs")
        elif metrics(run) != self.metrics:
            self._fail(run, "the metrics differ")
        elif _samples(run) != self.samples:
            self._fail(run, "the samples differ")
        elif list(run.glob(".step_*")):
            self._fail(run, "half a checkpoint is left behind")
        if len(self.row["failures"]) == failures:
            self.row["equal_runs"] += 1
            shutil.rmtree(run)

    def _start(self, run: Path) -> list[int]:
        """Start the processes of a run, one per rank."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        return [fork(lambda rank=rank: self._train(run, rank, port), self.place / "log") for rank in range(self.ranks)]

    def _train(self, run: Path, rank: int, port: int) -> None:
        if self.ranks > 1:
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(value) for name, value in own.items()}
        train(self.inputs, run, self.settings, self.recipe)

    def _ends(self, processes: list[int], hurry: bool = False) -> list[int]:
        """Wait and return all exit codes. With `hurry`, send SIGTERM to the remaining processes, then SIGKILL."""
        codes: dict[int, int] = {}
        asked, deadline = False, time.perf_counter() + PATIENCE_SECONDS + 10 * (0 if hurry else 60)
        while len(codes) < len(processes):
            for process in set(processes) - codes.keys():
                if (ended := os.waitpid(process, os.WNOHANG))[0]:
                    codes[process] = os.waitstatus_to_exitcode(ended[1])
            if hurry and codes and not asked:
                asked = True
                for process in set(processes) - codes.keys():
                    os.kill(process, signal.SIGTERM)
            if time.perf_counter() > deadline:
                for process in set(processes) - codes.keys():
                    self.row["hung"] += 1
                    self.row["failures"].append(f"process {process} did not end by itself")
                    os.kill(process, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)
        return [codes[process] for process in processes]

    def _wait_for_the_moment(self, run: Path, processes: list[int]) -> None:
        """Wait for a random moment, half of the time one inside a save."""
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(0, self.seconds))
            return
        saves_to_pass = self.chance.randint(0, STEPS // SAVE_EVERY - 1)
        seen: set[str] = set()
        deadline = time.perf_counter() + 2 * self.seconds + 5
        while time.perf_counter() < deadline and not any(map(_has_ended, processes)):
            with contextlib.suppress(FileNotFoundError):
                seen |= {name for name in os.listdir(run) if name.startswith(".step_")}
            if len(seen) > saves_to_pass:
                time.sleep(self.chance.uniform(0, 0.03))
                return

    def _judge_the_dead(self, run: Path) -> None:
        self.row["kills"] += 1
        self.newest = 0
        for folder in list_checkpoints(run):
            try:
                check_whole(folder)
            except ValueError as error:
                self._fail(run, str(error))
            self.newest = checkpoint_step(folder)
        self.row["kills_before_a_checkpoint"] += not self.newest
        self.row["kills_inside_a_save"] += bool(run.is_dir() and list(run.glob(".step_*")))
        lost = max((row["step"] for row in metrics(run)), default=0) - self.newest
        self.row["most_steps_lost"] = max(self.row["most_steps_lost"], lost)
        if lost > self.most_lost and self.ranks == 1:
            self._fail(run, f"{lost} steps lost")

    def _check_next_start(self, run: Path) -> None:
        """Start a run that trains no step, to see which checkpoint it finds."""
        log = self.place / "log"
        before = log.stat().st_size
        (code,) = self._ends([fork(lambda: _only_begin(self.inputs, run, self.settings, self.recipe), log)])
        said = log.read_text()[before:]
        if code:
            self._fail(run, f"exit code {code} at the next start: {said[-300:]}")
        elif self.newest < STEPS:  # otherwise the run is complete and does not start
            went_on_from = json.loads((run / "run.json").read_text())["starts"][-1]["start_step"]
            if went_on_from != self.newest:
                self._fail(run, f"went on from {went_on_from}, not from {self.newest}")

    def _fail(self, run: Path, what: str) -> None:
        self.row["failures"].append(f"{run.name}: {what}")


def _only_begin(inputs: Path, run: Path, settings: list[str], recipe: Any) -> None:
    recipe.Run.steps = lambda self: iter(())
    train(inputs, run, settings, recipe)


def _samples(run: Path) -> str:
    """The completions that an online run saves."""
    path = run / "samples.jsonl"
    return path.read_text() if path.is_file() else ""


def _has_ended(process: int) -> bool:
    """Whether a child process has ended. Does not reap it."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def main(
    kills: Annotated[int, typer.Option(help="Number of kills.")] = 240,
    ranks: Annotated[int, typer.Option(help="Processes per run; one is killed.")] = 1,
    budget_seconds: Annotated[float, typer.Option(help="Start no run after this time in seconds.")] = 600.0,
    only: Annotated[str, typer.Option(help="Regular expression for the runs to kill.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the moments; timing still varies.")] = 0,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Kill, compare, print and write. Exits with 1 if a check failed."""
    hardware = require_hardware("cpu")
    started = time.perf_counter()
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="lean_ft_crashes_") as folder:
        inputs = write_inputs(Path(folder) / "inputs")
        campaigns = []
        variants = VARIANTS if ranks == 1 else RANK_VARIANTS
        chosen = {label: settings for label, settings in variants.items() if re.search(only, label)}
        if not chosen:
            raise typer.BadParameter("no run has a name like that", param_hint="--only")
        for label, settings in chosen.items():
            place = Path(folder) / str(len(campaigns))
            place.mkdir()
            campaigns.append(Campaign(label, settings, inputs, place, chance, ranks))
        while (left := kills - sum(c.row["kills"] for c in campaigns)) > 0:
            if time.perf_counter() - started > budget_seconds:
                break
            min(campaigns, key=lambda c: c.row["kills"]).disturb_one_run(left)
    rows = [campaign.row for campaign in campaigns]
    settings = {"kills": kills, "seed": seed, "steps": STEPS, "save_every": SAVE_EVERY, "ranks": ranks}
    path = write_result(
        "crashes" if ranks == 1 else "rank_crashes",
        benchmark="crashes",
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
