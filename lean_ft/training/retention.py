"""Which checkpoints a run keeps, where its settings limit them.

Nothing is deleted before the checkpoint that takes its place is whole and on the disk, so a run with `keep_last=1`
needs room for two.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from lean_ft.settings import RecipeConfig
from lean_ft.system.whole_files import delete_whole
from lean_ft.training.checkpoint import checkpoint_step, list_checkpoints
from lean_ft.training.intervals import is_due, num_due


def kept_steps(eval_losses: Mapping[int, float | None], cfg: RecipeConfig) -> set[int]:
    """The steps whose checkpoints stay, of those that `eval_losses` has; all of them where nothing limits them.

    A step whose held-out loss is None, or not finite, is never among the best. Of equal losses the earlier counts as
    better.
    """
    if cfg.most_kept is None:
        return set(eval_losses)
    kept = set(sorted(eval_losses)[-cfg.most_kept :])
    kept.update(step for step in eval_losses if cfg.keep_every and step % cfg.keep_every == 0)
    losses = {step: loss for step, loss in eval_losses.items() if loss is not None and math.isfinite(loss)}
    kept.update(sorted(losses, key=lambda step: (losses[step], step))[: cfg.keep_best])
    return kept


def remove_superseded(
    directory: Path, cfg: RecipeConfig, newest_step: int, eval_losses: Mapping[int, float | None]
) -> list[str]:
    """Delete the checkpoints up to `newest_step` that `cfg` does not keep, and return their names.

    `eval_losses` are the run's held-out losses by step. Later ones are damaged ones that the run passed over: they stay until their step comes again.
    """
    if cfg.most_kept is None:
        return []
    folders = {step: p for p in list_checkpoints(directory) if (step := checkpoint_step(p)) <= newest_step}
    removed = sorted(folders.keys() - kept_steps({step: eval_losses.get(step) for step in folders}, cfg))
    for step in removed:
        delete_whole(folders[step])
    return [folders[step].name for step in removed]


def most_checkpoints(cfg: RecipeConfig, start_step: int, total_steps: int, steps_per_epoch: int) -> int:
    """Checkpoints of steps after `start_step` that are on the disk at a time, at most."""
    saves = total_steps - start_step
    if (every := cfg.save_every) != "auto":
        saves = num_due(every, total_steps, steps_per_epoch) - num_due(every, start_step, steps_per_epoch)
        saves += not is_due(every, total_steps, steps_per_epoch)  # the last step is saved in any case
    if cfg.most_kept is None:
        return saves
    multiples = total_steps // cfg.keep_every - start_step // cfg.keep_every if cfg.keep_every else 0
    return min(saves, cfg.most_kept + cfg.keep_best + multiples + 1)
