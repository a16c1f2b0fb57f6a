"""Settings of memory, layout, micro-batches and precision do not change the numbers of a run."""

import pytest

from tests.recipes import test_distill, test_dpo, test_finetune, test_full_finetune_single_device, test_grpo, test_ppo
from tests.recipes.conftest import first_rows, run_of
from tests.training.toy_runs import TIMES, metrics

FLOAT32 = ("model.dtype=float32",)
ADAPTER = (*FLOAT32, "lora.rank=4", "schedule.name=constant")
LEAN = ("optimizer.in_backward=true", "memory.loss_chunk_tokens=16")
DROPOUT = (*ADAPTER, "lora.dropout=0.1", "data.packing=bfd")
TEACHER = (*test_distill.LIVE, "model.path=tiny", "model.random_init=true")
# Packing changes which rows share a batch, so each step uses all rows.
TEXTS = (*TEACHER, "data.source=TMP/texts/few.jsonl", "batch_size=12", "epochs=3", "max_steps=3")
ON_POLICY = (*TEACHER, "distill.on_policy=1", "generation.max_new_tokens=4", "max_steps=2", "batch_size=6")
ALL_PAIRS = ("data.source=TMP/pairs/few.jsonl", "batch_size=12", "max_steps=3", "epochs=3")
HELD_OUT = ("data.validation_fraction=0.1", "loss.ld_alpha=0.5", "loss.wpo=true")
SIMPO = ("loss.name=simpo", "loss.sft_weight=0.5", "batch_size=6")
IPO = ("loss.name=ipo", "loss.ld_alpha=0.5", "loss.wpo=true", "loss.sft_weight=0.5", "batch_size=6")
THREE = ("batch_size=2", "gradient_accumulation_steps=3")
REPEATED = ("data.shared_prompt=false",)
GROUPS = ("generation.num_answers=4", "max_steps=2")
LOSS = ("loss",)
FULL = test_full_finetune_single_device
VALUES = (*LOSS, "value_loss", "policy_loss", "grad_norm", "kl", "entropy", "reward")
SAMPLES = ("reward", "completion_length", "loss")
ROWS = [  # test module, settings, settings that change no number, relative tolerance; names, or all numbers but times
    (FULL, FLOAT32, ("batch_size=2", "gradient_accumulation_steps=4"), 1e-4, (*LOSS, "grad_norm", "target_tokens")),
    (FULL, FLOAT32, (*LEAN, "memory.activation_checkpointing=full"), 1e-5, LOSS),
    (FULL, FLOAT32, ("model.dtype=bfloat16",), 0.06, LOSS),
    (FULL, (*FLOAT32, "data.packing=bfd"), ("model.dtype=float16",), 0.06, LOSS),
    (test_finetune, DROPOUT, (*LEAN, "memory.activation_checkpointing=selective"), 1e-5, LOSS),
    (test_finetune, ADAPTER, ("model.dtype=bfloat16",), 0.06, LOSS),
    (test_finetune, ADAPTER, ("model.dtype=float16",), 0.06, LOSS),
    (test_distill, TEXTS, ("batch_size=4", "gradient_accumulation_steps=3"), 2e-4, None),
    (test_distill, TEXTS, ("data.packing=bfd",), 2e-4, None),
    pytest.param(test_distill, TEXTS, ("data.packing=bfd", "compile=true"), 2e-4, None, marks=pytest.mark.long),
    (test_distill, ON_POLICY, THREE, 2e-4, (*LOSS, "cross_entropy", "target_tokens")),
    (test_dpo, ALL_PAIRS, ("data.packing=bfd",), 1e-4, None),
    (test_dpo, HELD_OUT, REPEATED, 1e-4, None),
    (test_dpo, (*HELD_OUT, "data.packing=padding_free"), REPEATED, 1e-4, None),
    (test_dpo, SIMPO, THREE, 2e-4, None),
    (test_dpo, IPO, THREE, 2e-4, None),
    (test_ppo, GROUPS, REPEATED, 1e-3, VALUES),
    (test_ppo, (*GROUPS, "lora.rank=4"), REPEATED, 1e-3, VALUES),
    *(
        (test_grpo, (f"loss.name={loss}", "max_steps=2"), settings, 1e-5, names)
        for loss in ("grpo", "dapo")
        for settings, names in [
            (("memory.activation_checkpointing=full", *LEAN[1:], "memory.tile_mlp=2"), (*SAMPLES, "grad_norm")),
            (("generation.cache_gib=0.0001", "optimizer.in_backward=true"), SAMPLES[:2]),
            (("batch_size=4", "gradient_accumulation_steps=4"), (*SAMPLES, "grad_norm")),
            (("batch_size=16", "gradient_accumulation_steps=1"), (*SAMPLES, "grad_norm")),
            (REPEATED, (*SAMPLES, "grad_norm")),
        ]
    ),
]


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("module", "settings", "changed", "rel", "names"), ROWS, ids=lambda value: getattr(value, "RECIPE", str(value))
)
def test_settings_change_no_number(run_once, tmp_path, module, settings, changed, rel, names):
    def prepare(folder):
        for kind in ("texts", "pairs"):
            (folder / kind).mkdir()
        first_rows("tiny/validation.jsonl", 12, folder / "texts")
        first_rows("tiny/pairs_validation.jsonl", 12, folder / "pairs")

    whole = run_once(module, settings, prepare)
    other = run_of(module, (*settings, *changed), whole.with_name(" ".join(changed)))
    lines, expected = metrics(other), metrics(whole)
    least = 1e-5 if module in (test_grpo, test_ppo) else 1e-6  # their losses are near 0
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in names or theirs.keys() - TIMES - {"tokens"}:
            bound = max(rel, 1e-3) if name == "grad_norm" else rel
            assert ours[name] == pytest.approx(theirs[name], rel=bound, abs=least), name
    tokens, repeated = (sum(line.get("tokens", 0) for line in run) for run in (expected, lines))
    assert changed != REPEATED or tokens < 0.85 * repeated
