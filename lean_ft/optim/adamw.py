"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), whatever its moments are kept in.

Plainly they are kept in the weight's type, as torch.optim.AdamW does, and updated by torch's fused kernel: 4 bytes a
parameter for bfloat16 weights, 8 for float32. The arithmetic is float32 inside the kernel. In bfloat16 a second moment
rounded to nearest hardly decays (0.1 % a step is less than half a unit in its last place), so a burst of large gradients
slows its weights for long; with `stochastic_rounding` the moments are rounded stochastically too and decay as they
should, and codes of 8 or 4 bits have no such trouble, for their scales are float32.

What that kernel has not (coded moments, update clipping, stochastic rounding) goes slice by slice, in one update for
all: a `Moment` is read as float32, and written back.

`update_clipping` is StableAdamW's (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013): a tensor whose squared
gradients outgrow its second moment, RMS = sqrt(mean(g^2 / max(v_hat, eps^2))) > 1, takes the step with lr / RMS. The
moment is the bias-corrected one, after this step's gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.optim.rule import ParameterState, Rule, StepInfo, decay_of
from lean_ft.optim.slices import RoundingNoise, Sliced, flat, store
from lean_ft.system.shards import whole_numel
from lean_ft.torch_private import fused_adamw_


class Moment:
    """How one of the two moments is kept: here as numbers of `dtype`, or of the weight's where that is None.

    Others keep codes with a float32 scale a block: their `block` is the number of elements that share one, and `kept`
    has the codes of some blocks and their scales.
    """

    block = 1

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def init_state(self, name: str, param: Tensor) -> dict[str, Tensor]:
        """A moment of zero: its tensors by their names in the state, of which the first is `name`."""
        return {name: torch.zeros_like(param, dtype=self.dtype, requires_grad=False)}

    def read(self, kept: list[Tensor], factor: float | Tensor) -> Tensor:
        """The moment times the factor in float32, in memory of its own: (N,), or (N / block, block)."""
        return kept[0].to(torch.float32, copy=True).mul_(factor)

    def write(self, kept: list[Tensor], moment: Tensor, noise: Tensor | None) -> None:
        """Keep the moment, of the shape that `read` gives, and leave it as it is."""
        store(kept[0], moment, noise)


class AdamW(Rule):
    """weight -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * weight), m and v kept as `moments` say."""

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
        # Clipping weighs the whole parameter, and noise is drawn for it from its first element on.
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
        # One call for all the parameters of a kind: on a GPU that is a few launches rather than one a parameter.
        groups: dict[tuple, list[ParameterState]] = {}
        for state in states:
            kind = (state.param.device, state.param.dtype, decay_of(state, self.weight_decay))
            groups.setdefault(kind, []).append(state)
        for (device, _, decay), members in groups.items():
            self._update_fused(members, step, decay, torch.full((), float(step.number), device=device))

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
        weight, grad, *kept = (flat(tensor) for tensor in (state.param, state.grad, *state.tensors.values()))
        correction2 = 1 - self.beta2**step.number
        lr: float | Tensor = step.lr
        if self.update_clipping:
            ratios = torch.zeros((), device=grad.device)
            second = kept[len(kept) // 2 :]
            self._add_ratios([grad, *second], ratios, self.beta2, 1 - self.beta2, correction2, self.eps**2)
            lr = step.lr / (state.sum(ratios) / whole_numel(state.whole)).sqrt().clamp(min=1.0)
        scalars = (
            *(lr, self.eps, decay_of(state, self.weight_decay)),
            *(self.beta1, 1 - self.beta1, 1 - self.beta1**step.number),
            *(self.beta2, 1 - self.beta2, correction2**0.5),
        )
        noise = RoundingNoise.for_update(state, step)
        self._update_slices([weight, grad, *kept], *scalars, noise=noise)

    def _add_ratios_of_slice(
        self,
        tensors: list[Tensor],
        noise: None,
        ratios: Tensor,  # () what this slice's sum of g^2 / max(v_hat, eps^2) is added to
        beta2: float | Tensor,
        one_minus_beta2: float | Tensor,
        correction2: float | Tensor,
        eps_squared: float | Tensor,
    ) -> None:
        grad, *second = tensors
        v = self.second.read(second, beta2)
        square = grad.view_as(v).float().square()
        v_hat = v.add_(square * one_minus_beta2).div_(correction2)
        # By blocks first: of one sum over both dimensions inductor makes two kernels, and a buffer between them.
        ratios.add_(square.div_(v_hat.clamp_(min=eps_squared)).sum(-1).sum())

    def _update_slice(self, tensors: list[Tensor], noise: Tensor | None, *scalars: float | Tensor) -> None:
        lr, eps, decay, beta1, one_minus_beta1, correction1, beta2, one_minus_beta2, root_correction2 = scalars
        weight, grad, *kept = tensors
        first, second = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        # In place on intermediates: plain calls are bound by memory traffic. And all in one shape: of several, inductor
        # makes several loops.
        m, v = self.first.read(first, beta1), self.second.read(second, beta2)
        weight, gradient, noise = (
            weight.view_as(m),
            grad.view_as(m).float(),
            None if noise is None else noise.view_as(m),
        )
        m.add_(gradient * one_minus_beta1)
        v.add_(gradient.square().mul_(one_minus_beta2))
        # The same bits round all three: each is right in the mean, and one draw costs a third of three.
        self.first.write(first, m, noise)
        self.second.write(second, v, noise)
        direction = m.div_(correction1).div_(v.sqrt_().div_(root_correction2).add_(eps))
        value = weight.to(torch.float32, copy=True)
        direction.add_(value * decay)
        store(weight, value.sub_(direction.mul_(lr)), noise)
