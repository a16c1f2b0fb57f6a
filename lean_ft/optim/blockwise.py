"""What the AdamW rules share that keep both moments as codes with a scale a block."""

import torch
from torch import Tensor

from lean_ft.optim.adamw import AdamW
from lean_ft.optim.beside_adamw import BesideAdamW

MIN_CODED_ELEMENTS = (
    4096  # smaller tensors (norms, biases) keep whole moments: there is little to save, and much to lose
)


class BlockwiseAdamW(BesideAdamW):
    """AdamW over coded moments; tensors too small for that keep their moments in `plain_dtype` (None: their own)."""

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
        super().__init__(
            AdamW(
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                update_clipping=update_clipping,
                stochastic_rounding=stochastic_rounding,
                compile=False,
                state_dtype=plain_dtype,
            )
        )
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.update_clipping = update_clipping
        self._compile = compile

    def takes(self, param: Tensor) -> bool:
        return param.numel() >= MIN_CODED_ELEMENTS
