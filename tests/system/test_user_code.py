"""Calls of user code, whoever makes them. `tests/tools/test_functions.py` has the results of tools."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lean_ft.system.interrupts import OutsideTraining
from lean_ft.system.user_code import Caller, CallThread, Failed, TookTooLong, closing, copied


def test_a_copy_has_no_part_in_common() -> None:
    """Also with itself, since one row may stand for several completions."""
    row = {"a": [1, 2], "b": {"c": [{}]}, "d": SimpleNamespace(e=[3])}
    first, second = copied([row, row])
    first["a"].append(3)
    first["b"]["c"][0]["x"] = 1
    first["d"].e.clear()
    assert second == row == {"a": [1, 2], "b": {"c": [{}]}, "d": SimpleNamespace(e=[3])}
    assert copied(os.getcwd) is os.getcwd


def test_the_current_folder_is_restored_when_no_call_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not before: a tool that changes the folder for a while is not disturbed by others that end."""
    inside, leave, here = threading.Event(), threading.Event(), os.getcwd()

    def stays() -> str:
        os.chdir(tmp_path)
        inside.set()
        leave.wait(20)
        return os.getcwd()

    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(Caller("stays", seconds=30).call(stays)))
    other.start()
    inside.wait(20)
    assert Caller("ends").call(os.getcwd) == str(tmp_path)
    leave.set()
    other.join()
    assert (found, os.getcwd()) == ([str(tmp_path)], here)
    (tmp_path / "gone").mkdir()

    def deletes() -> None:
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    async def changes() -> None:
        os.chdir(tmp_path)

    for change in (deletes, changes, lambda: os.chdir(tmp_path)):
        Caller("changes").call(change)
        assert os.getcwd() == here
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert [line.split()[1] for line in said] == ["stays", "changes"]
    with pytest.raises(TookTooLong):
        Caller("hangs", seconds=0.2).call(lambda: os.chdir(tmp_path) or time.sleep(2))
    assert os.getcwd() == here


def test_a_call_that_ends_late_does_not_move_the_program_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, go_on = threading.enumerate(), threading.Event()
    with pytest.raises(TookTooLong):
        Caller("hangs", seconds=0.2).call(go_on.wait, 20)
    monkeypatch.chdir(tmp_path)
    late = [one for one in threading.enumerate() if one not in before]
    go_on.set()
    for one in late:
        one.join(20)
    assert late and os.getcwd() == str(tmp_path)
    assert "WARNING" not in capsys.readouterr().out


def test_a_late_call_leaves_the_thread_to_later_ones() -> None:
    thread = CallThread()
    assert Caller("a", thread=thread).call(threading.get_ident) == Caller("b", thread=thread).call(threading.get_ident)
    with pytest.raises(TookTooLong, match="longer than tools.seconds=0.2"):
        Caller("c", seconds=0.2, thread=thread).call(time.sleep, 5)
    assert Caller("d", seconds=5, thread=thread).call(lambda: "next") == "next"

    async def waits(seconds: float) -> Any:
        await asyncio.sleep(seconds)
        raise TimeoutError("own")

    with pytest.raises(Failed, match="TimeoutError: own"):
        Caller("e", seconds=5, thread=thread).call(waits, 0)
    with pytest.raises(TookTooLong) as late:
        Caller("f", seconds=0.2, thread=thread).call(waits, 60)
    assert not late.value.runs_on  # a coroutine ends


def test_a_signal_is_no_error_of_the_function() -> None:
    with OutsideTraining("leanft run"), pytest.raises(SystemExit) as stopped:
        Caller("a").call(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert stopped.value.code == 130
    with pytest.raises(Failed, match="SystemExit: 130"):
        Caller("a").call(sys.exit, 130)


def test_what_was_made_inside_is_closed() -> None:
    from lean_ft.system.user_code import close_later

    closed: list[int] = []
    with closing():
        close_later(lambda: closed.append(1))
        with pytest.raises(KeyError), closing():
            raise KeyError(close_later(lambda: closed.append(2)))
        assert closed == [2]
    assert closed == [2, 1]


FORKS = """
import multiprocessing, os, sys
from lean_ft.system.user_code import Caller, Failed

def fork(status=None):
    print("in the call")
    if os.fork():
        os.wait()
        return "parent"
    if status is not None:
        sys.exit(status)
    return "child"

def works():
    worker = multiprocessing.get_context("fork").Process(target=print, args=("from a worker",))
    worker.start()
    worker.join()

print("written before")
file = open("file", "w")
file.write("once")
print([Caller("a").call(fork), Caller("a").call(fork, 3), Caller("a", seconds=20).call(fork), Caller("b").call(works)])
"""


def test_a_fork_neither_goes_on_as_a_second_run_nor_writes_buffered_lines_again(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "forks.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    expected = ["written before", *["in the call"] * 3, "from a worker", "['parent', 'parent', 'parent', None]"]
    assert done.stdout.splitlines() == expected
    assert (tmp_path / "file").read_text() == "once"


TOOL = '''
import os, subprocess, time

def hangs(a: int) -> str:
    """Hangs, and starts a process.

    Args:
        a: A number.
    """
    subprocess.Popen(["sleep", "600"])
    open("begun", "w").close()
    time.sleep(600)
'''
CALLS = """
from lean_ft.settings import ToolsConfig
from lean_ft.tools import Call, Tools
Tools(ToolsConfig(functions=["tool.py:hangs"], process=True)).results([Call("hangs", {"a": 1})])
"""


@pytest.mark.long
def test_processes_of_tools_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", CALLS], cwd=tmp_path, env=environment) as run:
        while not (tmp_path / "begun").exists():
            assert run.poll() is None
            time.sleep(0.05)
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) == 2
        run.kill()
    assert psutil.wait_procs(started, timeout=10)[1] == []
