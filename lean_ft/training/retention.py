"""Which checkpoints a run keeps, where its settings limit them.

Nothing is deleted before the checkpoint that takes its place is whole and on the disk, so a run with `keep_last=1`
needs room for two.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from lean_ft.settings import RecipeConfig
from lean_ft.training.checkpoint import aside_name, checkpoint_step, list_checkpoints, read_training_state


def kept_steps(
    steps: list[int],
    eval_losses: Mapping[int, float | None],
    *,
    keep_last: int | None,
    keep_every: int,
    keep_best: int,
) -> set[int]:
    """The steps whose checkpoints stay; all of them where `keep_last` is None.

    eval_losses: held-out loss by step; a step without one, or with one that is not finite, is never among the best.
    Of equal losses the earlier counts as better.
    """
    if keep_last is None:
        return set(steps)
    kept = set(sorted(steps)[-keep_last:])
    kept.update(step for step in steps if keep_every and step % keep_every == 0)
    losses = {step: loss for step in steps if (loss := eval_losses.get(step)) is not None and math.isfinite(loss)}
    kept.update(sorted(losses, key=lambda step: (losses[step], step))[:keep_best])
    return kept


def remove_superseded(directory: Path, cfg: RecipeConfig, newest_step: int) -> list[str]:
    """Delete the checkpoints up to `newest_step` that `cfg` does not keep, and return their names.

    Later ones are damaged ones that the run passed over: they stay until their step comes again.
    """
    if cfg.keep_last is None:
        return []
    folders = {checkpoint_step(p): p for p in list_checkpoints(directory) if checkpoint_step(p) <= newest_step}
    losses = {step: _eval_loss(folder) for step, folder in folders.items()} if cfg.keep_best else {}
    kept = kept_steps(
        list(folders), losses, keep_last=cfg.keep_last, keep_every=cfg.keep_every, keep_best=cfg.keep_best
    )
    removed = []
    for step in sorted(folders.keys() - kept):
        # Renamed first: a deletion cut short must not leave half a checkpoint under a checkpoint's name.
        aside = aside_name(folders[step])
        folders[step].rename(aside)
        shutil.rmtree(aside)
        removed.append(folders[step].name)
    return removed


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
