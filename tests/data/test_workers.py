"""Work shared out to processes: the results in order, errors in their place, and nothing left running."""

import itertools
import operator
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from lean_ft.data import prepare_documents
from lean_ft.data.documents import FEW_ROWS
from lean_ft.data.workers import map_in_processes


def test_results_come_in_order_and_items_are_taken_as_needed():
    taken = []

    def items():
        for i in itertools.count():
            taken.append(i)
            yield i

    results = map_in_processes(partial(operator.mul, 3), items(), 2)
    assert list(itertools.islice(results, 20)) == [3 * i for i in range(20)]
    assert len(taken) < 30  # of an endless many
    results.close()


def test_a_value_error_is_raised_in_its_place():
    results = map_in_processes(int, ["1", "2", "x", "4"], 2)
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(ValueError, match=r"invalid literal.*'x'"):
        next(results)


def test_what_else_goes_wrong_in_a_process_is_told():
    with pytest.raises(RuntimeError, match=r"failed:\n(.|\n)*TypeError"):
        list(map_in_processes(len, [1], 1))
    with pytest.raises(RuntimeError, match=r"ended with exit code 3"):
        list(map_in_processes(os._exit, [3], 1))
    with pytest.raises(RuntimeError, match=r"exit code -9 \(killed: is memory full"):
        list(map_in_processes(signal.raise_signal, [signal.SIGKILL], 1))


def test_processes_end_with_the_work_and_never_load_torch():
    [modules] = map_in_processes(eval, ["set(__import__('sys').modules)"], 1)
    assert "lean_ft.data.workers" in modules or "__main__" in modules
    [renderer_modules] = map_in_processes(
        eval, ["__import__('lean_ft.data.documents') and set(__import__('sys').modules)"], 1
    )
    assert "lean_ft.data.render" in renderer_modules
    assert "torch" not in renderer_modules
    [process] = map_in_processes(eval, ["__import__('os').getpid()"], 1)
    assert not Path(f"/proc/{process}").exists()


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
