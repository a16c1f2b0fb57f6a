"""What the rules share that are for some parameters alone, and leave the rest to AdamW."""

from collections.abc import Sequence

from torch import Tensor

from lean_ft.optim.adamw import AdamW
from lean_ft.optim.rule import ParameterState, Rule, StepInfo


class BesideAdamW(Rule):
    """Subclasses give `takes`, `init_own` and `update_own`; what they do not take goes to `adamw`."""

    def __init__(self, adamw: AdamW) -> None:
        self._adamw = adamw
        self.weight_decay = adamw.weight_decay
        self.draws_noise = adamw.draws_noise

    def takes(self, param: Tensor) -> bool:
        """Whether `param` is this rule's own."""
        raise NotImplementedError

    def init_own(self, param: Tensor) -> dict[str, Tensor]:
        """As `init_state`, of a parameter that it takes."""
        raise NotImplementedError

    def update_own(self, state: ParameterState, step: StepInfo) -> None:
        """As `update`, of one parameter that it takes."""
        raise NotImplementedError

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return self.init_own(param) if self.takes(param) else self._adamw.init_state(param)

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        self._adamw.update([state for state in states if not self.takes(state.param)], step)
        for state in states:
            if self.takes(state.param):
                self.update_own(state, step)
