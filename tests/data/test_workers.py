"""Work shared out to processes: the results in order, errors in their place, and nothing left running."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lean_ft.data import documents, prepare_documents
from lean_ft.data.documents import FEW_ROWS
from lean_ft.data.workers import map_in_processes


@pytest.fixture(autouse=True)
def _the_worker_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def answers(items, factor=3, num_processes=1):
    return map_in_processes("multiplying_worker", factor, items, num_processes)


def test_results_come_in_order_and_items_are_taken_as_needed():
    taken = []

    def items():
        for i in itertools.count():
            taken.append(i)
            yield {"number": i}

    results = answers(items(), num_processes=2)
    assert [answer.value for answer in itertools.islice(results, 20)] == [3 * i for i in range(20)]
    assert len(taken) < 30  # of an endless many
    results.close()


def test_arrays_arrive_as_they_were_sent():
    [(value, arrays)] = answers([[1, 2, 3]])
    assert value is None
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.int64]
    assert [array.tolist() for array in arrays] == [[3, 6, 9], [False, True, True], []]


def test_a_value_error_is_raised_in_its_place():
    results = answers(["1", "2", "x", "4"], num_processes=2)
    assert [next(results).value, next(results).value] == [3, 6]
    with pytest.raises(ValueError, match=r"invalid literal.*'x'"):
        next(results)
    with pytest.raises(ValueError, match="no factor"):
        list(answers(["1"], factor=None))


def test_what_else_goes_wrong_in_a_process_is_told():
    with pytest.raises(RuntimeError, match=r"failed:\n(.|\n)*KeyError: 'number'"):
        list(answers([{}]))
    with pytest.raises(RuntimeError, match=r"ended with exit code 3"):
        list(answers(["exit"]))
    with pytest.raises(RuntimeError, match=r"exit code -9 \(killed: is memory full"):
        list(answers(["die"]))
    with pytest.raises(RuntimeError, match=r"ended with exit code 1"):
        list(map_in_processes("no_such_module", None, [1], 1))


def test_a_process_ends_with_the_work():
    [(process, _)] = answers(["process"])
    assert not Path(f"/proc/{process}").exists()


def test_the_process_that_makes_documents_never_loads_torch():
    script = "import sys, lean_ft.data.documents_worker; print(*sorted(sys.modules), sep=chr(10))"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "lean_ft.data.render" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("tokenizer", ["plain_tokenizer", "chat_tokenizer"])
def test_documents_are_those_of_one_process(config, tokenizer: str, request: pytest.FixtureRequest):
    rows = [{"prompt": f"{i}?", "completion": "c" * (i % 90)} for i in range(FEW_ROWS + 100)]
    tokenizer = request.getfixturevalue(tokenizer)
    (alone, counts), (shared_out, same_counts) = (
        prepare_documents(settings, tokenizer, settings.source)
        for settings in (config(rows, num_processes=1), config(rows, num_processes=2))
    )
    assert counts == same_counts
    assert counts.truncated > 0
    for name in ("tokens", "trained", "starts", "lengths", "num_targets"):
        assert (getattr(alone, name) == getattr(shared_out, name)).all()


@pytest.mark.parametrize("depth", [100, 900, 950, 980, 2000])
def test_a_deeply_nested_row_is_bad_however_many_processes_there_are(config, chat_tokenizer, monkeypatch, depth: int):
    deep = '{"prompt": ' + "[" * depth + "]" * depth + ', "completion": "c"}'
    settings = config('{"prompt": "?", "completion": "c"}\n' + deep, on_bad_row="skip")
    monkeypatch.setattr(documents, "FEW_ROWS", 0)
    reports = [
        prepare_documents(settings.model_copy(update={"num_processes": n}), chat_tokenizer, settings.source)[1]
        for n in (1, 2)
    ]
    assert reports[0].bad_rows == reports[1].bad_rows == 1
    assert reports[0].kept == reports[1].kept == 1
