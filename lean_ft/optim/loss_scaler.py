"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).

float16 gradients below 6e-8 vanish, so the loss is multiplied before backward and the gradients are divided after it. A
step whose gradients overflow is skipped and halves the scale; 2000 good steps in a row double it. The constants are
those of torch.amp.GradScaler, which works only with a torch.optim.Optimizer.
"""

import math

from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow


class LossScaler:
    """Scales the loss if `enabled`; otherwise a no-op."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = INITIAL_SCALE if enabled else 1.0
        self._good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.enabled else loss

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step; `Optimizer.finish_gradients` calls it."""
        if not self.enabled:
            return
        if overflowed:
            self.value /= 2
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == GROWTH_INTERVAL:
                self.value *= 2
                self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for JSON."""
        return {"scale": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in state.values()):
            raise ValueError(f"cannot resume: the loss scale is damaged ({state}).")
        self.value = float(state["scale"])
        self._good_steps = int(state["good_steps"])
