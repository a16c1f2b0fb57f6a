"""The interface of an update rule: its state per parameter, and the update.

`Optimizer` calls a rule once per step with all parameters, or from a backward hook with one parameter at a time. A rule
depends on nothing but its arguments, so both give bitwise the same weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lean_ft.system.shards import ALONE, Ranks, local

# Endings of names of parameters that have the shape of a matrix and are vectors: stacks of biases, and norms of heads.
VECTORS = ("bias", "norm.weight")


@dataclass(eq=False)
class ParameterState:
    """One parameter, its rule, and the rule's tensors for it."""

    name: str
    whole: torch.nn.Parameter  # the model's parameter, sharded or not
    index: int  # its position in the model
    rule: "Rule"
    lr_ratio: float = 1.0  # multiplies the learning rate
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ranks: Ranks = ALONE
    device_type: str = ""  # in a plan, of the planned device; empty: of the parameter

    def __post_init__(self) -> None:
        self.device_type = self.device_type or self.whole.device.type

    @property
    def param(self) -> Tensor:
        """This rank's rows of the parameter."""
        return local(self.whole)

    @property
    def grad(self) -> Tensor:
        """The gradient of this rank's rows, contiguous."""
        assert self.whole.grad is not None, f"{self.name} has no gradient"
        return local(self.whole.grad).contiguous()

    def sum(self, value: Tensor) -> Tensor:
        """Sum `value`, computed from this rank's rows, over all shards, in place."""
        return self.ranks.sum_shards(value)


@dataclass(frozen=True)
class StepInfo:
    """Values shared by all parameters of an update; `number` counts optimizer steps from 1."""

    lr: float
    number: int
    noise_seed: int | None  # of stochastic rounding, whatever the order of updates; None: round to nearest


class Rule:
    """Base class of update rules; subclasses define `init_state` and `update`."""

    draws_noise = False  # whether a step draws a seed from torch's generator
    block = 1  # neighboring elements that share an entry of the state, such as a scale
    # Whether a rank needs all rows of a matrix. If not, each rank updates its rows, and `ParameterState.sum` sums over
    # all of them.
    needs_whole_matrices = True
    # Number of neighboring elements that must be updated together; None: the whole parameter.
    updated_together: int | None = None

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """Zero state for one parameter: name -> tensor."""
        raise NotImplementedError

    def update(self, states: Sequence[ParameterState], step: StepInfo) -> None:
        """Update the parameters and their states in place."""
        raise NotImplementedError

    def left_out(self, states: Sequence[ParameterState]) -> None:
        """Called at the end of a step with the parameters that it left without a gradient."""

    def instructions(self, state: ParameterState) -> int:
        """Machine instructions per element of a parameter's update on a GPU; 0 if its memory traffic takes longer."""
        return 0

    def joint_groups(self, states: Sequence[ParameterState]) -> list[list[ParameterState]]:
        """The parameters that `update` updates in the same launches; by default, each alone."""
        return [[state] for state in states]

    def load_state(self, state: ParameterState, tensors: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into the state in place, so that resuming takes no additional memory."""
        if tensors.keys() != state.tensors.keys():
            raise ValueError(
                f"The optimizer keeps {sorted(state.tensors)} for {state.name}, but the saved state has "
                f"{sorted(tensors)}: it was saved by another optimizer. Set optimizer.name and its settings as in that "
                "run."
            )
        for key, kept in state.tensors.items():
            saved = tensors[key]
            if saved.shape != kept.shape or saved.dtype != kept.dtype:
                raise ValueError(
                    f"Expected {kept.dtype} of shape {tuple(kept.shape)} for {state.name}.{key}, but the saved state "
                    f"has {saved.dtype} of shape {tuple(saved.shape)}. Resume with that run's model, dtype and "
                    "optimizer."
                )
            kept.copy_(saved)


def decay_of(state: ParameterState, weight_decay: float) -> float:
    """The parameter's weight decay: 0 for norms, biases and other vectors."""
    return weight_decay if state.param.ndim >= 2 and not state.name.endswith(VECTORS) else 0.0
