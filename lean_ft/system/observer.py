"""What a run calls as it proceeds, so that other parts of the library can follow it.

`lean_ft.training.Run` tells its profiler and its progress bar. `Run`, `Optimizer` and `Rounds` also tell the observer
of their world (`lean_ft.system.world`), which does nothing in a run and measures the step in a plan.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lean_ft.online.rollouts import Rounds
    from lean_ft.optim import Optimizer
    from lean_ft.optim.rule import ParameterState
    from lean_ft.settings import OnlineConfig

T = TypeVar("T")


class Observer:
    """Follows a run; this one does nothing.

    `update`, `sample` and `round_batches` do the work that they get. An observer that replaces work without contents,
    as a plan does, overrides them.
    """

    # Called by Run ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before the body of the loop."""

    def logged(self) -> None:
        """When the body of the loop calls `log`, after the update."""

    def end_step(self) -> None:
        """After the body of the loop."""

    def written(self, row: dict[str, Any]) -> None:
        """When lines of metrics were written; row: the newest one."""

    # Called by Optimizer ------------------------------------------------------------------------------------------

    def begin_optimizer(self, optimizer: "Optimizer") -> None:
        """When an optimizer is made, before its own hooks: hooks on parameters that are registered here run first."""

    def begin_backward(self) -> None:
        """Before each backward pass, when its loss is scaled."""

    def update(self, optimizer: "Optimizer", states: "Sequence[ParameterState]") -> None:
        """Update these parameters."""
        optimizer.apply_rules(states)

    # Called by Rounds ---------------------------------------------------------------------------------------------

    def sample(
        self, rounds: "Rounds", cfg: "OnlineConfig", answer: Callable[..., Any], fill: Callable[[], None]
    ) -> None:
        """Fill the next round with completions by `answer`, which samples for prompts and a seed."""
        fill()

    def round_batches(self, make: Callable[[], list[T]], largest: Callable[[], T], number: int) -> list[T]:
        """Make `number` micro-batches of a round; largest: the largest possible one, without contents."""
        return make()
