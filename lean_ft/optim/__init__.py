"""Optimizers with small state that can step inside backward, learning rate schedules, and loss scaling."""

import math

from lean_ft.optim.build import build_optimizer
from lean_ft.optim.loss_scaler import LossScaler
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import Rule, StepInfo
from lean_ft.settings import ScheduleConfig, TrainingConfig

__all__ = ["LossScaler", "Optimizer", "Rule", "StepInfo", "build_optimizer", "learning_rate", "num_warmup_steps"]


def learning_rate(cfg: TrainingConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `total_steps`.

    `peak` is optimizer.lr. During w warm-up steps the rate is `peak * step / w`. After that it is
    `peak * (r + (1 - r) * shape(t))`, where r is min_lr_ratio, t rises from 0 at the end of the warm-up to 1 at
    `total_steps`, and shape is 1 (constant), `1 - t` (linear) or `(1 + cos(pi * t)) / 2` (cosine), as in transformers.
    """
    peak, schedule = cfg.optimizer.lr, cfg.schedule
    warmup_steps = num_warmup_steps(schedule, total_steps)
    if step < warmup_steps:
        return peak * step / warmup_steps
    t = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = {"constant": 1.0, "linear": 1.0 - t, "cosine": (1.0 + math.cos(math.pi * t)) / 2}[schedule.name]
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * shape)


def num_warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Number of warm-up steps; `warmup_ratio` is rounded up, as in transformers."""
    return schedule.warmup_steps or math.ceil(schedule.warmup_ratio * total_steps)
