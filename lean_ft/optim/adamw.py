"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) over torch's fused kernel.

State: both moments in the weight's type, as torch.optim.AdamW keeps them: 4 bytes a parameter for bfloat16
weights, 8 for float32. The arithmetic is float32 inside the kernel. In bfloat16 a second moment rounded to
nearest hardly decays (0.1 % a step is less than half a unit in its last place), so a burst of large
gradients slows its weights for long; with `stochastic_rounding` the moments are rounded stochastically too
and decay as they should, and the 8-bit rule has no such trouble, for its scales are float32.

`update_clipping` is StableAdamW's (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013): a tensor whose
squared gradients outgrow its second moment, RMS = sqrt(mean(g^2 / max(v_hat, eps^2))) > 1, takes the step
with lr / RMS. The moment is the bias-corrected one, after this step's gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, store


class AdamW(Rule):
    """weight -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * weight)."""

    def __init__(
        self,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        update_clipping: bool,
        stochastic_rounding: bool,
        compile: bool,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.update_clipping = update_clipping
        self.draws_noise = stochastic_rounding
        self.state_dtype = state_dtype
        self._update = Sliced(_update, compile=compile)
        self._sum_of_ratios = Sliced(_sum_of_ratios, compile=compile)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        def zeros() -> Tensor:
            return torch.zeros_like(param, dtype=self.state_dtype, requires_grad=False)

        return {"exp_avg": zeros(), "exp_avg_sq": zeros()}

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        # One call for all the parameters of a kind: on a GPU that is a few launches rather than one a
        # parameter.
        groups: dict[tuple, list[ParameterState]] = {}
        for state in states:
            if self.update_clipping or self.draws_noise or self.state_dtype is not None:
                self._update_sliced(state, step)
            else:
                kind = (state.param.device, state.param.dtype, decay_of(state, self.weight_decay))
                groups.setdefault(kind, []).append(state)
        for (device, _, decay), members in groups.items():
            self._update_fused(members, step, decay, torch.full((), float(step.number), device=device))

    def _update_fused(self, members: list[ParameterState], step: StepInfo, decay: float, number: Tensor) -> None:
        torch.ops.aten._fused_adamw_(
            [state.param.detach() for state in members],
            [state.grad for state in members],
            [state.tensors["exp_avg"] for state in members],
            [state.tensors["exp_avg_sq"] for state in members],
            [],
            [number] * len(members),
            lr=step.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def _update_sliced(self, state: ParameterState, step: StepInfo) -> None:
        weight, grad = flat(state.param), flat(state.grad)
        exp_avg, exp_avg_sq = flat(state.tensors["exp_avg"]), flat(state.tensors["exp_avg_sq"])
        correction2 = 1 - self.beta2**step.number
        lr: float | Tensor = step.lr
        if self.update_clipping:
            ratios = self._sum_of_ratios([grad, exp_avg_sq], self.beta2, 1 - self.beta2, correction2, self.eps**2)
            lr = clipped_lr(step.lr, ratios, weight.numel())
        self._update(
            [weight, grad, exp_avg, exp_avg_sq],
            lr,
            self.beta1,
            1 - self.beta1,
            1 - self.beta1**step.number,
            self.beta2,
            1 - self.beta2,
            correction2**0.5,
            self.eps,
            decay_of(state, self.weight_decay),
            noise=RoundingNoise.for_update(state, step) if self.draws_noise else None,
        )


def clipped_lr(lr: float, sum_of_ratios: Tensor, num_elements: int) -> Tensor:
    """lr / max(1, RMS) on the tensor's device, from the sum of g^2 / max(v_hat, eps^2) over its elements."""
    rms = (sum_of_ratios / num_elements).sqrt()
    return lr / rms.clamp(min=1.0)


def _sum_of_ratios(
    grad: Tensor,
    exp_avg_sq: Tensor,
    noise: None,
    beta2: float | Tensor,
    one_minus_beta2: float | Tensor,
    correction2: float | Tensor,
    eps_squared: float | Tensor,
) -> Tensor:
    square = grad.float().square()
    v_hat = exp_avg_sq.to(torch.float32, copy=True).mul_(beta2).add_(square * one_minus_beta2).div_(correction2)
    return square.div_(v_hat.clamp_(min=eps_squared)).sum()


def _update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    noise: Tensor | None,
    lr: float | Tensor,
    beta1: float | Tensor,
    one_minus_beta1: float | Tensor,
    correction1: float | Tensor,
    beta2: float | Tensor,
    one_minus_beta2: float | Tensor,
    root_correction2: float | Tensor,
    eps: float | Tensor,
    weight_decay: float | Tensor,
) -> None:
    # In place on intermediates: plain calls are bound by memory traffic.
    gradient, value = grad.float(), weight.to(torch.float32, copy=True)
    m = exp_avg.to(torch.float32, copy=True).mul_(beta1).add_(gradient * one_minus_beta1)
    v = exp_avg_sq.to(torch.float32, copy=True).mul_(beta2).add_(gradient.square().mul_(one_minus_beta2))
    # The same bits round all three: each is right in the mean, and one draw costs a third of three.
    store(exp_avg, m, noise)
    store(exp_avg_sq, v, noise)
    direction = m.div_(correction1).div_(v.sqrt_().div_(root_correction2).add_(eps))
    direction.add_(value * weight_decay)
    store(weight, value.sub_(direction.mul_(lr)), noise)
