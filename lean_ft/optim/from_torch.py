"""Any torch.optim optimizer as a rule, from Python.

    rule = FromTorch(torch.optim.RMSprop, alpha=0.9)
    optimizer = Optimizer(model.named_parameters(), rule, in_backward=True)

Each parameter gets an optimizer object of its own, so it can be stepped alone, in backward too. Its state
is made by its first step, so `state_bytes` is 0 before that.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of


class FromTorch(Rule):
    """`optimizer_class([param], lr=..., **settings)` for each parameter; vectors get weight_decay 0."""

    def __init__(self, optimizer_class: Callable[..., torch.optim.Optimizer], **settings) -> None:
        self._class = optimizer_class
        self._settings = settings
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        for state in states:
            optimizer = self._optimizer_of(state)
            optimizer.param_groups[0]["lr"] = step.lr
            optimizer.step()
            self._take_tensors(state)

    def load_state(self, state: ParameterState, tensors: Mapping[str, Tensor]) -> None:
        self._optimizer_of(state).state[state.param] = {key: tensor.clone() for key, tensor in tensors.items()}
        self._take_tensors(state)

    def _optimizer_of(self, state: ParameterState) -> torch.optim.Optimizer:
        if state.name not in self._optimizers:
            settings = dict(self._settings)
            if "weight_decay" in settings:
                settings["weight_decay"] = decay_of(state, settings["weight_decay"])
            self._optimizers[state.name] = self._class([state.param], lr=0.0, **settings)
        return self._optimizers[state.name]

    def _take_tensors(self, state: ParameterState) -> None:
        kept = self._optimizers[state.name].state[state.param]
        others = [key for key, value in kept.items() if value is not None and not isinstance(value, Tensor)]
        if others:
            raise ValueError(
                f"{self._class.__name__} keeps {others[0]} as {type(kept[others[0]]).__name__}, but only tensors can be "
                "saved. Choose settings under which it keeps tensors, or write a Rule of your own."
            )
        state.tensors.update((key, value) for key, value in kept.items() if value is not None)
