"""Base of the rules that are for the matrices inside a model's layers, and leave the rest to AdamW.

The rest is what no matrix product multiplies by: vectors, and the embedding and the output layer, whose rows are tokens
and get gradients of very different sizes.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW
from lean_ft.optim.beside_adamw import BesideAdamW


class MatrixRule(BesideAdamW):
    """Subclasses give `init_own` and `update_own`, of matrices; dimensions before the last two number separate matrices."""

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
        super().__init__(
            AdamW(
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                update_clipping=False,
                stochastic_rounding=stochastic_rounding,
                compile=compile,
            )
        )
        self._not_matrices = {id(param) for param in not_matrices}

    def takes(self, param: Tensor) -> bool:
        return param.ndim >= 2 and id(param) not in self._not_matrices
