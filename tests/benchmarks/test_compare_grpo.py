"""Both sides of the comparison answer the same prompts at the same length, and what is told is of them."""

import compare_grpo
import pytest
from compare_grpo import SIDES, measure_sides, summarize, table_cells
from measure import Budget


@pytest.mark.long
@pytest.mark.parametrize("side", SIDES)
def test_each_side_learns_from_answers_of_one_length(side, monkeypatch):
    """In processes of their own, as the benchmark does; ours without a compiler, which takes long to begin."""
    monkeypatch.setattr(compare_grpo, "SETTINGS", compare_grpo.SETTINGS | {"compile": False})
    (measured,), defaults = measure_sides(
        [side],
        shape="tiny",
        answers=4,
        tokens=(32, 16),
        rounds=1,
        steps=1,
        warmup_steps=1,
        settle_steps=0,
        device="cpu",
        budget=Budget(600),
    )
    assert measured["status"] == "ok", measured
    assert 0 < measured["sampling_seconds"] < measured["step_seconds"]
    if side == "trl":
        assert measured["target_tokens_per_step"] == 4 * 16
        assert defaults is not None and defaults["weights"] == "float32" and defaults["kl_weight"] == 0


def test_a_table_tells_the_medians_of_ratios_and_what_failed():
    def row(side: str, turn: int, step: float, sampling: float, memory: int) -> dict:
        times = {"step_seconds": step, "sampling_seconds": sampling, "peak_memory_bytes": memory}
        return {"side": side, "round": turn, "status": "ok", **times}

    rows = [row("ours", 0, 2.0, 1.0, 2**30), row("trl", 0, 8.0, 2.0, 2**32)]
    rows += [row("trl", 1, 6.0, 2.0, 2**32), row("ours", 1, 3.0, 1.0, 2**30)]
    summary = summarize(rows)
    assert (summary["step_ratio"], summary["sampling_ratio"], summary["memory_ratio"]) == (0.375, 0.5, 0.25)
    ours, theirs, ratios = table_cells({"summary": summary})
    assert ours[2:] == ["1440", "2.50", "1.00", "1.50"]
    assert theirs[2:] == ["514", "7.00", "2.00", "5.00"]
    assert ratios[1:] == ["0.25", "2.67", "0.38", "0.50", "-"]
    failed = summarize([*rows[:3], rows[3] | {"status": "out of memory", "reason": "full"}])
    assert failed["ours"] == {"status": "out of memory", "reason": "full"} and "step_ratio" not in failed
    assert table_cells({"summary": failed})[0][1] == "out of memory"
