"""Run a command in a new process and measure its time and memory from outside, together with its metrics.jsonl.

A run is stopped once it has written the wanted lines, so that the final checkpoint is not measured. A run that fails
gives a reason and no number.

Memory is measured in several ways, because each can mislead:
- `peak_memory_bytes` is the run's own value at its last step: the allocator's peak on a GPU, the process's peak
  resident size (VmHWM) on a CPU. Tables show it. With `settle_steps` a run continues until this peak is stable and also
  reports `first_peak_memory_bytes`, the peak of the first steps.
- `peak_rss_bytes` is the kernel's value for the largest process of the command (ru_maxrss of wait4). It includes this
  process at the moment of the fork, so it is meaningless for smaller commands.
- `peak_tree_rss_bytes` is the largest sampled sum over the process and its descendants, such as compilers. Shared pages
  count once per process.
- `peak_device_bytes` is the GPU memory reported by the driver minus the memory used before the start (nvidia-smi,
  sampled).

Source: proc(5), wait4(2), getrusage(2).
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer
from results import console

from lean_ft.system.environment import available_bytes

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
SAMPLE_SECONDS = 0.25  # a sample takes 2 ms
STILL_STEPS = 20  # a peak is stable if it grew by less than 1% in this number of steps,
LEAST_STEPS = 50  # but not before this number
RESERVE_BYTES = GIB // 2  # a run is stopped below this much available memory, before the kernel kills a process
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Errors of a run without enough memory, on a GPU and on a CPU.
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|^MemoryError|ALLOC_FAILED", re.I | re.M
)

Row = dict[str, Any]


@dataclass
class Measurement:
    """Measurements of one command. `steps` are the training lines of its metrics.jsonl."""

    status: str  # ok, failed, out of memory, timed out, not run
    reason: str | None = None  # for every status except ok
    seconds: float = 0.0
    peak_rss_bytes: int | None = None
    peak_tree_rss_bytes: int | None = None
    peak_device_bytes: int | None = None
    steps: list[Row] = field(default_factory=list)
    output: str = ""  # the end of stdout and stderr


class Budget:
    """Time for several runs: the limit of one run, and the remaining total."""

    def __init__(self, run_seconds: float, total_seconds: float | None = None) -> None:
        self._run_seconds = run_seconds
        self._ends = None if total_seconds is None else time.monotonic() + total_seconds

    def timeout_seconds(self) -> float:
        """The time limit of the next run; 0 if no time is left."""
        left = float("inf") if self._ends is None else max(0.0, self._ends - time.monotonic())
        return min(self._run_seconds, left)


def end_with_parent() -> None:
    """In a new process: kill it if the thread that started it ends, so that `kill -9` of a benchmark leaves nothing
    running. Does nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_measured(
    command: Sequence[str | Path],
    *,
    timeout_seconds: float,
    metrics_file: Path | None = None,
    stop_after_steps: int | None = None,
    goes_on: Callable[[list[Row]], bool] = lambda steps: False,
    environment: dict[str, str] | None = None,
) -> Measurement:
    """Runs a command from the repository's root and measures it; the module says what is measured.

    Args:
        command: program and arguments.
        timeout_seconds: after which the command and its descendants are killed and it counts as timed out; with less
            than a second it is not run at all.
        metrics_file: where the command writes its steps, one JSON object a line.
        stop_after_steps: lines after which the command is killed and counts as done,
        goes_on: unless this says of the lines that it is not.
        environment: variables to set on top of this process's own.
    """
    if timeout_seconds < 1:
        return Measurement("not run", "no time was left for it")
    started = time.monotonic()
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1", **(environment or {})}
    device = _DeviceMemory()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        tree = _Tree(process.pid)
        stopped: tuple[str, str | None] | None = None  # status and reason if we stopped the run
        try:
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                tree.sample()
                steps = [] if stop_after_steps is None else read_steps(metrics_file)
                if stop_after_steps is not None and len(steps) >= stop_after_steps and not goes_on(steps):
                    stopped = "ok", None
                elif time.monotonic() - started > timeout_seconds:
                    stopped = "timed out", f"took longer than {timeout_seconds:.0f} s"
                elif (available := available_bytes()) is not None and available < RESERVE_BYTES:
                    held = f"{tree.rss_bytes / GIB:.1f} GiB"
                    stopped = "out of memory", f"stopped at {held} resident: the machine's memory was full"
                if stopped:
                    tree.kill()
                    ended = os.wait4(process.pid, 0)
                    break
                time.sleep(SAMPLE_SECONDS)
        except BaseException:  # interrupted: leave nothing running
            tree.kill()
            process.wait()
            raise
        finally:
            peak_device_bytes = device.stop()
        tree.kill()  # compilers that outlived their parent
        _, wait_status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(wait_status)  # reaped here, so Popen need not
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 20_000))
        output = log.read().decode(errors="replace")

    status, reason = stopped or judge(process.returncode, output)
    return Measurement(
        status=status,
        reason=reason,
        seconds=time.monotonic() - started,
        peak_rss_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        peak_tree_rss_bytes=tree.peak_rss_bytes or None,
        peak_device_bytes=peak_device_bytes,
        steps=read_steps(metrics_file),
        output=output,
    )


