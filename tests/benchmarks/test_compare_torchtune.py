"""torchtune's DPO recipe gets the ids that lean_ft trains on, and lean_ft's side trains them."""

import json

import pytest
from compare_torchtune import SIDES, Recipe, measure_sides, summarize, table_cells, write_token_pairs
from measure import Budget
from shapes import write_model_folder, write_pair_rows

from lean_ft import load_tokenizer


def test_pairs_have_the_ids_of_the_texts_and_train_the_completions(tmp_path):
    model = write_model_folder("tiny", tmp_path / "model")
    pairs = write_pair_rows(tmp_path / "rows.jsonl", 3, 8, 24)
    tokenizer = load_tokenizer(model)
    lines = write_token_pairs(pairs, model, 32).read_text().splitlines()
    for pair, row in zip(map(json.loads, pairs.read_text().splitlines()), map(json.loads, lines), strict=True):
        for side in ("chosen", "rejected"):
            ids = row[f"{side}_input_ids"]
            assert len(ids) == 32
            assert ids[0] == 1 and 1 not in ids[1:]  # bos, once
            assert ids[1:8] == tokenizer.encode(pair["prompt"])[-7:]
            assert row[f"{side}_labels"] == [-100] * 8 + ids[8:]
            assert pair[side].startswith(tokenizer.decode(ids[8:]))


def test_ratios_are_of_the_fastest_and_the_leanest_peer():
    def row(side, speed, peak):
        return {
            "side": side,
            "round": 0,
            "status": "ok",
            "tokens_per_second": speed,
            "step_seconds": 1.0,
            "peak_memory_bytes": peak,
        }

    rows = [row("lean", 30.0, 2**30), row("peer", 20.0, 2**32), row("peer_compiled", 10.0, 2**31)]
    ours, *_ = table_cells({"summary": summarize(Recipe.dpo, rows)})
    assert ours[3:] == ["1.50x", "0.25", "3.00x", "0.50"]


@pytest.mark.long
def test_the_dpo_side_of_lean_ft_trains_the_completions(monkeypatch, tmp_path):
    side = SIDES[Recipe.dpo]["lean"]
    monkeypatch.setitem(SIDES[Recipe.dpo], "lean", side._replace(settings={**(side.settings or {}), "compile": False}))
    sizes = {"shape": "tiny", "batch_size": 2, "length": 64, "rounds": 1, "steps": 1, "warmup_steps": 1}
    (measured,) = measure_sides(Recipe.dpo, ["lean"], tmp_path, **sizes, budget=Budget(600))
    assert measured["status"] == "ok", measured
    assert measured["target_tokens_per_step"] == 4 * 56
    assert measured["tokens_per_second"] * measured["step_seconds"] == pytest.approx(4 * 64)
