"""Which checkpoints a run keeps, where its settings limit them.

Nothing is deleted before the checkpoint that takes its place is whole and on the disk, so a run with `keep_last=1`
needs room for two.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from lean_ft.settings import RecipeConfig
from lean_ft.training.checkpoint import checkpoint_step, list_checkpoints, read_training_state
from lean_ft.whole_files import delete_whole


def kept_steps(eval_losses: Mapping[int, float | None], cfg: RecipeConfig) -> set[int]:
    """The steps whose checkpoints stay, of those that `eval_losses` has; all of them where `keep_last` is None.

    A step whose held-out loss is None, or not finite, is never among the best. Of equal losses the earlier counts as
    better.
    """
    if cfg.keep_last is None:
        return set(eval_losses)
    kept = set(sorted(eval_losses)[-cfg.keep_last :])
    kept.update(step for step in eval_losses if cfg.keep_every and step % cfg.keep_every == 0)
    losses = {step: loss for step, loss in eval_losses.items() if loss is not None and math.isfinite(loss)}
    kept.update(sorted(losses, key=lambda step: (losses[step], step))[: cfg.keep_best])
    return kept


def remove_superseded(directory: Path, cfg: RecipeConfig, newest_step: int) -> list[str]:
    """Delete the checkpoints up to `newest_step` that `cfg` does not keep, and return their names.

    Later ones are damaged ones that the run passed over: they stay until their step comes again.
    """
    if cfg.keep_last is None:
        return []
    folders = {step: p for p in list_checkpoints(directory) if (step := checkpoint_step(p)) <= newest_step}
    losses = {step: _eval_loss(folder) if cfg.keep_best else None for step, folder in folders.items()}
    removed = sorted(folders.keys() - kept_steps(losses, cfg))
    for step in removed:
        delete_whole(folders[step])
    return [folders[step].name for step in removed]


def most_checkpoints(cfg: RecipeConfig, start_step: int, total_steps: int) -> int:
    """Checkpoints of steps after `start_step` that are on the disk at a time, at most."""
    if not cfg.save_every:
        return 1
    saves = math.ceil(total_steps / cfg.save_every) - start_step // cfg.save_every
    if cfg.keep_last is None:
        return saves
    every = total_steps // cfg.keep_every - start_step // cfg.keep_every if cfg.keep_every else 0
    return min(saves, cfg.keep_last + cfg.keep_best + every + 1)


def _eval_loss(folder: Path) -> float | None:
    try:
        return read_training_state(folder).get("eval_loss")
    except ValueError:
        return None  # a damaged one is not the best