def judge(exit_code: int, output: str) -> tuple[str, str | None]:
    """The status and reason of a command that ended by itself."""
    if exit_code == 0:
        return "ok", None
    if OUT_OF_MEMORY.search(output):
        return "out of memory", last_error(output)
    if exit_code == -signal.SIGKILL:
        return "out of memory", "killed from outside (SIGKILL), as the kernel does when memory is full"
    return "failed", last_error(output) or f"exit code {exit_code} and no message"


def last_error(output: str) -> str:
    """The last output line that starts like an error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return (named or lines or [""])[-1].replace(f"{ROOT}/", "")


def read_steps(metrics_file: Path | None) -> list[Row]:
    """The training lines of a metrics.jsonl, without evaluations and an incomplete last line."""
    if metrics_file is None or not metrics_file.exists():
        return []
    with metrics_file.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.endswith("\n")]
    return [row for row in rows if "step_seconds" in row]


# Memory from outside ------------------------------------------------------------------------------------------------


class _Tree:
    """A process and its descendants."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seen: dict[int, int] = {}  # process id -> start time, to recognize reused ids
        self.rss_bytes = self.peak_rss_bytes = 0

    def sample(self) -> None:
        """Sum the resident size of all live processes."""
        processes = {}
        for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
            if entry.isdigit() and (process := _process(int(entry))) is not None:
                processes[int(entry)] = process
        alive = {self._root} | {pid for pid, start in self._seen.items() if processes.get(pid, (0, 0))[1] == start}
        while children := {pid for pid, (parent, _) in processes.items() if parent in alive} - alive:
            alive |= children
        self._seen |= {pid: processes[pid][1] for pid in alive if pid in processes}
        self.rss_bytes = sum(_rss_bytes(pid) for pid in alive)
        self.peak_rss_bytes = max(self.peak_rss_bytes, self.rss_bytes)

    def kill(self) -> None:
        """Kill the process group and every known descendant that is still the same process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._root, signal.SIGKILL)
        for pid, start in self._seen.items():
            if (process := _process(pid)) is not None and process[1] == start:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _process(pid: int) -> tuple[int, int] | None:
    """A process's parent and start time; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name may contain spaces
    except OSError:
        return None
    return int(fields[1]), int(fields[19])


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


class _DeviceMemory:
    """Used memory of GPU 0 from nvidia-smi, sampled every 200 ms. None without nvidia-smi."""

    def __init__(self) -> None:
        self._watcher: subprocess.Popen[str] | None = None
        self._start_bytes: int | None = None
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        if shutil.which("nvidia-smi") is None:
            return
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            self._start_bytes = int(answer.split()[0]) * 2**20
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (stop() closes it)
            self._watcher = subprocess.Popen([*query, "-lms", "200"], stdout=self._log, stderr=subprocess.DEVNULL)

    def stop(self) -> int | None:
        """The peak above the start, in bytes."""
        if self._watcher is None or self._start_bytes is None:
            return None
        self._watcher.kill()
        self._watcher.wait()
        self._log.seek(0)
        used = [int(line) * 2**20 for line in self._log.read().split("\n")[:-1] if line.strip().isdigit()]
        self._log.close()
        return max(used) - self._start_bytes if used else None


# A recipe, or what writes the same metrics --------------------------------------------------------------------------


def recipe_command(recipe: str, settings: dict[str, Any]) -> list[str]:
    """The command `leanft run RECIPE key=value ...` for this interpreter, without saves during the run."""
    return [sys.executable, "-m", "lean_ft", "run", recipe, *overrides({"save_every": 0, **settings})]


def overrides(settings: dict[str, Any]) -> list[str]:
    """Settings as command-line overrides, `key=value`."""
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()]


def rehearse_recipe(recipe: str, settings: dict[str, Any], device: Any, machines: Any = None) -> Row:
    """The planner's prediction for a recipe with `settings`, on one device or on each of `machines`, as plain
    values."""
    from lean_ft.plan.devices import ONE_DEVICE
    from lean_ft.plan.rehearsal import rehearse
    from lean_ft.settings.text import load_config
    from lean_ft.system.catalog import find_recipe, load_recipe

    module = load_recipe(find_recipe(recipe))
    cfg = load_config(module.Config, None, overrides(settings))
    rehearsal = rehearse(module, cfg, device, machines or ONE_DEVICE)
    sent = (
        {} if machines is None else {"sent_bytes": rehearsal.sent_bytes, "sent_away_bytes": rehearsal.sent_away_bytes}
    )
    return {
        **sent,
        "step_seconds": rehearsal.step_seconds,
        "peak_bytes": rehearsal.peak_bytes,
        "where": rehearsal.peak.where,
        "bytes_by_label": rehearsal.peak.bytes_by_label,
        "tokens_per_second": rehearsal.tokens / rehearsal.step_seconds,
        "planning_seconds": rehearsal.planning_seconds,
    }


