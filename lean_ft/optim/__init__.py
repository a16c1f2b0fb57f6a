"""Optimizers with small state that can step inside backward, learning rate schedules, and loss scaling."""

from lean_ft.optim.build import build_optimizer
from lean_ft.optim.loss_scaler import LossScaler
from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import Rule, StepInfo
from lean_ft.optim.schedule import learning_rate, num_warmup_steps

__all__ = ["LossScaler", "Optimizer", "Rule", "StepInfo", "build_optimizer", "learning_rate", "num_warmup_steps"]
