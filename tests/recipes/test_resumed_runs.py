"""Each training recipe, stopped and resumed, equals the uninterrupted run bitwise."""

from pathlib import Path

import pytest

from tests.recipes import (
    test_classify,
    test_distill,
    test_dpo,
    test_finetune,
    test_grpo,
    test_kto,
    test_online_dpo,
    test_ppo,
    test_reward,
)
from tests.recipes.conftest import run_of
from tests.training.toy_runs import digests, metrics

LORA = ("lora.rank=4", "lora.dropout=0.1")
ADAPTER = ("lora.rank=4", "model.dtype=float32", "schedule.name=constant")
ROUNDS = ("generation.steps_per_round=2", "generation.passes=2", "max_steps=5", *LORA)  # 2 rounds of 4 steps
STUDENT = ("model.path=tiny", "model.random_init=true")
KEPT = (*STUDENT, "distill.cached=TMP/kept", "gradient_accumulation_steps=2")
ROWS = [  # test module, settings, the step after which the run stops
    (test_finetune, (*ADAPTER, "lora.dropout=0.2", "lora.lr_ratio=4"), 3),
    (test_finetune, (*ADAPTER, "lora.dora=true", "optimizer.in_backward=true"), 3),
    (test_finetune, (*ADAPTER, "lora.quantize=nf4", "optimizer.name=adamw_8bit", "model.dtype=bfloat16"), 3),
    (test_finetune, (*ADAPTER, "lora.init=pissa", "lora.rslora=true"), 3),
    (test_dpo, ("reference.kind=cached",), 3),
    (test_dpo, (*LORA, "data.packing=bfd"), 3),
    (test_dpo, ("reference.kind=model",), 3),
    (test_kto, ("reference.kind=cached",), 3),
    (test_kto, (*LORA, "data.packing=bfd", "batch_size=1"), 3),
    (test_kto, ("loss.name=bco", "log_every=2"), 3),
    (test_reward, (), 3),
    (test_reward, (*LORA, "data.packing=bfd"), 3),
    (test_reward, ("loss.per_token=true",), 3),
    (test_classify, ("data.packing=bfd", "loss.class_weights=balanced"), 3),
    (test_classify, LORA, 3),
    (test_distill, (*STUDENT, *test_distill.LIVE, "optimizer.in_backward=true", "data.packing=bfd"), 3),
    (test_distill, (*STUDENT, *test_distill.LIVE, *LORA, "distill.teacher_dtype=nf4"), 3),
    (test_distill, KEPT, 3),
    (test_ppo, ("save_async=true", "max_steps=5"), 1),
    (test_ppo, ("lora.rank=4", "optimizer.name=adamw_8bit", "max_steps=5"), 2),
    (test_online_dpo, ROUNDS, 1),
    (test_online_dpo, ROUNDS, 4),
    (test_grpo, test_grpo.STATEFUL, 1),
    (test_grpo, test_grpo.STATEFUL, 3),
    (test_grpo, test_grpo.STATEFUL, 4),
    (test_grpo, test_grpo.STATEFUL, 6),
    pytest.param(test_grpo, (*test_grpo.STATEFUL, "generation.compile=true"), 3, marks=pytest.mark.long),
]


def prepare(folder: Path) -> None:
    (folder / "mine.py").write_text(test_grpo.REWARDS)


def prepare_cache(folder: Path) -> None:
    test_distill.keep(folder / "kept", top_k=16)


@pytest.mark.first(3)
@pytest.mark.parametrize(("module", "settings", "stop"), ROWS, ids=lambda value: getattr(value, "RECIPE", str(value)))
def test_a_resumed_run_equals_the_uninterrupted_run(run_once, module, settings, stop):
    whole = run_once(module, settings, prepare_cache if settings == KEPT else prepare)
    parts = whole.with_name(f"stopped{stop}")
    cache = (f"data.cache_dir={parts}_cache",) if module is test_dpo else ()
    run_of(module, (*settings, *cache, f"max_steps={stop}"), parts)
    for values in Path(f"{parts}_cache").glob("reference-*/values"):  # a lost cache is computed again
        values.write_bytes(b"\xff" * len(values.read_bytes()))
    run_of(module, (*settings, *cache), parts)
    assert metrics(parts, timed=False) == metrics(whole, timed=False)
    last = max(path.name for path in whole.glob("step_*"))
    assert digests(parts / last) == digests(whole / last)
    ours, theirs = ([file.read_text() for file in folder.glob("samples.jsonl")] for folder in (parts, whole))
    assert ours == theirs
