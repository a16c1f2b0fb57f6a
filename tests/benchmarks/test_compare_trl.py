"""The comparison takes turns, forms ratios within a round, and shows a side that failed as failed."""

import subprocess
import sys

import compare_trl
import product_rate
import pytest
from compare_trl import measure_sides, summarize, table_cells
from measure import Budget


def row(side: str, turn: int, speed: float = 1.0, peak: int = 2**30, status: str = "ok", length: int = 64) -> dict:
    numbers = {"tokens_per_second": speed, "peak_memory_bytes": peak} if status == "ok" else {}
    return {"side": side, "length": length, "round": turn, "status": status, "reason": None, **numbers}


def test_ratios_are_formed_within_a_round():
    # The machine was twice as fast in the second round and three times in the third: the ratio does not care.
    rows = [
        *(row("ours", 0, 40.0), row("trl", 0, 10.0)),
        *(row("ours", 1, 80.0), row("trl", 1, 20.0)),
        *(row("ours", 2, 120.0), row("trl", 2, 30.0, peak=2**31)),
    ]
    (line,) = summarize(rows)
    assert line["speed_ratio"] == 4.0
    assert line["memory_ratio"] == 1.0
    assert line["ours"]["tokens_per_second"] == 80.0


def test_a_side_that_failed_once_has_no_number():
    rows = [row("ours", 0, 40.0), row("trl", 0, status="out of memory"), row("ours", 1, 40.0), row("trl", 1, 10.0)]
    summary = summarize(rows)
    assert "speed_ratio" not in summary[0]
    assert table_cells({"summary": summary}) == [["64", "1.00 GiB", "out of memory", "-", "40", "-", "-"]]


def test_one_side_alone_can_be_measured():
    assert table_cells({"summary": summarize([row("ours", 0, 40.0)])}) == [["64", "1.00 GiB", "-", "-", "40", "-", "-"]]


def test_the_sides_take_turns(monkeypatch):
    commands = []

    def note(command, **_):
        commands.append("trl" if any("trl_sft" in str(part) for part in command(compare_trl.RESULTS)) else "ours")
        return {"status": "failed", "reason": "not run here"}

    monkeypatch.setattr(compare_trl, "measure_training", note)
    monkeypatch.setattr(product_rate, "command", lambda device: [sys.executable, "-c", f"print({len(commands)} + 300)"])
    rows, defaults = measure_sides(
        ["ours", "trl"],
        shape="tiny",
        batch_size=2,
        lengths=[16],
        rounds=3,
        steps=1,
        warmup_steps=0,
        device="cpu",
        budget=Budget(60),
    )
    assert commands == ["ours", "trl", "trl", "ours", "ours", "trl"]
    assert [r["round"] for r in rows] == [0, 0, 1, 1, 2, 2]
    assert [r["product_gflops"] for r in rows] == [300, 301, 302, 303, 304, 305]
    assert defaults is None


def test_the_rate_of_products_is_told_by_a_process_of_its_own():
    output = subprocess.check_output(product_rate.command("cpu"), text=True)
    assert int(output) > 0


@pytest.mark.long
def test_trl_runs_in_its_defaults_on_the_same_rows():
    (measured,), defaults = measure_sides(
        ["trl"],
        shape="tiny",
        batch_size=2,
        lengths=[16],
        rounds=1,
        steps=1,
        warmup_steps=1,
        device="cpu",
        budget=Budget(120),
    )
    assert measured["status"] == "ok", measured
    assert measured["target_tokens_per_step"] == 2 * 15
    assert defaults["weights"] == "float32"
    assert defaults["bf16_autocast"] is True
    assert defaults["gradient_checkpointing"] is True
    assert defaults["parameters"] == 598_592
