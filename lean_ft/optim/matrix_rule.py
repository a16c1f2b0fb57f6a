"""Base of the rules that are for the matrices inside a model's layers, and leave the rest to AdamW.

The rest is what no matrix product multiplies by: vectors, and the embedding and the output layer, whose rows are tokens
and get gradients of very different sizes.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW
from lean_ft.optim.rule import ParameterState, Rule, StepInfo


class MatrixRule(Rule):
    """Subclasses give `init_matrix` and `update_matrix`; dimensions before the last two number separate matrices."""

    def __init__(
        self,
        *,
        not_matrices: Collection[torch.nn.Parameter],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        stochastic_rounding: bool,
        compile: bool,
    ) -> None:
        self._not_matrices = {id(param) for param in not_matrices}
        self.weight_decay = weight_decay
        self.draws_noise = stochastic_rounding
        self._adamw = AdamW(
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            update_clipping=False,
            stochastic_rounding=stochastic_rounding,
            compile=compile,
        )

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return self.init_matrix(param) if self._is_matrix(param) else self._adamw.init_state(param)

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        self._adamw.update([state for state in states if not self._is_matrix(state.param)], step)
        for state in states:
            if self._is_matrix(state.param):
                self.update_matrix(state, step)

    def init_matrix(self, param: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def update_matrix(self, state: ParameterState, step: StepInfo) -> None:
        raise NotImplementedError

    def _is_matrix(self, param: Tensor) -> bool:
        return param.ndim >= 2 and id(param) not in self._not_matrices
