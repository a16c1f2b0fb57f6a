"""Parallel map: results in order, errors at their position, and no leftover processes."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lean_ft.data import documents
from lean_ft.data.workers import map_in_processes
from tests.data.conftest import prepare
from tests.data.multiplying_worker import work_on

FOLDER = Path(__file__).parent


def answers(items, num_processes=1):
    return map_in_processes(work_on, items, num_processes)


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"  # Z: killed but not yet reaped


def test_results_come_in_order_and_items_are_taken_as_needed():
    taken = []

    def items():
        for i in itertools.count():
            taken.append(i)
            yield i

    results = answers(items(), num_processes=2)
    assert list(itertools.islice(results, 20)) == [3 * i for i in range(20)]
    assert len(taken) < 30  # the input is endless
    results.close()


def test_a_value_error_is_raised_in_its_place():
    results = answers(["1", "2", "x", "4"], num_processes=2)
    assert [next(results), next(results)] == [3, 6]
    with pytest.raises(ValueError, match=r"invalid literal.*'x'") as caught:
        next(results)
    # The command line reports a ValueError as invalid input if a lean_ft frame raised it.
    assert caught.traceback[-1].frame.f_globals["__name__"] == "lean_ft.data.workers"


def test_what_else_goes_wrong_in_a_process_is_told():
    with pytest.raises(RuntimeError, match=r"failed:\n(.|\n)*KeyError: 'number'"):
        list(answers([{}]))
    with pytest.raises(RuntimeError, match=r"ended with exit code 3"):
        list(answers(["exit"]))
    with pytest.raises(RuntimeError, match=r"exit code -9 \(killed, perhaps for lack of memory"):
        list(answers(["die", *map(str, range(9))], num_processes=2))


@pytest.mark.first
@pytest.mark.parametrize("how", ["to its end", "closed", "an error in the items"])
def test_the_processes_end_with_the_work(how: str):
    def items():
        yield from ["process"] * 6
        if how == "an error in the items":
            raise ValueError(how)
        if how == "closed":
            yield from ["sleep"] * 6

    results = answers(items(), num_processes=2)
    began = time.monotonic()
    processes = list(itertools.islice(results, 2))
    if how == "closed":
        next(results)  # the workers now sleep
        results.close()
    elif how == "to its end":
        assert len(list(results)) == 4
    else:
        with pytest.raises(ValueError, match=how):
            list(results)
    assert time.monotonic() - began < 30  # the workers would sleep for 60 s
    assert not any(map(is_running, processes))


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from multiplying_worker import work_on
from lean_ft.data.workers import map_in_processes
print("the script runs", flush=True)
results = map_in_processes(work_on, ["process", "modules", {last!r}], 1)
print(next(results), *next(results), flush=True)
list(results)
"""


def started(tmp_path: Path, last: str) -> subprocess.Popen:
    """A script without `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(FOLDER), last=last))
    command = [sys.executable, str(tmp_path / "script.py")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_a_script_is_not_run_again_and_what_is_printed_goes_to_stderr(tmp_path: Path):
    out, err = started(tmp_path, "print").communicate(timeout=60)
    assert out.count("the script runs") == 1
    assert err == "said by some library\n"
    assert "lean_ft.data.workers" in out.split() and "torch" not in out.split()


@pytest.mark.first
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_ends_with_its_parent(tmp_path: Path, number: signal.Signals):
    process = started(tmp_path, "sleep")
    assert process.stdout is not None
    process.stdout.readline()
    worker = int(process.stdout.readline().split()[0])
    time.sleep(1)  # by now it waits for the sleeping worker and prints nothing
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    _, err = process.communicate(timeout=60)
    while is_running(worker) and time.monotonic() - began < 30:
        time.sleep(0.05)
    assert not is_running(worker)
    assert time.monotonic() - began < 30
    assert err.count("Traceback") == (number == signal.SIGINT)  # only the parent's
    assert err.rstrip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "")


def test_the_process_that_makes_documents_never_loads_torch():
    script = (
        "import sys, lean_ft.data.documents, lean_ft.data.sft, lean_ft.data.unpaired; print(*sorted(sys.modules), "
        "sep=chr(10))"
    )
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "lean_ft.data.formats" in modules
    assert "torch" not in modules


@pytest.mark.first
@pytest.mark.parametrize("tokenizer", ["chat_tokenizer", "plain_tokenizer"])
def test_documents_are_those_of_one_process(config, tokenizer: str, request: pytest.FixtureRequest, monkeypatch):
    """Of several parts."""
    monkeypatch.setattr(documents, "FEW_ROWS", 30)
    monkeypatch.setattr(documents, "ROWS_AT_A_TIME", 40)
    rows = [{"prompt": f"{i}?", "completion": "c" * (i % 90)} for i in range(200)]
    tokenizer = request.getfixturevalue(tokenizer)
    (alone, counts), (shared_out, same_counts) = (
        prepare(settings, tokenizer) for settings in (config(rows, num_processes=1), config(rows, num_processes=2))
    )
    assert counts == same_counts
    assert counts.truncated > 0
    assert alone.stored.keys() == shared_out.stored.keys()
    for name, values in alone.stored.items():
        assert (values == shared_out.stored[name]).all()


@pytest.mark.long
@pytest.mark.parametrize("depth", [950, 100, 900, 980, 2000])
def test_a_deeply_nested_row_is_bad_however_many_processes_there_are(config, chat_tokenizer, monkeypatch, depth: int):
    deep = '{"prompt": ' + "[" * depth + "]" * depth + ', "completion": "c"}'
    settings = config('{"prompt": "?", "completion": "c"}\n' + deep, on_bad_row="skip")
    monkeypatch.setattr(documents, "FEW_ROWS", 0)
    reports = [prepare(settings.model_copy(update={"num_processes": n}), chat_tokenizer)[1] for n in (1, 2)]
    assert reports[0].bad_rows == reports[1].bad_rows == 1
    assert reports[0].kept == reports[1].kept == 1
