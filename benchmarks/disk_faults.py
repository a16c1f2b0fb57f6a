"""Run tiny trainings on a disk that is full, read-only, forbidden or faulty.

    python benchmarks/disk_faults.py               # as root on Linux: mounts file systems of a few MiB
    python benchmarks/disk_faults.py --flips 2     # flips bits in each kind of file of a checkpoint

Each case trains in its own process, repairs the disk and repeats the command. It checks that the run ended with a
message and an exit code instead of a traceback, that every folder with a checkpoint's name is complete, and that the
resumed run is bitwise equal to an uninterrupted one. Faults that this machine cannot make (no right to mount) are
listed with the reason.

Writes `results/disk_faults_<hardware>.json`.
"""

import ctypes
import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, print_result, require_hardware, write_result
from tiny_runs import STEPS, config, digests, finish, fork, train, write_inputs

import lean_ft.training.checkpoint
import lean_ft.training.checkpoints
from lean_ft.system.run_directory import check_whole, list_checkpoints
from lean_ft.training import starting

SAVES = ["save_every=4"]
ASYNC = [*SAVES, "save_async=true"]
NOBODY = 65534
MS_RDONLY, MS_REMOUNT, MS_PRIVATE, MS_REC = 1, 32, 1 << 18, 1 << 14
CLONE_NEWNS = 0x20000
COLUMNS = ["fault", "cases", "ended with a message", "checkpoints complete", "resumed bitwise equal"]


class Unavailable(Exception):
    """This machine cannot produce the fault."""


def describe(result: dict[str, Any]) -> str:
    """The caption of the table."""
    return f"disk faults during runs of {STEPS} steps that save every 4 steps"