def measure_training(
    command: Callable[[Path], Sequence[str | Path]],
    *,
    steps: int,
    warmup_steps: int,
    tokens_per_step: int,
    timeout_seconds: float,
    settle_steps: int = 0,
    token_slack: float = 0.0,
    environment: dict[str, str] | None = None,
) -> Row:
    """Measures a training command and sums it up in a row of plain values.

    Args:
        command: makes the command from the run directory it is to write its metrics.jsonl into, which is removed
            afterwards. It must go on for at least `warmup_steps + steps` steps.
        steps: how many steps count, after `warmup_steps` that do not.
        tokens_per_step: what every step must compute, so that no padding or short batch flatters the number.
        token_slack: the share of these that a step may lack.
        settle_steps: continue until the peak no longer changes, for at most this many steps in all. The command must
            run that many.
        timeout_seconds, environment: as for `run_measured`.

    Returns:
        `status` and `reason`; when `ok`, `tokens_per_second` from the median `step_seconds`, and `peak_memory_bytes`
        up to the last step that counts, or of a run that was to settle, up to its end. The peaks from outside are there
        in any case.
    """
    wanted = warmup_steps + steps

    def is_settling(lines: list[Row]) -> bool:
        return len(lines) < settle_steps and not stands_still(lines)

    with tempfile.TemporaryDirectory(prefix="lean_ft_benchmark_") as folder:
        run_directory = Path(folder) / "run"
        measured = run_measured(
            command(run_directory),
            timeout_seconds=timeout_seconds,
            metrics_file=run_directory / "metrics.jsonl",
            stop_after_steps=wanted,
            goes_on=is_settling,
            environment=environment,
        )
    if measured.status == "ok" and len(measured.steps) < wanted:
        measured.status = "failed"
        measured.reason = f"wrote {len(measured.steps)} steps, and {wanted} were wanted"
    row = asdict(measured)
    lines, output = row.pop("steps"), row.pop("output")
    if measured.status == "ok":
        row |= summarize(lines[:wanted], warmup_steps, tokens_per_step, token_slack)
        if row["status"] == "ok" and settle_steps:
            settled = {"peak_memory_bytes": lines[-1]["peak_memory_bytes"], "stands_still": stands_still(lines)}
            row |= {"first_peak_memory_bytes": row["peak_memory_bytes"], "num_steps": len(lines), **settled}
    if row["status"] != "ok":
        row["output"] = output[-2000:]
    return row


def measure_contestants(
    script: str, labels: Mapping[str, str], arguments: Sequence[str | Path], budget: "Budget"
) -> list[Row]:
    """Has `script --worker NAME --report FILE arguments` measure each of the names in a fresh process.

    Returns a row for each: its name and label, and what it wrote into the file, or why it wrote nothing.
    """
    rows = []
    for name, label in labels.items():
        with tempfile.TemporaryDirectory(prefix="lean_ft_benchmark_") as folder:
            report = Path(folder) / "report.json"
            command = [sys.executable, script, "--worker", name, "--report", report, *arguments]
            measured = run_measured(command, timeout_seconds=budget.timeout_seconds())
            row = {"status": measured.status, "reason": measured.reason}
            if measured.status == "ok":
                row = json.loads(report.read_text())
        rows.append({"name": name, "label": label, **row})
        console.print(f"{label:<50} {row['status']}" + (f": {row['reason']}" if row["reason"] else ""), markup=False)
    return rows


def names_in(text: str, known: Iterable[str]) -> list[str]:
    """Split comma-separated names; all known names if empty. Raises typer.BadParameter for an unknown name."""
    known = list(known)
    names = [name.strip() for name in text.split(",") if name.strip()] or known
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown name {name!r}; expected some of {', '.join(known)}")
    return names


def stands_still(lines: list[Row]) -> bool:
    """Whether the peak memory grew by less than 1% in the last 20 of at least 50 steps."""
    peaks = [line["peak_memory_bytes"] for line in lines]
    return len(peaks) >= LEAST_STEPS and peaks[-1] < 1.01 * peaks[-1 - STILL_STEPS]


def summarize(lines: list[Row], warmup_steps: int, tokens_per_step: int, token_slack: float = 0.0) -> Row:
    """Speed and memory of the steps after the warm-up."""
    counted = lines[warmup_steps:]
    least = (1 - token_slack) * tokens_per_step
    wrong = next((line for line in lines if not least <= line["tokens"] <= tokens_per_step), None)
    if wrong is not None:
        return {
            "status": "failed",
            "reason": f"step {wrong['step']} computed {wrong['tokens']} tokens, and {tokens_per_step} were expected",
        }
    seconds = [line["step_seconds"] for line in counted]
    median = statistics.median(seconds)
    optional = {name: [line[name] for line in counted if name in line] for name in ("sampling_seconds", "tool_calls")}
    return {
        **{name: statistics.median(values) for name, values in optional.items() if values},
        "tokens_per_second": tokens_per_step / median,
        "target_tokens_per_step": statistics.median(line["target_tokens"] for line in counted),
        "step_seconds": median,
        "all_step_seconds": [round(line["step_seconds"], 4) for line in lines],
        "peak_memory_bytes": counted[-1]["peak_memory_bytes"],
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
    }
