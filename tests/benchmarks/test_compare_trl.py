"""The sides alternate on the same rows, ratios are computed per round, and failures are shown."""

import json

import compare_trl
import pytest
from compare_trl import CAREFUL, COMPARISONS, OURS, SEPARATE, TRL, measure_sides, summarize
from measure import Budget
from results import RESULTS


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


def test_each_configuration_of_trl_has_its_row_and_its_part_of_the_sentence():
    rows = [row(OURS, 0, 40.0), row(TRL, 0, 10.0, peak=2**32), row(CAREFUL, 0, 20.0, peak=2**31)]
    result = {"summary": summarize(rows)}
    assert [(cells[1], cells[3:5], cells[7]) for cells in compare_trl.table_cells(result)] == [
        ("TRL, defaults", ["4.00 GiB", "0.25"], "4.00x"),
        ("TRL, with care", ["2.00 GiB", "0.50"], "2.00x"),
    ]
    both = (
        "4.00x the speed of TRL with its defaults, with 0.25 of its memory; 2.00x the speed of TRL configured with care"
    )
    assert f"Full fine-tuning: {both}, with 0.50 of its memory." == compare_trl.sentence(result)
    failed = {"summary": summarize([*rows[:2], row(CAREFUL, 0, status="out of memory")])}
    assert compare_trl.table_cells(failed)[1][3:] == ["out of memory", "-", "40", "-", "-"]
    assert compare_trl.sentence(failed).endswith("no number for TRL configured with care (out of memory).")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("compare_trl_*.json")), ids=lambda file: file.stem)
def test_committed_results_have_a_table_and_a_sentence(file):
    result = json.loads(file.read_text())
    measured = {(line["side"], line["comparison"]) for line in result["rows"]}
    assert len(compare_trl.table_cells(result)) >= len({name for _, name in measured})
    assert compare_trl.sentence(result).count("not measured yet") == 2 - len(
        {side for side, _ in measured} & {TRL, CAREFUL}
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "side", "length", "targets", "computed"),
    [
        ("full", TRL, 16, 2 * 15, 2 * 16),
        ("full", CAREFUL, 16, 2 * 15, 2 * 16),
        ("lora", CAREFUL, 16, 2 * 15, 2 * 16),
        ("distill", CAREFUL, 256, None, 2 * 256),
        ("dpo_cached", CAREFUL, 32, 4 * 28, 4 * 32),
        ("dpo_lora", CAREFUL, 32, 4 * 28, 4 * 32),
        ("grpo", CAREFUL, 64, 2 * 32, 2 * 64),
        ("tools", CAREFUL, 416, 2 * 96, 2 * 416),
        ("distill", TRL, 64, None, 2 * 64),
        ("dpo_cached", TRL, 32, 4 * 28, 4 * 32),
        ("dpo_lora", TRL, 32, 4 * 28, 4 * 32),
        ("dpo_long_prompts", OURS, 32, 4 * 8, 2 * (32 + 8)),
        ("dpo_long_prompts", SEPARATE, 32, 4 * 8, 4 * 32),
        ("grpo", OURS, 64, None, 32 + 2 * 32),
        ("grpo", TRL, 64, 2 * 32, 2 * 64),
        ("tools", OURS, 416, 2 * 96, 208 + 2 * 208),
    ],
)
def test_each_side_trains_on_the_requested_tokens(name, side, length, targets, computed, monkeypatch):
    """In separate processes, as in the benchmark; lean_ft without compilation, to save time."""
    plain = COMPARISONS[name]._replace(settings=COMPARISONS[name].settings | {"compile": False})
    monkeypatch.setitem(COMPARISONS, name, plain)
    once = {"rounds": 1, "steps": 1, "warmup_steps": 1, "device": "cpu", "budget": Budget(600)}
    (measured,), resolved = measure_sides(name, [side], shape="tiny", batch_size=2, lengths=[length], **once)
    assert measured["status"] == "ok", measured
    assert measured["computed_tokens"] == computed
    if targets is not None:
        assert measured["target_tokens_per_step"] == targets
    if name in ("grpo", "tools"):
        assert 0 < measured["sampling_seconds"] < measured["step_seconds"]
    if side in (TRL, CAREFUL):
        facts = resolved[side]
        assert facts["bf16_autocast"] and facts["gradient_checkpointing"] and facts["parameters"] == 598_592
        careful = (facts["weights"] == "bfloat16", facts["optimizer"] == "adamw_bnb_8bit")
        assert careful == ((True, True) if side == CAREFUL else (False, False))
        assert name != "grpo" or facts["beta"] == 0
