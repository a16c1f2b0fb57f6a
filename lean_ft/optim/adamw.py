"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) over moments in any storage format.

By default the moments have the weight's dtype, as in torch.optim.AdamW, and torch's fused kernel updates them: 4 bytes
per parameter for bfloat16 weights, 8 for float32. The kernel computes in float32. A bfloat16 second moment rounded to
nearest hardly decays (0.1% per step is less than half a unit in its last place), so a burst of large gradients slows
its weights for a long time. `stochastic_rounding` rounds the moments stochastically too, so they decay correctly.
Moments in 8 or 4 bits do not have this problem, because their scales are float32.

Features that the kernel lacks (quantized moments, update clipping, stochastic rounding) share one update that works
slice by slice: read each `Moment` as float32, compute, write it back.

`update_clipping` is StableAdamW's (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013): if a tensor's squared
gradients outgrow its second moment, RMS = sqrt(mean(g^2 / max(v_hat, eps^2))) > 1, its step uses lr / RMS. v_hat is
bias-corrected and includes this step's gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple, Required, TypedDict

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, store
from lean_ft.system.shards import whole_numel
from lean_ft.torch_private import fused_adamw_


class Moment:
    """Storage of one moment: here plain numbers in `dtype` (None: the weight's dtype).

    Quantized subclasses store codes with one float32 scale per `block` elements; `kept` then holds codes and scales.
    """

    block = 1

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        """The tensors of a zero moment, by their names in the optimizer state; the first is `name`."""
        return {name: torch.zeros_like(param, dtype=self.dtype, requires_grad=False)}

    def read(self, kept: list[Tensor], factor: float | Tensor) -> Tensor:
        """The moment times `factor` in float32, a new tensor: (N,), or (N / block, block)."""
        return kept[0].to(torch.float32, copy=True).mul_(factor)

    def write(self, kept: list[Tensor], moment: Tensor, noise: Tensor | None) -> None:
        """Store `moment`, which has the shape that `read` returns; `moment` itself is not changed."""
        store(kept[0], moment, noise)


class AdamWSettings(TypedDict, total=False):
    """Arguments of `AdamW` besides its moments."""

    betas: Required[tuple[float, float]]
    eps: Required[float]
    weight_decay: Required[float]
    stochastic_rounding: Required[bool]
    compile: Required[bool]
    update_clipping: bool


class Scalars(NamedTuple):
    """The numbers of an update: 0-d tensors where it is compiled. With update clipping, `lr` is always a tensor."""

    lr: float | Tensor
    eps: float | Tensor
    weight_decay: float | Tensor
    beta1: float | Tensor
    one_minus_beta1: float | Tensor
    correction1: float | Tensor  # of the first moment's bias
    beta2: float | Tensor
    one_minus_beta2: float | Tensor
    root_correction2: float | Tensor  # the square root of the second moment's


