"""The learning rate over a run."""

import math

from lean_ft.settings import ScheduleConfig, TrainingConfig


def learning_rate(cfg: TrainingConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `total_steps`.

    `peak` is optimizer.lr. During a warm-up of w steps it is `peak * step / w`. After that, with `t` going from 0 at the
    end of the warm-up to 1 at `total_steps`, it is `peak * (r + (1 - r) * shape(t))` where `r` is
    min_lr_ratio and shape is 1 (constant), `1 - t` (linear) or `(1 + cos(pi * t)) / 2` (cosine). The
    formulas are those of transformers' schedules of these names.
    """
    peak, schedule = cfg.optimizer.lr, cfg.schedule
    warmup_steps = num_warmup_steps(schedule, total_steps)
    if step < warmup_steps:
        return peak * step / warmup_steps
    t = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = {"constant": 1.0, "linear": 1.0 - t, "cosine": (1.0 + math.cos(math.pi * t)) / 2}[schedule.name]
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * shape)


def num_warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Steps of warm-up; those of `warmup_ratio` are rounded up, as transformers does."""
    return schedule.warmup_steps or math.ceil(schedule.warmup_ratio * total_steps)
