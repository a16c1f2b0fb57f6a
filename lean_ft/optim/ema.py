"""The exponential moving average of the trained weights (Polyak & Juditsky 1992, doi:10.1137/0330046).

After each step, `average = decay * average + (1 - decay) * weight`, in float32, from the weights at the start. It is
one more tensor of each parameter's state: so it is updated in backward, cut into shards, streamed, planned, saved and
resumed like the others. It takes 4 bytes per trained parameter.

`averaged_weights` computes with the averages. It exchanges weights and averages in place, because a second model would
take as much memory again: float32 values change places, and a bfloat16 weight changes places with the upper half of its
average, whose lower half stays where it is.

Left out: a decay that grows during the first steps (timm, diffusers), because fine-tuning starts at good weights.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lean_ft.optim.optimizer import Optimizer
from lean_ft.optim.rule import ParameterState, Rule, StepInfo
from lean_ft.optim.slices import Sliced, flat
from lean_ft.torch_private import foreach_lerp_

NAME = "ema"  # of the average in the optimizer's state


class Averaged(Rule):
    """Another rule, followed by a step of the averages."""

    def __init__(self, rule: Rule, decay: float, *, compile: bool) -> None:
        self.rule, self.decay = rule, decay
        self.draws_noise, self.block = rule.draws_noise, rule.block
        self.needs_whole_matrices, self.updated_together = rule.needs_whole_matrices, rule.updated_together
        self._follow_slices = Sliced(_follow, compile=compile)

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """The rule's state, and the average: a float32 copy of the weights. Raises ValueError if the rule has a tensor
        of this name."""
        tensors = self.rule.init_state(param)
        if NAME in tensors:
            raise ValueError(
                f"{type(self.rule).__name__} names a tensor of its state {NAME}, which is the name of the average of "
                "the weights (optimizer.ema). Rename it."
            )
        return {**tensors, NAME: param.detach().to(torch.float32, copy=True)}

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        self.rule.update([self._of_rule(state) for state in states], step)
        self.left_out(states)

    def left_out(self, states: Sequence[ParameterState]) -> None:
        """Move the averages towards the weights as they are."""
        together: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}  # a few launches for an adapter
        for state in states:
            average, param = state.tensors[NAME], state.param.detach()
            if param.dtype == torch.float32 and param.device == average.device:
                averages, params = together.setdefault(param.device, ([], []))
                averages.append(average)
                params.append(param)
            else:
                self._follow_slices(state.device_type, [flat(average), flat(param)], 1 - self.decay)
        for averages, params in together.values():
            foreach_lerp_(averages, params, 1 - self.decay)

    def instructions(self, state: ParameterState) -> int:
        return self.rule.instructions(self._of_rule(state))

    def joint_groups(self, states: Sequence[ParameterState]) -> list[list[ParameterState]]:
        whole = {state.index: state for state in states}
        groups = self.rule.joint_groups([self._of_rule(state) for state in states])
        return [[whole[state.index] for state in group] for group in groups]

    def _of_rule(self, state: ParameterState) -> ParameterState:
        """The parameter as the averaged rule sees it."""
        return ParameterState(
            *(state.name, state.whole, state.index, self.rule, state.lr_ratio),
            tensors=_OfRule(state.tensors),  # pyright: ignore[reportArgumentType]
            ranks=state.ranks,
            device_type=state.device_type,
        )


class _OfRule(MutableMapping[str, Tensor]):
    """A view of a parameter's state without its average."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        if name == NAME:
            raise KeyError(name)
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name != NAME)

    def __len__(self) -> int:
        return len(self._tensors) - 1


def averaged(
    rule: Rule | Callable[[nn.Parameter], Rule], decay: float, *, compile: bool
) -> Rule | Callable[[nn.Parameter], Rule]:
    """The rule, or the function from a parameter to its rule, with averages."""
    if isinstance(rule, Rule):
        return Averaged(rule, decay, compile=compile)
    made: dict[Rule, Averaged] = {}  # parameters of one rule are updated together

    def of_parameter(param: nn.Parameter) -> Rule:
        own = rule(param)
        return made.setdefault(own, Averaged(own, decay, compile=compile))

    return of_parameter


def has_averages(optimizer: Optimizer) -> bool:
    """Whether the optimizer averages the weights (`optimizer.ema`)."""
    return any(isinstance(rule, Averaged) for rule in optimizer.rules)


@contextmanager
def averaged_weights(optimizer: Optimizer, model: nn.Module) -> Iterator[None]:
    """Context manager in which the trained parameters have their averages, rounded to their dtype.

    Afterwards, weights and averages are bit for bit as before. It takes no memory but that of a slice. Use it between
    steps, or before the forward pass of a micro-batch. All ranks call it, and free the weights that they gathered.
    Autograd does not notice the exchange: no backward pass of the model may run inside.
    """
    _exchange_all(optimizer, model, there=True)
    try:
        yield
    finally:
        _exchange_all(optimizer, model, there=False)


@torch.no_grad()
def _exchange_all(optimizer: Optimizer, model: nn.Module, *, there: bool) -> None:
    optimizer.ranks.gather_no_more(model)
    if optimizer.streamed is not None:
        optimizer.streamed.forget()
    for state in optimizer.states:
        _EXCHANGE[there](state.device_type, [state.param.data.view(-1), state.tensors[NAME].view(-1)])


def _follow(tensors: list[Tensor], noise: None, weight: float | Tensor) -> None:
    average, param = tensors
    average.lerp_(param.to(average.device, torch.float32), weight)  # a streamed average may be on the host


def _bring(tensors: list[Tensor], noise: None) -> None:
    """Put the averages in the place of the weights, and the weights where `_return` finds them."""
    param, kept = tensors
    average = kept.to(param.device, copy=True)  # a streamed average is on the host
    if param.dtype == torch.float32:
        kept.copy_(param)
        param.copy_(average)
        return
    bits = average.view(torch.int32)
    upper = (bits + 0x8000) >> 16  # nearest, and half away from zero, so that the rest fits into 16 bits
    kept.view(torch.int32).copy_((param.view(torch.int16).int() << 16) | ((bits - (upper << 16)) & 0xFFFF))
    param.view(torch.int16).copy_(upper)


def _return(tensors: list[Tensor], noise: None) -> None:
    """Undo `_bring`."""
    param, kept = tensors
    away = kept.to(param.device, copy=True)
    if param.dtype == torch.float32:
        kept.copy_(param)
        param.copy_(away)
        return
    bits, upper = away.view(torch.int32), param.view(torch.int16).int()
    lower = (bits << 16) >> 16  # with its sign
    kept.view(torch.int32).copy_((upper << 16) + lower)
    param.view(torch.int16).copy_(bits >> 16)


_EXCHANGE = {True: Sliced(_bring, compile=False), False: Sliced(_return, compile=False)}
