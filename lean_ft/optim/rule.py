"""What an update rule is: the state it keeps for one parameter, and how it moves parameters by their
gradients.

A rule never asks when it is called. `Optimizer` calls it once a step with every parameter, or from a
backward hook with one parameter at a time, and the weights come out bitwise the same: all that a rule may
depend on is in its arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lean_ft.system.shards import ALONE, Ranks, local


@dataclass(eq=False)
class ParameterState:
    """One parameter, the rule that moves it, and the tensors that the rule keeps for it."""

    name: str
    whole: torch.nn.Parameter  # as the model has it, also where it is cut over ranks
    index: int  # its place in the model
    rule: "Rule"
    lr_ratio: float = 1.0  # what the learning rate is multiplied by
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ranks: Ranks = ALONE

    @property
    def param(self) -> Tensor:
        """The rows of the parameter that are here: all of them, unless it is cut over ranks."""
        return local(self.whole)

    @property
    def grad(self) -> Tensor:
        """The gradient of these rows, contiguous as the parameter is."""
        assert self.whole.grad is not None, f"{self.name} has no gradient"
        return local(self.whole.grad).contiguous()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all rows of what `value` is for those that are here, in place."""
        return self.ranks.sum_shards(value)


@dataclass(frozen=True)
class StepInfo:
    """What is common to the parameters that are updated together; `number` counts optimizer steps from 1."""

    lr: float
    number: int
    # Stochastic rounding draws from it, so the order of updates does not matter; None: to nearest.
    noise_seed: int | None


class Rule:
    """Base of the update rules: subclasses give `init_state` and `update`."""

    draws_noise = False  # whether a step takes a seed from torch's generator
    block = 1  # neighbouring elements of a parameter that share something in its state
    needs_whole_matrices = False
    # How many neighbouring elements an update depends on together, so that rows of a parameter may be updated one after
    # the other; None: the whole parameter.
    updated_together: int | None = None

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """Zeroed state for one parameter: name -> tensor."""
        raise NotImplementedError

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        """Move every listed parameter by its gradient, in place, and its state with it."""
        raise NotImplementedError

    def load_state(self, state: ParameterState, tensors: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into the state in place, so memory after a resume is memory before it."""
        if tensors.keys() != state.tensors.keys():
            raise ValueError(
                f"The optimizer keeps {sorted(state.tensors)} for {state.name}, but the saved state has "
                f"{sorted(tensors)}. It was saved by another optimizer: set optimizer.name and its settings as in that "
                "run, or start without its optimizer state."
            )
        for key, own in state.tensors.items():
            saved = tensors[key]
            if saved.shape != own.shape or saved.dtype != own.dtype:
                raise ValueError(
                    f"Expected {own.dtype} of shape {tuple(own.shape)} for {state.name}.{key}, but the saved state has "
                    f"{saved.dtype} of shape {tuple(saved.shape)}. Resume with the model, dtype and optimizer settings "
                    "of the run that saved it."
                )
            own.copy_(saved)


def decay_of(state: ParameterState, weight_decay: float) -> float:
    """Weight decay for this parameter: matrices decay, vectors (norms, biases) never do, nor do stacks of biases."""
    return weight_decay if state.param.ndim >= 2 and not state.name.endswith("bias") else 0.0
