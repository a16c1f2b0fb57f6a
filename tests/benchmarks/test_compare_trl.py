"""The sides alternate on the same rows, ratios are computed per round, and failures are shown."""

import pytest
from compare_trl import COMPARISONS, OURS, SEPARATE, TRL, measure_sides, summarize
from measure import Budget


def row(side: str, turn: int, speed: float = 1.0, peak: int = 2**30, status: str = "ok", **others) -> dict:
    numbers = {"tokens_per_second": speed, "step_seconds": 1 / speed, "peak_memory_bytes": peak}
    what = {"comparison": "full", "side": side, "length": 64, "round": turn, "status": status, "reason": None}
    return what | (numbers if status == "ok" else {}) | others


def test_ratios_are_formed_within_a_round():
    # The machine was 2x and 3x as fast in rounds 2 and 3; the ratio is the same.
    rows = [
        *(row(OURS, 0, 40.0), row(TRL, 0, 10.0)),
        *(row(TRL, 1, 20.0), row(OURS, 1, 80.0)),
        *(row(OURS, 2, 120.0), row(TRL, 2, 30.0, peak=2**31)),
    ]
    (line,) = summarize(rows)
    assert line["speed_ratio"] == 4.0
    assert line["memory_ratio"] == 1.0
    assert line[OURS]["tokens_per_second"] == 80.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "side", "length", "targets", "computed"),
    [
        ("full", TRL, 16, 2 * 15, 2 * 16),
        ("distill", TRL, 64, None, 2 * 64),
        ("dpo_cached", TRL, 32, 4 * 28, 4 * 32),
        ("dpo_lora", TRL, 32, 4 * 28, 4 * 32),
        ("dpo_long_prompts", OURS, 32, 4 * 8, 2 * (32 + 8)),
        ("dpo_long_prompts", SEPARATE, 32, 4 * 8, 4 * 32),
        ("grpo", OURS, 64, None, 32 + 2 * 32),
        ("grpo", TRL, 64, 2 * 32, 2 * 64),
    ],
)
def test_each_side_trains_on_the_requested_tokens(name, side, length, targets, computed, monkeypatch):
    """In separate processes, as in the benchmark; lean_ft without compilation, to save time."""
    plain = COMPARISONS[name]._replace(settings=COMPARISONS[name].settings | {"compile": False})
    monkeypatch.setitem(COMPARISONS, name, plain)
    once = {"rounds": 1, "steps": 1, "warmup_steps": 1, "device": "cpu", "budget": Budget(600)}
    (measured,), defaults = measure_sides(name, [side], shape="tiny", batch_size=2, lengths=[length], **once)
    assert measured["status"] == "ok", measured
    assert measured["computed_tokens"] == computed
    if targets is not None:
        assert measured["target_tokens_per_step"] == targets
    if name == "grpo":
        assert 0 < measured["sampling_seconds"] < measured["step_seconds"]
    if side == TRL:
        assert defaults["weights"] == "float32" and defaults["bf16_autocast"] and defaults["gradient_checkpointing"]
        assert defaults["parameters"] == 598_592
        assert name != "grpo" or defaults["beta"] == 0
