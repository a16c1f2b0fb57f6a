"""dpo and its peer are run on the same pairs, and ratios are formed within a round."""

import compare_dpo
import pytest
from compare_dpo import COMPARISONS, OURS, SEPARATE, TRL, measure_comparison, summarize, table_cells
from measure import Budget
from shapes import write_pair_rows
from tokenizers import Tokenizer


def row(side: str, turn: int, speed: float = 1.0, peak: int = 2**30, status: str = "ok", name: str = "cached") -> dict:
    numbers = {"tokens_per_second": speed, "peak_memory_bytes": peak} if status == "ok" else {}
    return {"comparison": name, "side": side, "round": turn, "status": status, "reason": None, **numbers}


def test_ratios_are_formed_within_a_round_and_a_failure_is_told():
    rows = [row(OURS, 0, 40.0), row(TRL, 0, 10.0, 2**31), row(OURS, 1, 90.0), row(TRL, 1, 15.0, 2**31)]
    (line,) = summarize(rows)
    assert (line["speed_ratio"], line["memory_ratio"]) == (5.0, 0.5)
    (line,) = summarize([*rows, row(OURS, 2, name="cached"), row(TRL, 2, status="out of memory")])
    assert "speed_ratio" not in line
    assert table_cells({"summary": [line]})[0][3:5] == ["out of memory", "-"]


def test_prompts_are_as_long_as_they_are_to_be(tmp_path):
    import json

    tokenizer = Tokenizer.from_file(str(compare_dpo.EMBEDDED_MODEL / "tokenizer.json"))
    for line in write_pair_rows(tmp_path / "pairs.jsonl", 3, 50, 14).read_text().splitlines():
        pair = json.loads(line)
        prompt = tokenizer.encode(pair["prompt"]).ids
        assert len(prompt) == 50
        for side in ("chosen", "rejected"):
            whole = tokenizer.encode(pair["prompt"] + pair[side]).ids
            assert whole[:50] == prompt and len(whole) >= 64


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("cached", TRL),
        pytest.param("lora", TRL, marks=pytest.mark.long),
        ("long_prompts", OURS),
        pytest.param("long_prompts", SEPARATE, marks=pytest.mark.long),
    ],
)
def test_each_side_trains_on_the_rows_that_it_is_to(name, side, monkeypatch):
    """In processes of their own, as the benchmark does; ours without a compiler, which takes long to begin."""
    recipe = COMPARISONS[name].recipe
    plain = compare_dpo.RECIPES[recipe]._replace(settings=compare_dpo.RECIPES[recipe].settings | {"compile": False})
    monkeypatch.setitem(compare_dpo.RECIPES, recipe, plain)
    (measured,), defaults = measure_comparison(
        name,
        sides=[side],
        shape="tiny",
        batch_size=2,
        length=32,
        rounds=1,
        steps=1,
        warmup_steps=1,
        settle_steps=0,
        device="cpu",
        budget=Budget(120),
    )
    assert measured["status"] == "ok", measured
    answer = 32 - round(32 * COMPARISONS[name].prompt_share)
    assert measured["target_tokens_per_step"] == 2 * 2 * answer
    assert measured["computed_tokens"] == (2 * (32 + answer) if side == OURS else 2 * 2 * 32)
    if side == TRL:
        assert defaults["weights"] == "float32" and defaults["bf16_autocast"] and defaults["gradient_checkpointing"]
