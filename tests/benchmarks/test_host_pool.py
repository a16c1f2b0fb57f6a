"""The sides alternate, medians are over counted steps, and a failed run gives no number."""

import json

import host_pool
import pytest


def turn(name, seconds, status="ok"):
    known = {"name": name, "status": status, "settings": {}, "reason": None if status == "ok" else "why"}
    return {**known, "all_step_seconds": seconds, "peak_memory_bytes": 2**30} if status == "ok" else known


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the script with fake measurements. Returns its result and the order of the runs."""

    def main(outcome):
        orders = []

        def measure(names, **_):
            orders.append(names)
            return [outcome(name, number) for number, name in enumerate(names)]

        monkeypatch.setattr(host_pool, "measure_rungs", measure)
        host_pool.main("tiny", 4, 128, rounds=2, steps=3, warmup_steps=1, timeout_seconds=1, results_dir=tmp_path)
        (file,) = tmp_path.glob("host_pool_tiny_4x128_*.json")
        return json.loads(file.read_text()), orders[0]

    return main


def test_sides_alternate_and_only_steps_behind_the_first_ones_count(run):
    times = {"loss_sums": [9.0, 1.0, 2.0, 1.0], "returned": [9.0, 2.0, 4.0, 3.0]}
    result, order = run(lambda name, number: turn(name, times[name]))
    assert order == ["loss_sums", "returned", "returned", "loss_sums"]
    assert [row["step_seconds"] for row in result["rows"]] == [1.0, 3.0]
    assert host_pool.table_cells(result)[1][1:6] == ["3.00", "2.00", "4.00", "171", "-67 %"]


def test_a_turn_that_failed_gives_no_number(run):
    result, _ = run(lambda name, number: turn(name, [1.0] * 4, "out of memory" if number == 2 else "ok"))
    assert [row["status"] for row in result["rows"]] == ["ok", "out of memory"]
    assert host_pool.table_cells(result)[1][1:] == ["out of memory", *["-"] * 6]
