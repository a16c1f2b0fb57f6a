"""What a run saves: where it is between two steps, when it is worth writing, and which earlier ones make room for it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import lean_ft
from lean_ft.data import Batches
from lean_ft.optim import Optimizer
from lean_ft.settings import RecipeConfig
from lean_ft.system.log import say
from lean_ft.system.shards import Ranks
from lean_ft.system.units import duration, gibibytes
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.background import BackgroundWriter, host_copies, host_copy
from lean_ft.training.bad_steps import BadSteps, TrainingFailed, all_weights_finite
from lean_ft.training.checkpoint import (
    checkpoint_bytes,
    free_bytes,
    trained_parts,
    weight_parts,
    whole_bytes,
    write_checkpoint,
)
from lean_ft.training.intervals import is_due
from lean_ft.training.random_state import RandomState, capture_random_state
from lean_ft.training.retention import most_checkpoints, remove_superseded
from lean_ft.training.run_directory import recipe_name, settings_of
from lean_ft.training.summary import command_to_continue

AUTO_SAVE_SECONDS = 30 * 60  # at most, between two saves of save_every=auto
AUTO_SAVE_SHARE = 0.1  # of the time that saving after each epoch may take


@dataclass(frozen=True)
class Place:
    """What a checkpoint holds beside weights and optimizer state, as it was between two steps."""

    batches: dict[str, Any]
    scaler: dict[str, Any] | None
    random_state: RandomState
    num_updates: tuple[int, int]  # made and skipped: by these a step that has begun to update is known
    carried: dict[str, Any] | None


class Saving:
    """Writes a run's checkpoints, all `ranks` together; `newest` is the last one, `saved_steps` the steps in it."""

    def __init__(
        self,
        cfg: RecipeConfig,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        tokenizer: Tokenizer,
        ranks: Ranks,
        *,
        carried: Any,
        beside: nn.Module | None,
    ) -> None:
        self.newest: Path | None = None
        self.saved_steps = 0
        self.writer = BackgroundWriter()
        self._ended_at = time.perf_counter()  # when the newest save ended, and how long it held the loop
        self._seconds = 0.0
        self._cfg, self._model, self._optimizer = cfg, model, optimizer
        self._batches, self._tokenizer = batches, tokenizer
        self._ranks, self._carried, self._beside = ranks, carried, beside

    def needed_bytes(self) -> int:
        """Of a checkpoint, on the disk."""
        others = self._optimizer.state_parts() | trained_parts(self._beside)
        return checkpoint_bytes(self._model, whole_bytes(others), self._tokenizer)

    def check_free_space(self, needed: int, start_step: int, total_steps: int, steps_per_epoch: int) -> None:
        """Raises ValueError where not one checkpoint would fit; says where those that the run keeps would not."""
        directory = self._cfg.output_dir
        free = free_bytes(directory)
        if free < needed:
            raise ValueError(
                f"A checkpoint of this run takes up to {gibibytes(needed)}, and the disk of "
                f"output_dir={directory} has {gibibytes(free)} free: not even one could be saved. Free some space "
                f"or set another output_dir."
            )
        saves = most_checkpoints(self._cfg, start_step, total_steps, steps_per_epoch)
        if free < saves * needed:
            say(
                "disk",
                f"{gibibytes(free)} free, and the {saves} checkpoints that this run keeps take up to "
                f"{gibibytes(saves * needed)}: the run stops where one does not fit",
            )

    def place(self) -> Place:
        """Where the run is now."""
        device = next(self._model.parameters()).device
        return Place(
            self._batches.state_dict(),
            self._optimizer.scaler.state_dict(),
            capture_random_state(device),
            self.num_updates,
            None if self._carried is None else self._carried.state_dict(),
        )

    def begin_steps(self) -> None:
        """Count the time to the first save from now on."""
        self._ended_at = time.perf_counter()

    @property
    def num_updates(self) -> tuple[int, int]:
        return self._optimizer.step_count, self._optimizer.skipped_steps

    @property
    def newest_or_none(self) -> str:
        return f"the newest checkpoint is {self.newest}" if self.newest else "nothing was saved before"

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        """Whether `save_every` asks for a checkpoint of `done` steps."""
        every = self._cfg.save_every
        if every != "auto":
            return is_due(every, done, steps_per_epoch)
        seconds = time.perf_counter() - self._ended_at
        is_worth_it = self._seconds <= AUTO_SAVE_SHARE * (self._seconds + seconds)
        return seconds >= AUTO_SAVE_SECONDS or (is_worth_it and is_due("epoch", done, steps_per_epoch))

    def save(
        self,
        done: int,
        facts: dict[str, Any],
        bad_steps: BadSteps,
        eval_losses: Mapping[int, float | None],
        *,
        wait: bool,
        place: Place | None = None,
    ) -> None:
        """Write the checkpoint of `done` steps, or with `save_async` start to, unless `wait`; of where the run is, or was at
        `place`. `facts` go into its training state."""
        place = place or self.place()
        started = time.perf_counter()
        self.writer.wait()
        self._ranks.gather_no_more(self._model)
        if self._beside is not None:
            self._ranks.gather_no_more(self._beside)
        if bad_steps.doubtful and self._ranks.highest(not all_weights_finite(self._model))[0]:
            raise TrainingFailed(
                f"The weights are not finite after step {done}, so they are not saved. " + bad_steps.report(self.newest)
            )
        bad_steps.doubtful = False
        training_state = {
            "format": 1,
            "lean_ft": lean_ft.__version__,
            "recipe": recipe_name(self._cfg),
            "step": done,
            "batches": place.batches,
            "scaler": place.scaler,
            "data_fingerprint": self._batches.fingerprint,
            "settings": settings_of(self._cfg),
            "bad_steps": bad_steps.count,
            "carried": _plain(place.carried),
            **facts,
        }
        model, weights, optimizer_state = self._model, weight_parts(self._model), self._optimizer.state_parts()
        in_background, beside = self._cfg.save_async and not wait, trained_parts(self._beside)
        if in_background:
            optimizer_state, beside = host_copies(optimizer_state), host_copies(beside)
            if self._ranks.size > 1:  # the parts that are here
                weights = host_copies(weights)
            else:
                model = host_copy(model)
                weights = weight_parts(model)
        copied = f", copied in {duration(time.perf_counter() - started)}" if in_background else ""

        def write() -> None:
            try:
                self.newest = write_checkpoint(
                    self._cfg.output_dir,
                    done,
                    model=model,
                    tokenizer=self._tokenizer,
                    optimizer_state=optimizer_state,
                    training_state=training_state,
                    random_state=place.random_state,
                    weights=weights,
                    beside=beside,
                    ranks=self._ranks.for_thread if in_background else self._ranks,
                )
            except OSError as error:
                newest = f"The newest whole one is {self.newest}" if self.newest else "There is no earlier one"
                raise TrainingFailed(
                    f"The checkpoint of step {done} was not written: {error}\n{newest}. Mend the disk, then start the "
                    f"same command again:\n{command_to_continue(self._cfg.resume)}"
                ) from error
            say("saved", f"{self.newest} in {duration(time.perf_counter() - started)}{copied}")
            self.remove_superseded(done, eval_losses)

        if in_background:
            self.writer.start(write)
        else:
            write()
        self.saved_steps, self._ended_at = done, time.perf_counter()
        self._seconds = self._ended_at - started

    def remove_superseded(self, newest_step: int, eval_losses: Mapping[int, float | None]) -> None:
        """Delete the checkpoints that the settings do not keep."""
        if self._ranks.rank > 0:
            return
        if removed := remove_superseded(self._cfg.output_dir, self._cfg, newest_step, eval_losses):
            keeps = "save_every=auto" if self._cfg.keep_last is None else f"keep_last={self._cfg.keep_last}"
            say("removed", f"{', '.join(removed)}, as {keeps} asks")


def _plain(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state and {name: value.item() if isinstance(value, Tensor) else value for name, value in state.items()}
