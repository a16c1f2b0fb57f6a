"""How long a run lasts, and after which of its steps something is due."""

import math
from dataclasses import dataclass, field

from lean_ft.settings import Every, RecipeConfig
from lean_ft.system.units import counted, number


@dataclass
class Length:
    """The optimizer steps of a run: as many as `epochs` and `max_steps` allow, or fewer with `stop_after_evals`.

    A step takes `gradient_accumulation_steps` batches; the last step of an epoch takes the remaining ones.
    """

    cfg: RecipeConfig
    batches_per_epoch: int
    eval_losses: dict[int, float | None] = field(default_factory=dict)
    """Watched held-out losses by step; None for a loss that is not finite, or without a held-out target."""

    def __post_init__(self) -> None:
        self.steps_per_epoch = math.ceil(self.batches_per_epoch / self.cfg.gradient_accumulation_steps)
        self._epoch_steps = max(1, math.ceil(self.cfg.epochs * self.steps_per_epoch - 1e-9))  # that `epochs` allows
        self.total_steps = min(self._epoch_steps, self.cfg.max_steps or self._epoch_steps)

    @property
    def limits(self) -> str:
        """The settings that end the run: `max_steps`, `max_steps and epochs`, or `epochs (max_steps=9 needs
        epochs=5)`."""
        if self.stops_early:
            return "stop_after_evals"
        bound, by_epochs = self.cfg.max_steps, self._epoch_steps
        if bound is not None and bound > by_epochs:
            return f"epochs (max_steps={bound} needs epochs={math.ceil(bound / self.steps_per_epoch)})"
        return "epochs" if bound is None else "max_steps" if bound < by_epochs else "max_steps and epochs"

    @property
    def stops_early(self) -> bool:
        """Whether the last `stop_after_evals` evaluations all missed the lowest held-out loss."""
        patience, losses = self.cfg.stop_after_evals, list(self.eval_losses.values())
        return bool(losses) and 0 < patience < len(losses) - losses.index(self._lowest_eval_loss)

    @property
    def _lowest_eval_loss(self) -> float | None:
        return min((loss for loss in self.eval_losses.values() if loss is not None), default=None)

    def is_over(self, done_steps: int) -> bool:
        """Whether nothing is left to train after `done_steps`."""
        return done_steps >= self.total_steps or self.stops_early

    def ending(self, done_steps: int) -> str:
        """How a run that is over ended."""
        if not self.stops_early:
            return f"{counted(self.total_steps, 'steps')} done, limited by {self.limits}"
        step = next(step for step, loss in self.eval_losses.items() if loss == self._lowest_eval_loss)
        of_source = f" of {self.cfg.watched_source}" if self.cfg.watched_source is not None else ""
        return (
            f"stopped early, after step {done_steps}: the held-out loss{of_source} has not been below "
            f"{number(self._lowest_eval_loss)} since step {step} (stop_after_evals={self.cfg.stop_after_evals})"
        )

    def num_due(self, every: Every, done_steps: int) -> int:
        """How many times an event has been due after `done_steps`: `every` so many steps, each epoch, or each share of
        an epoch. An event with `every=0` is never due."""
        if not every:
            return 0
        if isinstance(every, int):
            return done_steps // every
        share = 1.0 if every == "epoch" else every
        # 1e-9: a share that ends at a step may come out slightly below it.
        return int(done_steps / (share * self.steps_per_epoch) + 1e-9)

    def is_due(self, every: Every, done_steps: int) -> bool:
        """Whether the event is due right after step `done_steps`."""
        return self.num_due(every, done_steps) > self.num_due(every, done_steps - 1)