class AdamW(Rule):
    """weight -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * weight), with m and v stored as `moments`."""

    needs_whole_matrices = False

    def __init__(
        self,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        stochastic_rounding: bool,
        compile: bool,
        update_clipping: bool = False,
        moments: tuple[Moment, Moment] | None = None,
    ) -> None:
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.update_clipping = update_clipping
        self.draws_noise = stochastic_rounding
        self.is_fused = moments is None and not (update_clipping or stochastic_rounding)
        self.first, self.second = moments or (Moment(), Moment())
        self.block = self.first.block
        # Clipping averages over the whole parameter, and the noise of a parameter starts at its first element.
        self.updated_together = None if update_clipping or stochastic_rounding else self.first.block
        self._update_slices = Sliced(self._update_slice, compile=compile, block=self.first.block)
        self._add_ratios = Sliced(self._add_ratios_of_slice, compile=compile, block=self.first.block)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        return self.first.init_state("exp_avg", param) | self.second.init_state("exp_avg_sq", param)

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        if not self.is_fused:
            for state in states:
                self.update_in_slices(state, step)
            return
        # One call per group of parameters: on a GPU, a few kernel launches instead of one per parameter.
        groups: dict[tuple[torch.device, torch.dtype, float], list[ParameterState]] = {}
        for state in states:
            group = (state.param.device, state.param.dtype, decay_of(state, self.weight_decay))
            groups.setdefault(group, []).append(state)
        numbers = {device: torch.full((), float(step.number), device=device) for device, _, _ in groups}
        for (device, _, decay), members in groups.items():
            self._update_fused(members, step, decay, numbers[device])

    def _update_fused(self, members: list[ParameterState], step: StepInfo, decay: float, number: Tensor) -> None:
        fused_adamw_(
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

    def update_in_slices(self, state: ParameterState, step: StepInfo) -> None:
        tensors = [flat(tensor) for tensor in (state.param, state.grad, *state.tensors.values())]
        noise = RoundingNoise.for_update(state, step)
        self._update_slices(state.device_type, tensors, *self.scalars(state, step, tensors[1:]), noise=noise)

    def scalars(self, state: ParameterState, step: StepInfo, tensors: Sequence[Tensor]) -> Scalars:
        """The numbers of an update. tensors: the flat gradient and state."""
        correction2 = 1 - self.beta2**step.number
        lr: float | Tensor = step.lr
        if self.update_clipping:
            grad, *kept = tensors
            ratios = torch.zeros((), device=grad.device)
            second = kept[len(kept) // 2 :]
            self._add_ratios(
                state.device_type, [grad, *second], ratios, self.beta2, 1 - self.beta2, correction2, self.eps**2
            )
            lr = step.lr / (state.sum(ratios) / whole_numel(state.whole)).sqrt().clamp(min=1.0)
        return Scalars(
            lr=lr,
            eps=self.eps,
            weight_decay=decay_of(state, self.weight_decay),
            beta1=self.beta1,
            one_minus_beta1=1 - self.beta1,
            correction1=1 - self.beta1**step.number,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            root_correction2=correction2**0.5,
        )

    def _add_ratios_of_slice(
        self,
        tensors: list[Tensor],
        noise: None,
        ratios: Tensor,  # (), the running sum of g^2 / max(v_hat, eps^2)
        beta2: float | Tensor,
        one_minus_beta2: float | Tensor,
        correction2: float | Tensor,
        eps_squared: float | Tensor,
    ) -> None:
        grad, *second = tensors
        v = self.second.read(second, beta2)
        square = grad.view_as(v).float().square()
        v_hat = v.add_(square * one_minus_beta2).div_(correction2)
        # Sum each block first: for one sum over both dimensions, Inductor makes two kernels and a buffer.
        ratios.add_(square.div_(v_hat.clamp_(min=eps_squared)).sum(-1).sum())

    def _update_slice(self, tensors: list[Tensor], noise: Tensor | None, *scalars: float | Tensor) -> None:
        step = Scalars(*scalars)
        weight, grad, *kept = tensors
        first, second = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        # In place on intermediates, since eager calls are bound by memory traffic; in one shape, since Inductor makes a
        # loop per shape.
        m, v = self.first.read(first, step.beta1), self.second.read(second, step.beta2)
        weight, gradient = weight.view_as(m), grad.view_as(m).float()
        noise = None if noise is None else noise.view_as(m)
        m.add_(gradient * step.one_minus_beta1)
        v.add_(gradient.square().mul_(step.one_minus_beta2))
        # The same random bits round all three tensors: each is unbiased, at a third of the cost.
        self.first.write(first, m, noise)
        self.second.write(second, v, noise)
        direction = m.div_(step.correction1).div_(v.sqrt_().div_(step.root_correction2).add_(step.eps))
        value = weight.to(torch.float32, copy=True)
        direction.add_(value * step.weight_decay)
        store(weight, value.sub_(direction.mul_(step.lr)), noise)
