"""The learning rate equals transformers' schedule of the same name at every step."""

from pathlib import Path
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


@pytest.mark.parametrize("shape", ["1-sqrt", "linear", "cosine"])
@pytest.mark.parametrize(
    ("length", "decay"),
    [({"decay": 15}, 15), ({}, 5), ({"decay": 0.25}, 13), ({"decay": 0}, 0), ({"decay": 90}, 43)],
)
def test_wsd_equals_transformers(shape: str, length: dict[str, Any], decay: int) -> None:
    """A decay that is longer than the run begins after the warm-up. transformers returns the minimum after the last
    step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = transformers.get_wsd_schedule(
        optimizer, 7, decay, num_training_steps=TOTAL, decay_type=shape, min_lr_ratio=0.1
    )
    # transformers' warm-up starts from the minimum; ours starts from 0, as with the other schedules.
    expected = [PEAK * schedule.lr_lambdas[0](step) for step in range(7, TOTAL)]
    cfg = config(PEAK, name="wsd", warmup_steps=7, min_lr_ratio=0.1, decay_shape=shape, **length)
    assert [learning_rate(cfg, step, TOTAL) for step in range(7, TOTAL)] == pytest.approx(expected, rel=1e-12)
    assert [learning_rate(cfg, step, TOTAL) for step in range(7)] == [PEAK * step / 7 for step in range(7)]


def test_the_steps_before_the_decay_do_not_depend_on_the_total() -> None:
    cfg = config(PEAK, name="wsd", warmup_steps=3, decay=10)
    short, long = ([learning_rate(cfg, step, total) for step in range(50)] for total in (50, 80))
    assert short[:41] == long[:41]
    assert short[41] < long[41]


OWN = """
import math
def up_and_down(step, total_steps):
    return 1 - abs(2 * step / total_steps - 1)
def nan(step, total_steps):
    return math.nan if step == 3 else 1.0
def negative(step, total_steps):
    return -0.5
def text(step, total_steps):
    return "0.5"
def fails(step, total_steps):
    return 1 / (2 - step)
"""


def test_a_function_of_the_user_is_the_whole_schedule(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    cfg = config(PEAK, name=f"{file}:up_and_down")
    before = learning_rate(cfg, 5, 40)
    assert before == PEAK * 0.25
    file.write_text(OWN.replace("1 - abs", "2 - abs"))  # an edit during the run does not change it
    assert [learning_rate(cfg, step, 40) for step in (5, 20)] == [before, PEAK]
    for function, message in {
        "nan": r"mine.py:nan returned nan at step 3 of 9. Return a finite number >= 0",
        "negative": r"returned -0.5 at step 0 of 9",
        "text": r"returned '0.5' at step 0 of 9",
    }.items():
        cfg = config(PEAK, name=f"{file}:{function}")
        with pytest.raises(ValueError, match=message):
            _ = [learning_rate(cfg, step, 9) for step in range(9)]
    with pytest.raises(ZeroDivisionError) as failed:
        _ = [learning_rate(config(PEAK, name=f"{file}:fails"), step, 9) for step in range(9)]
    assert "mine.py:fails failed at step 2 of 9" in failed.value.__notes__[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cosine", "decay": 5}, "decay=5 has no effect with schedule.name=cosine. Remove decay."),
        ({"name": "OWN", "warmup_steps": 5}, "warmup_steps=5 has no effect with schedule.name=.*mine.py:up_and_down"),
        ({"name": "OWN", "decay_shape": "linear"}, "decay_shape=linear has no effect"),
        ({"name": "none.py:fn"}, "no such file: none.py"),
    ],
)
def test_a_setting_without_an_effect_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    own = f"{tmp_path / 'mine.py'}:up_and_down"
    with pytest.raises(ValueError, match=message):
        config(PEAK, **{**settings, "name": settings["name"].replace("OWN", own)})


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
