"""Optimizers with small state that can step inside backward, learning rate schedules, and loss scaling."""

import math
from numbers import Real

from lean_ft.optim.adamw_8bit import Moment8bit
from lean_ft.optim.build import build_optimizer
from lean_ft.optim.dynamic_code import DynamicCode
from lean_ft.optim.ema import averaged_weights, has_averages
from lean_ft.optim.loss_scaler import LossScaler
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, store
from lean_ft.settings import ScheduleConfig, TrainingConfig
from lean_ft.system.user_functions import is_function_path

__all__ = ["LossScaler", "Optimizer", "build_optimizer", "learning_rate", "num_warmup_steps"]
__all__ += ["averaged_weights", "has_averages"]
# For rules of users.
__all__ += ["DynamicCode", "Moment8bit", "ParameterState", "RoundingNoise", "Rule", "Sliced", "StepInfo", "decay_of"]
__all__ += ["flat", "store"]


def learning_rate(cfg: TrainingConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `total_steps`.

    `peak` is optimizer.lr. During w warm-up steps the rate is `peak * step / w`. After that it is
    `peak * (r + (1 - r) * shape(t))`, where r is min_lr_ratio, t rises from 0 at the end of the warm-up to 1 at
    `total_steps`, and shape is 1 (constant), `1 - t` (linear) or `(1 + cos(pi * t)) / 2` (cosine), as in transformers.

    With wsd (Hu et al. 2024, MiniCPM, arXiv:2404.06395; transformers calls it warmup_stable_decay), t stays 0 until the
    last `decay` steps. The shape `1 - sqrt(t)` is from Hagele et al. 2024, arXiv:2405.18392.

    A user's function multiplies `peak`. Raises ValueError if it does not return a finite number >= 0.
    """
    return scheduled(cfg.schedule, step, total_steps, cfg.optimizer.peak_lr)


def scheduled(schedule: ScheduleConfig, step: int, total_steps: int, peak: float = 1.0) -> float:
    """`learning_rate` for a schedule and its highest rate."""
    if is_function_path(schedule.name):
        return peak * _own_factor(schedule, step, total_steps)
    begin, shape = num_warmup_steps(schedule, total_steps), schedule.name
    if step < begin:
        return peak * step / begin
    if shape == "wsd":
        begin, shape = first_decay_step(schedule, total_steps), schedule.decay_shape
    t = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    cosine = (1.0 + math.cos(math.pi * t)) / 2
    falls = {"constant": 1.0, "linear": 1.0 - t, "cosine": cosine, "1-sqrt": 1.0 - math.sqrt(t)}[shape]
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * falls)


def _own_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    try:
        factor = schedule.function(step, total_steps)
    except Exception as error:
        error.add_note(f"schedule.name={schedule.name} failed at step {step} of {total_steps}.")
        raise
    if not (isinstance(factor, Real) and 0 <= float(factor) < math.inf):
        raise ValueError(
            f"schedule.name={schedule.name} returned {factor!r} at step {step} of {total_steps}. Return a finite "
            "number >= 0, which multiplies optimizer.lr."
        )
    return float(factor)


def num_warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Number of warm-up steps; `warmup_ratio` is rounded up, as in transformers."""
    return schedule.warmup_steps or math.ceil(schedule.warmup_ratio * total_steps)


def first_decay_step(schedule: ScheduleConfig, total_steps: int) -> int:
    """The step, from 0, after which wsd decays; a fraction is rounded up to a number of decaying steps."""
    length = schedule.decay if isinstance(schedule.decay, int) else math.ceil(schedule.decay * total_steps)
    return max(num_warmup_steps(schedule, total_steps), total_steps - length)
