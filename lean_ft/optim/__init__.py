"""Optimizers that keep their state small and step inside backward, schedules, and loss scaling."""

from lean_ft.optim.build import build_optimizer
from lean_ft.optim.from_torch import FromTorch
from lean_ft.optim.loss_scaler import LossScaler
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import ParameterState, Rule, StepInfo
from lean_ft.optim.schedule import learning_rate, num_warmup_steps

__all__ = [
    "FromTorch",
    "LossScaler",
    "Optimizer",
    "ParameterState",
    "Rule",
    "StepInfo",
    "build_optimizer",
    "learning_rate",
    "num_warmup_steps",
]
