"""The learning rate equals transformers' schedule of the same name at every step."""

from typing import Any

import pytest
import torch

from lean_ft.optim import learning_rate
from lean_ft.settings import OptimizerConfig, ScheduleConfig
from tests.optim.tiny_training import Config

transformers = pytest.importorskip("transformers")

PEAK, TOTAL = 3e-4, 50


def config(peak: float, **schedule: Any) -> Config:
    return Config(optimizer=OptimizerConfig(lr=peak), schedule=ScheduleConfig.model_validate(schedule))


def reference(name: str, warmup: int, ratio: float) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    kwargs: dict[str, Any] = {"num_warmup_steps": warmup}
    if name == "constant":
        make = transformers.get_constant_schedule_with_warmup
    elif name == "linear":
        make, kwargs = transformers.get_linear_schedule_with_warmup, {**kwargs, "num_training_steps": TOTAL}
    else:
        from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup as make

        kwargs |= {"num_training_steps": TOTAL, "min_lr_rate": ratio}
    schedule = make(optimizer, **kwargs)
    rates = []
    for _ in range(TOTAL):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "ratio"), [("constant", 0.0), ("linear", 0.0), ("cosine", 0.0), ("cosine", 0.1)])
def test_equals_transformers(name: str, ratio: float, warmup: int) -> None:
    cfg = config(PEAK, name=name, warmup_steps=warmup, min_lr_ratio=ratio)
    ours = [learning_rate(cfg, step, TOTAL) for step in range(TOTAL)]
    assert ours == pytest.approx(reference(name, warmup, ratio), rel=1e-12, abs=0.0)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_ends_at_the_minimum_and_stays_there(name: str) -> None:
    cfg = config(PEAK, name=name, warmup_steps=5, min_lr_ratio=0.2)
    assert learning_rate(cfg, 5, TOTAL) == PEAK
    assert [learning_rate(cfg, step, TOTAL) for step in (TOTAL, 2 * TOTAL)] == pytest.approx([0.2 * PEAK] * 2)


@pytest.mark.parametrize(("ratio", "steps"), [(0.1, 5), (0.11, 6), (0.001, 1)])
def test_a_share_of_the_run_is_warm_up(ratio: float, steps: int) -> None:
    """Rounded up, as transformers does with `warmup_steps` below 1."""
    assert transformers.TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(TOTAL) == steps
    cfg = config(PEAK, name="linear", warmup_ratio=ratio)
    ours = [learning_rate(cfg, step, TOTAL) for step in range(TOTAL)]
    assert ours == pytest.approx(reference("linear", steps, 0.0), rel=1e-12, abs=0.0)
    with pytest.raises(ValueError, match="both set the length of the warm-up"):
        config(PEAK, warmup_ratio=ratio, warmup_steps=steps)


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    cfg = config(1.0, warmup_steps=10)
    rates = [learning_rate(cfg, step, 4) for step in range(4)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