def table_cells(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the table."""
    cells = []
    for row in result["rows"]:
        numbers = [f"{row[key]}" for key in ("told", "whole", "equal")] if row["status"] == "ok" else ["-"] * 3
        cells.append([row["label"], str(row["cases"]), *numbers])
    return cells


# Faults ---------------------------------------------------------------------------------------------------------------


def mount(place: Path, size_bytes: int | None, flags: int = 0) -> None:
    """Mount a memory file system on `place`, visible to this process and its children only; remount if size_bytes is
    None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if size_bytes is not None:
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
            raise Unavailable(f"no right to mount ({os.strerror(ctypes.get_errno())})")
        options = f"size={size_bytes}".encode()
    else:
        flags, options = flags | MS_REMOUNT, b""
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", flags, options):
        raise Unavailable(f"mount failed ({os.strerror(ctypes.get_errno())})")


def believe_in_room() -> None:
    """Report much free space, as on a disk with quotas that statvfs does not see."""
    for module in (lean_ft.training.checkpoint, lean_ft.training.checkpoints):
        module.free_bytes = lambda directory: 2**40  # type: ignore[attr-defined]


class Case:
    """One run with one fault. `place` is the parent of its run directory."""

    def __init__(self, inputs: Path, place: Path, settings: list[str]):
        self.inputs, self.place, self.settings = inputs, place, settings
        self.run = place / "run"
        self.log = inputs / f"{place.name}.log"

    def start(self, before: Callable[[], None] = lambda: None) -> int:
        """Call `before`, train in a fork, and return the exit code."""

        def work() -> None:
            before()
            train(self.inputs, self.run, self.settings)

        return finish(fork(work, self.log))

    def after_saves(self, number: int, act: Callable[[], None]) -> Callable[[], None]:
        """Make a run call `act` after this number of checkpoints."""

        def install() -> None:
            write, saved = lean_ft.training.checkpoints.write_checkpoint, []

            def noted(*args: Any, **kwargs: Any) -> Path:
                saved.append(write(*args, **kwargs))
                if len(saved) == number:
                    act()
                return saved[-1]

            lean_ft.training.checkpoints.write_checkpoint = noted  # type: ignore[attr-defined]

        return install


def become_nobody(case: Case) -> None:
    """Become a user without rights. That user may not read this Python, so everything a run imports is imported
    first."""
    train(case.inputs, case.inputs / f"before_{case.place.name}", ["max_steps=1"])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def disk_too_small(case: Case, chance: random.Random) -> Callable[[], None]:
    mount(case.place, 4 * 2**20)
    case.fault = case.start()
    return lambda: mount_over(case.place, 2**30)


def mount_over(place: Path, size_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", MS_REMOUNT, f"size={size_bytes}".encode()):
        raise Unavailable(f"remount failed ({os.strerror(ctypes.get_errno())})")


def disk_full_between_saves(case: Case, chance: random.Random) -> Callable[[], None]:
    """Fill the disk between saves, so that a save finds too little free space."""
    mount(case.place, 2**30)
    filler = case.place / "filler"

    def fill() -> None:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(case.place).free - 2**20)

    case.fault = case.start(case.after_saves(chance.randint(1, 3), fill))
    return filler.unlink


def disk_full_inside_a_save(case: Case, chance: random.Random) -> Callable[[], None]:
    """Make a write fail with ENOSPC at any point of a save."""
    mount(case.place, chance.randrange(60_000, 900_000))
    case.fault = case.start(believe_in_room)
    return lambda: mount_over(case.place, 2**30)


def file_size_limit(case: Case, chance: random.Random) -> Callable[[], None]:
    """Make a write fail with EFBIG, as with `ulimit -f`."""
    limit = chance.randrange(2_000, 60_000)
    case.fault = case.start(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    return lambda: None


def read_only_from_the_start(case: Case, chance: random.Random) -> Callable[[], None]:
    mount(case.place, 2**30)
    mount(case.place, None, MS_RDONLY)
    case.fault = case.start()
    return lambda: mount(case.place, None)


def read_only_meanwhile(case: Case, chance: random.Random) -> Callable[[], None]:
    """Make the folder read-only to a user without rights. The file system cannot become read-only while files are
    open."""
    if os.getuid():
        raise Unavailable("only root can become another user")
    case.place.chmod(0o777)

    def forbid() -> None:
        case.run.chmod(0o555)

    def as_nobody() -> None:
        become_nobody(case)
        case.after_saves(chance.randint(1, 3), forbid)()

    case.fault = case.start(as_nobody)
    if not case.run.is_dir():
        raise RuntimeError(f"the run did not begin: {case.log.read_text()}")
    return lambda: case.run.chmod(0o777)


def no_permission_from_the_start(case: Case, chance: random.Random) -> Callable[[], None]:
    if os.getuid():
        raise Unavailable("only root can become another user")
    case.place.chmod(0o755)

    case.fault = case.start(lambda: become_nobody(case))
    return lambda: None


FAULTS: dict[str, tuple[Callable[[Case, random.Random], Callable[[], None]], list[str], int]] = {
    "disk too small for one checkpoint, at the start": (disk_too_small, SAVES, 1),
    "disk filled between two saves": (disk_full_between_saves, SAVES, 3),
    "disk filled between two saves, save_async": (disk_full_between_saves, ASYNC, 3),
    "ENOSPC during a save (hidden quota)": (disk_full_inside_a_save, SAVES, 20),
    "ENOSPC during a save, save_async": (disk_full_inside_a_save, ASYNC, 10),
    "file size limit": (file_size_limit, SAVES, 10),
    "file system read-only from the start": (read_only_from_the_start, SAVES, 1),
    "folder read-only from one save on": (read_only_meanwhile, SAVES, 3),
    "folder owned by another user": (no_permission_from_the_start, SAVES, 1),
}


def suffer(fault: Callable, case: Case, chance: random.Random, whole: dict[str, str]) -> dict[str, Any]:
    """Run with the fault, then repair the disk and resume."""
    mend = fault(case, chance)
    said = case.log.read_text()
    problems = []
    told = case.fault in (0, 1, 2) and "Traceback" not in said and (case.fault == 0 or "error: " in said)
    if not told:
        problems.append(f"exit code {case.fault}: {said[-300:]}")
    checkpoints_whole = all_whole(case.run, problems)
    mend()
    code = case.start()
    equal = code == 0 and digests(case.run / f"step_{STEPS:08d}") == whole
    if not equal:
        problems.append(f"mended: exit code {code}: {case.log.read_text()[-300:]}")
    message = [line for line in said.splitlines() if line.startswith("error: ")]
    return {
        "told": told,
        "whole": checkpoints_whole,
        "equal": equal,
        "exit_code": case.fault,
        "message": message[-1].replace(str(case.place), "PLACE") if message else None,
        "problems": problems,
    }


def all_whole(run: Path, problems: list[str]) -> bool:
    before = len(problems)
    for folder in list_checkpoints(run):
        try:
            check_whole(folder)
        except ValueError as error:
            problems.append(str(error))
    return len(problems) == before


def in_own_process(work: Callable[[], dict[str, Any]], place: Path) -> dict[str, Any]:
    """Run in a fork with its own mounts and return its result."""
    answer = place.with_suffix(".json")

    def tell() -> None:
        try:
            told = work()
        except Unavailable as error:
            told = {"unavailable": str(error)}
        answer.write_text(json.dumps(told))

    code = finish(fork(tell, place.with_suffix(".harness.log")))
    if code:
        raise RuntimeError(f"{place.name}: the harness failed: {place.with_suffix('.harness.log').read_text()}")
    return json.loads(answer.read_text())


# Files that change ----------------------------------------------------------------------------------------------------


def damage(content: bytes, kind: str, chance: random.Random) -> bytes:
    """The content with one bit flipped, truncated, or missing."""
    if kind == "cut short":
        return content[: chance.randrange(len(content))]
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def damaged_files(
    inputs: Path, place: Path, undisturbed: Path, whole: dict[str, str], flips: int, chance: random.Random
) -> list[dict[str, Any]]:
    """One row per file of the newest checkpoint: `flips` bit flips, one truncation, one missing file."""
    run = place / "run"
    shutil.copytree(undisturbed, run)
    newest, previous = list_checkpoints(run)[-1], list_checkpoints(run)[-2]
    rows = []
    for path in sorted(p for p in newest.rglob("*") if p.is_file()):
        name = path.relative_to(newest).as_posix()
        content = path.read_bytes()
        problems: list[str] = []
        passed_over = 0
        kinds = ["bit"] * flips + ["cut short", "missing"]
        log, answer = place / "log", place / "found"

        def find(answer: Path = answer) -> None:
            answer.write_text(str(starting.read_earlier(config(inputs, run, SAVES), quick=False).checkpoint))

        for kind in kinds:
            path.unlink()
            if kind != "missing":
                path.write_bytes(damage(content, kind, chance))
            log.write_text("")
            code = finish(fork(find, log))
            said = log.read_text()
            if code or answer.read_text() != str(previous) or said.count(f"{newest.name}/{name}") != 1:
                problems.append(f"{kind}: exit code {code}, found {answer.read_text()}, said {said[-200:]}")
            else:
                passed_over += 1
            path.write_bytes(content)
        # Once per file, train to the end: the run resumes from the previous checkpoint and replaces the damaged one.
        path.write_bytes(damage(content, "bit", chance))
        case = Case(inputs, place, SAVES)
        code = case.start()
        equal = code == 0 and digests(newest) == whole
        if not equal:
            problems.append(f"resumed: exit code {code}: {case.log.read_text()[-300:]}")
        rows.append(
            {
                "label": f"damaged: {name}",
                "status": "ok",
                "reason": None,
                "cases": len(kinds) + 1,
                "told": passed_over + equal,
                "whole": int(all_whole(run, problems)) * (len(kinds) + 1),
                "equal": int(equal),
                "problems": problems,
            }
        )
    return rows


def main(
    flips: Annotated[int, typer.Option(help="Bit flips per kind of file.")] = 20,
    faults: Annotated[int, typer.Option(help="Maximum runs per fault.")] = 20,
    budget_seconds: Annotated[float, typer.Option(help="Start no fault after this time in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0,
    results_dir: Annotated[Path, typer.Option(help="Folder for the JSON result.")] = RESULTS,
) -> None:
    """Produce the faults, print and write. Exits with 1 if a check failed."""
    hardware = require_hardware("cpu")
    started = time.perf_counter()
    chance = random.Random(seed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="lean_ft_disk_") as folder:
        top = Path(folder)
        top.chmod(0o755)
        inputs = write_inputs(top / "inputs")
        undisturbed = Case(inputs, top / "undisturbed", SAVES)
        undisturbed.place.mkdir()
        if undisturbed.start():
            raise RuntimeError(f"the undisturbed run failed: {undisturbed.log.read_text()}")
        whole = digests(undisturbed.run / f"step_{STEPS:08d}")
        for label, (fault, settings, number) in FAULTS.items():
            row: dict[str, Any] = {"label": label, "status": "ok", "reason": None, "cases": 0, "problems": []}
            row |= {"told": 0, "whole": 0, "equal": 0, "messages": []}
            for index in range(min(number, faults)):
                if time.perf_counter() - started > budget_seconds:
                    break
                place = top / f"{len(rows)}_{index}"
                place.mkdir()
                fate = random.Random(chance.random())
                case = Case(inputs, place, settings)
                told = in_own_process(lambda case=case, fate=fate, fault=fault: suffer(fault, case, fate, whole), place)
                if "unavailable" in told:
                    row |= {"status": "unavailable", "reason": told["unavailable"]}
                    break
                row["cases"] += 1
                for key in ("told", "whole", "equal"):
                    row[key] += told[key]
                row["problems"] += told["problems"]
                if told["message"] and told["message"] not in row["messages"][:3]:
                    row["messages"] = [*row["messages"], told["message"]][:3]
                shutil.rmtree(place)
            rows.append(row)
        place = top / "damaged"
        place.mkdir()
        rows += damaged_files(inputs, place, undisturbed.run, whole, flips, chance)
    settings_of_it = {"flips": flips, "faults": faults, "seed": seed, "steps": STEPS}
    path = write_result(
        "disk_faults",
        benchmark="disk_faults",
        hardware=hardware,
        settings=settings_of_it,
        rows=rows,
        folder=results_dir,
        seconds=round(time.perf_counter() - started, 1),
    )
    print_result(path, describe, COLUMNS, table_cells)
    problems = [f"{row['label']}: {problem}" for row in rows for problem in row["problems"]]
    for problem in problems:
        print(problem)
    raise typer.Exit(1 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
