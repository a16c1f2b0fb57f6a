"""How often something happens in a run: after so many optimizer steps, after each epoch, or after a share of one."""

from lean_ft.settings import Every


def num_due(every: Every, done_steps: int, steps_per_epoch: int) -> int:
    """How often what is `every` so often has been due once `done_steps` are done; 0 is never due."""
    if not every:
        return 0
    if isinstance(every, int):
        return done_steps // every
    share = 1.0 if every == "epoch" else every
    return int(done_steps / (share * steps_per_epoch) + 1e-9)  # a step that ends a part by rounding alone ends it


def is_due(every: Every, done_steps: int, steps_per_epoch: int) -> bool:
    """Whether it is due now that `done_steps` are done."""
    return num_due(every, done_steps, steps_per_epoch) > num_due(every, done_steps - 1, steps_per_epoch)
