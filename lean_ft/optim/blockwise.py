"""What the AdamW rules share that keep both moments as codes with a scale a block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW
from lean_ft.optim.rule import ParameterState, Rule, StepInfo

MIN_CODED_ELEMENTS = (
    4096  # smaller tensors (norms, biases) keep whole moments: there is little to save, and much to lose
)


class BlockwiseAdamW(Rule):
    """AdamW over coded moments; tensors too small for that take `AdamW`, their moments in `plain_dtype` (None: theirs).

    Subclasses give `init_codes` and `update_codes`.
    """

    def __init__(
        self,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        update_clipping: bool = False,
        stochastic_rounding: bool,
        compile: bool,
        plain_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.update_clipping = update_clipping
        self.draws_noise = stochastic_rounding
        self._compile = compile
        self._plain = AdamW(
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            update_clipping=update_clipping,
            stochastic_rounding=stochastic_rounding,
            compile=False,
            state_dtype=plain_dtype,
        )

    def is_coded(self, param: Tensor) -> bool:
        """Whether the moments of `param` are kept as codes."""
        return param.numel() >= MIN_CODED_ELEMENTS

    def init_codes(self, param: Tensor) -> dict[str, Tensor]:
        """Codes and scales of moments that are zero."""
        raise NotImplementedError

    def update_codes(self, state: ParameterState, step: StepInfo) -> None:
        """Move one parameter with coded moments."""
        raise NotImplementedError

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return self.init_codes(param) if self.is_coded(param) else self._plain.init_state(param)

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        self._plain.update([state for state in states if not self.is_coded(state.param)], step)
        for state in states:
            if self.is_coded(state.param):
                self.update_codes(state, step)
