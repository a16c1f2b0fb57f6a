"""Plans of steps whose loss compares the rows of all micro-batches."""

import pytest

from lean_ft.plan.rehearsal import Rehearsal
from lean_ft.plan.time import Spent
from tests.recipes.conftest import planned

SETTINGS = ("model.path=tiny", "data.source=none.jsonl", "data.max_length=32", "data.negatives=0", "batch_size=4")


def plan(recipe: str, number: int) -> Rehearsal:
    return planned(recipe, *SETTINGS, f"gradient_accumulation_steps={number}", device="H100")


def flops(rehearsal: Rehearsal) -> float:
    """Of matrix products with weights."""
    return sum(costs.flops for (module, name), costs in rehearsal.ledger.items() if "proj" in module and "mm" in name)


def test_each_micro_batch_but_one_has_a_second_forward_pass():
    """Backward takes the products of two forward passes: 3 for a micro-batch, and 4 with the first pass."""
    one = flops(plan("embed", 1))
    for number in (2, 3, 16):
        assert flops(plan("embed", number)) == pytest.approx((4 * number - 1) / 3 * one)
    assert flops(plan("rerank", 16)) == pytest.approx(16 * flops(plan("rerank", 1)))


def test_more_micro_batches_cost_the_vectors_of_their_rows():
    few, many = plan("embed", 3), plan("embed", 1003)
    vectors = 1000 * 4 * 2 * 128 * 4  # micro-batches, rows, texts, features, bytes
    assert 2 * vectors <= many.peak_bytes - few.peak_bytes < 12 * vectors  # with their gradients, and the loss
    assert many.tokens == few.tokens // 3 * 1003


def test_a_host_that_waited_does_not_fall_behind_when_work_repeats():
    spent = Spent(clock=5.0, host_clock=1.0)
    before = spent.copy()
    spent.clock = spent.host_clock = 7.0
    spent.again(before, 10)
    assert spent.clock == 27.0 and spent.host_clock == 27.0
