"""Margins start at exactly 0, each completion has its own reference, and a cache is reused only where it fits."""

import math

import pytest

from tests.recipes import test_dpo, test_kto, test_online_dpo, test_reward
from tests.recipes.conftest import first_rows, run_of, run_recipe

LORA = ("lora.rank=4", "lora.dropout=0.1")
CACHED, SECOND, OFF = ("reference.kind=cached",), ("reference.kind=model",), ("reference.kind=adapter_off", *LORA)
BFD, PADDING_FREE = "data.packing=bfd", "data.packing=padding_free"
FULL, BFLOAT16, FLOAT16 = "memory.activation_checkpointing=full", "model.dtype=bfloat16", "model.dtype=float16"
LN_2 = math.log(2)
BEGINNINGS = [  # test module, settings, loss of the first step
    (test_dpo, CACHED, LN_2),
    (test_dpo, (*CACHED, *LORA, BFD), LN_2),
    (test_dpo, (*SECOND, PADDING_FREE), LN_2),
    (test_dpo, OFF, LN_2),
    (test_dpo, (*OFF, BFLOAT16, BFD, "memory.tile_mlp=3"), LN_2),
    (test_dpo, (*CACHED, FLOAT16, FULL), LN_2),
    (test_dpo, (*SECOND, BFLOAT16, "data.batch_tokens=800"), LN_2),
    (test_kto, CACHED, 0.5),
    (test_kto, (*CACHED, *LORA, BFD, "batch_size=2"), 0.5),
    (test_kto, (*SECOND, PADDING_FREE, "loss.name=apo_zero_unpaired"), 0.5),
    (test_kto, (*OFF, BFLOAT16), 0.5),
    (test_kto, (*CACHED, "loss.name=bco", FULL), LN_2),
    (test_kto, (*SECOND, FLOAT16, "data.batch_tokens=400"), 0.5),
    (test_online_dpo, (), LN_2),
    (test_online_dpo, ("lora.rank=4",), LN_2),
    (test_online_dpo, ("loss.name=ipo",), 25),
    (test_reward, (), LN_2),
]


def name_of(value):
    return getattr(value, "RECIPE", str(value))


@pytest.mark.first(3)
@pytest.mark.parametrize(("module", "settings", "loss"), BEGINNINGS, ids=name_of)
def test_margins_start_at_exactly_0(tmp_path, module, settings, loss):
    short = ("gradient_accumulation_steps=2", "max_steps=2")
    first, last = run_recipe(module.RECIPE, tmp_path / "run", *module.SETTINGS, *short, *settings)
    assert first["rewards/margins"] == 0
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    if module in (test_dpo, test_kto):
        assert first["rewards/chosen"] == first["rewards/rejected"] == first.get("baseline", 0) == 0
        assert first["rewards/accuracies"] == 0.5
        assert last["rewards/chosen"] != 0


@pytest.mark.first(1)
@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize(("module", "rows", "held_out"), [(test_dpo, 24, 0.5), (test_kto, 9, 0.4)], ids=name_of)
def test_each_completion_has_its_own_reference(tmp_path, module, rows, held_out, packing):
    """With lr=0 all margins stay 0, also in the second epoch's batches and the held-out set."""
    few = (first_rows("tiny/pairs_validation.jsonl", rows, tmp_path), f"data.validation_fraction={held_out}")
    size = "batch_size=1" if packing == "bfd" and module is test_kto else "batch_size=4"
    given = (*few, f"data.packing={packing}", size, "epochs=2", "max_steps=8", "optimizer.lr=0", *CACHED)
    *lines, evaluation = run_recipe(module.RECIPE, tmp_path / "run", *module.SETTINGS, *given)
    assert lines[-1]["epoch"] > 1
    for line in [*lines, {name.removeprefix("eval_"): value for name, value in evaluation.items()}]:
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "baseline"):
            assert line.get(name, 0) == pytest.approx(0, abs=1e-5)


COMPUTED = {  # settings of runs in this order, and the number of pairs or completions that each computes
    test_dpo: {
        (): 24,  # 6 steps of 4 pairs: only those that the run uses
        ("seed=0",): 0,
        ("max_steps=7",): 4,
        ("loss.name=ipo", "batch_size=2"): 0,  # the loss is not part of the key
        ("loss.ld_alpha=0.5",): 24,
        ("data.max_prompt_length=6",): 24,
        (BFLOAT16,): 24,
    },
    test_kto: {
        (): 48,  # 6 steps of 4 completions, and as many mismatched
        ("seed=0",): 0,
        ("max_steps=7",): 8,
        ("seed=1",): 48,  # other mismatched pairs
        ("loss.name=bco", "batch_size=2"): 12,  # bco needs no mismatched pairs
    },
}


@pytest.mark.first(1)
@pytest.mark.parametrize("module", COMPUTED, ids=name_of)
def test_a_reference_cache_is_reused_only_where_it_fits(module, tmp_path, capsys):
    for i, (settings, expected) in enumerate(COMPUTED[module].items()):
        run_of(module, (*CACHED, "data.cache_dir=TMP/cache", *settings), tmp_path / f"run{i}")
        said = capsys.readouterr().out.partition("log-probabilities of ")[2]
        assert int(said.split()[0].replace(",", "")) == expected, settings
