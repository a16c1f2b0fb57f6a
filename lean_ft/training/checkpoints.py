"""A run's checkpoints: when one is saved, what it holds, which earlier ones are deleted, and what a resumed run reads.

An earlier checkpoint is deleted only after the one that replaces it is whole and on the disk, so a run with
`keep_last=1` needs room for two.

With `save_async` a thread writes from a copy in host memory while training continues, and the run raises the thread's
error. The copy holds the trained weights and the optimizer state; frozen weights are shared. On a CPU it doubles the
memory of weights and state until it is written.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

import lean_ft
from lean_ft.data import Batches
from lean_ft.optim import Optimizer, averaged_weights, has_averages
from lean_ft.settings import RecipeConfig, recipe_name
from lean_ft.system.log import say
from lean_ft.system.random_state import RandomState, capture_random_state
from lean_ft.system.run_directory import checkpoint_step, from_checkpoint, list_checkpoints
from lean_ft.system.shards import Part, Ranks, local
from lean_ft.system.units import duration, gibibytes
from lean_ft.system.whole_files import delete_whole
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.bad_steps import BadSteps, NonFinite, TrainingFailed, all_weights_finite
from lean_ft.training.checkpoint import (
    CheckpointState,
    checkpoint_bytes,
    free_bytes,
    restore_beside,
    restore_optimizer,
    restore_weights,
    trained_parts,
    weight_parts,
    whole_bytes,
    write_checkpoint,
)
from lean_ft.training.commands import command_to_continue
from lean_ft.training.length import Length
from lean_ft.training.records import settings_of
from lean_ft.training.starting import Start

AUTO_SAVE_SECONDS = 30 * 60  # save_every=auto: the longest time between two saves
AUTO_SAVE_SHARE = 0.1  # save_every=auto: the largest share of the run's time for saving after each epoch


@dataclass(frozen=True)
class Place:
    """The state between two steps that a checkpoint holds besides weights and optimizer state."""

    batches: dict[str, Any]
    scaler: dict[str, Any] | None
    random_state: RandomState
    step_count: int  # updates that were made and skipped: they show whether a step has begun to update
    skipped_steps: int
    carried: dict[str, Any] | None


class Carried(Protocol):
    """A module that trains besides the model, or another object that a run saves with it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Saved(NamedTuple):
    """What a run saves."""

    model: nn.Module
    optimizer: Optimizer
    batches: Batches
    tokenizer: Tokenizer
    carried: Carried | None = None


class Checkpoints:
    """Saves, keeps and restores a run's checkpoints, on all ranks together.

    `newest` is the last checkpoint, `saved_steps` its number of steps.
    """

    def __init__(self, cfg: RecipeConfig, saved: Saved, length: Length, bad_steps: BadSteps, ranks: Ranks) -> None:
        self.newest: Path | None = None
        self.saved_steps = 0
        self.base_fingerprint: str | None = None  # of the frozen weights below an adapter
        self.writer = BackgroundWriter()
        self._ended_at = time.perf_counter()  # when the newest save ended
        self._seconds = 0.0  # how long it held the loop
        self._cfg, self._length, self._bad_steps, self._ranks = cfg, length, bad_steps, ranks
        self._model, self._optimizer, self._batches, self._tokenizer, carried = saved
        self._beside = carried if isinstance(carried, nn.Module) else None
        self._carried = None if isinstance(carried, nn.Module) else carried

    def restore(self, start: Start) -> None:
        """Read the checkpoint that the run starts from, without the random state. For a complete run, which can still
        answer questions, read the weights alone. Raises ValueError if it is not of this model and optimizer, or
        damaged."""
        folder, state = start.folder, start.state
        assert folder is not None
        self.newest, self.saved_steps = folder, start.step
        restore_weights(folder, self._model)
        if start.is_complete:
            return
        restore_optimizer(folder, self._optimizer)
        if self._beside is not None:
            restore_beside(folder, self._beside)
        with from_checkpoint(folder):
            self._batches.load_state_dict(state["batches"])
            if state["scaler"] is not None:
                self._optimizer.scaler.load_state_dict(state["scaler"])
            if self._carried is not None and state.get("carried") is not None:
                self._carried.load_state_dict(state["carried"])

    def needed_bytes(self) -> int:
        """Upper bound of a checkpoint's size on the disk."""
        parts = self._optimizer.state_parts() | trained_parts(self._beside)
        return checkpoint_bytes(self._model, whole_bytes(parts), self._tokenizer, 1 + has_averages(self._optimizer))

    def check_free_space(self, needed: int, start_step: int) -> None:
        """Raise ValueError if the disk has no room for one checkpoint; log a line if it has no room for all of them."""
        directory = self._cfg.output_dir
        free = free_bytes(directory)
        if free < needed:
            raise ValueError(
                f"A checkpoint of this run needs up to {gibibytes(needed)}, and the disk of output_dir={directory} has "
                f"{gibibytes(free)} free. Free some space or set another output_dir."
            )
        saves = most_checkpoints(self._length, start_step)
        if free < saves * needed:
            say(
                "disk",
                f"{gibibytes(free)} free; the {saves} checkpoints of this run need up to {gibibytes(saves * needed)}. "
                "The run stops when a checkpoint does not fit",
            )

    def place(self) -> Place:
        """The run's place now."""
        device = next(self._model.parameters()).device
        return Place(
            self._batches.state_dict(),
            self._optimizer.scaler.state_dict(),
            capture_random_state(device),
            self._optimizer.step_count,
            self._optimizer.skipped_steps,
            None if self._carried is None else self._carried.state_dict(),
        )

    def begin_steps(self) -> None:
        """Count the time to the first save from now on."""
        self._ended_at = time.perf_counter()

    def has_updated_since(self, place: Place) -> bool:
        """Whether an update has begun since `place`, so that the weights may belong to no step."""
        now = self._optimizer
        return not now.is_whole or (place.step_count, place.skipped_steps) != (now.step_count, now.skipped_steps)

    def is_due(self, done: int) -> bool:
        """Whether `save_every` asks for a checkpoint after `done` steps."""
        every = self._cfg.save_every
        if every != "auto":
            return self._length.is_due(every, done)
        seconds = time.perf_counter() - self._ended_at
        is_worth_it = self._seconds <= AUTO_SAVE_SHARE * (self._seconds + seconds)
        return seconds >= AUTO_SAVE_SECONDS or (is_worth_it and self._length.is_due("epoch", done))

    def _training_state(self, done: int, place: Place) -> dict[str, Any]:
        """The numbers and texts that a resumed run continues from."""
        return {
            "format": 1,
            "lean_ft": lean_ft.__version__,
            "recipe": recipe_name(self._cfg),
            "step": done,
            "epoch": done / self._length.steps_per_epoch,
            "batches": place.batches,
            "scaler": place.scaler,
            "data_fingerprint": self._batches.fingerprint,
            "data_contents": self._batches.contents.as_json(),
            "settings": settings_of(self._cfg),
            "bad_steps": self._bad_steps.count,
            "carried": _plain(place.carried),
            "total_steps": self._length.total_steps,
            "base_fingerprint": self.base_fingerprint,
        }

    def save(self, done: int, *, wait: bool, place: Place | None = None) -> None:
        """Write the checkpoint of `done` steps, in the background with `save_async` unless `wait`.

        The checkpoint holds the run's place now, or an earlier `place`. Raises TrainingFailed if the weights are not
        finite or it cannot be written.
        """
        place = place or self.place()
        ranks, bad_steps, started = self._ranks, self._bad_steps, time.perf_counter()
        self.writer.wait()
        ranks.gather_no_more(self._model)
        if self._beside is not None:
            ranks.gather_no_more(self._beside)
        if bad_steps.doubtful and ranks.highest(not all_weights_finite(self._model))[0]:
            raise NonFinite(
                f"The weights are not finite after step {done}, so they are not saved. " + bad_steps.report(self.newest)
            )
        bad_steps.doubtful = False
        weights, optimizer_state = weight_parts(self._model), self._optimizer.state_parts()
        in_background, beside = self._cfg.save_async and not wait, trained_parts(self._beside)
        if in_background:
            weights, optimizer_state = host_copies(weights, self._trained_memory()), host_copies(optimizer_state)
            beside = host_copies(beside)
        averages = self._averages(in_background) if has_averages(self._optimizer) else None
        state = CheckpointState(
            self._training_state(done, place), place.random_state, optimizer_state, beside, weights, averages
        )
        copied = f" (copied in {duration(time.perf_counter() - started)})" if in_background else ""

        def write() -> None:
            try:
                writers = ranks.for_thread if in_background else ranks
                directory = self._cfg.output_dir
                self.newest = write_checkpoint(directory, done, self._model, self._tokenizer, state, writers)
            except OSError as error:
                newest = f"The newest checkpoint is {self.newest}" if self.newest else "There is no earlier checkpoint"
                raise TrainingFailed(
                    f"The checkpoint of step {done} was not written: {error}\n{newest}. Fix the disk, then run the "
                    f"same command again:\n{command_to_continue(self._cfg)}"
                ) from error
            say("saved", f"{self.newest} in {duration(time.perf_counter() - started)}{copied}")
            self.remove_superseded(done)

        if in_background:
            self.writer.start(write)
        else:
            write()
        self.saved_steps, self._ended_at = done, time.perf_counter()
        self._seconds = self._ended_at - started

    def _averages(self, in_background: bool) -> Callable[[], AbstractContextManager[dict[str, Part] | None]]:
        """Makes the context in which the averaged weights are written; `in_background` from copies made now."""
        if not in_background:
            return lambda: averaged_weights(self._optimizer, self._model)
        with averaged_weights(self._optimizer, self._model):
            copies = host_copies(weight_parts(self._model), self._trained_memory())
        return lambda: nullcontext(copies)

    def _trained_memory(self) -> set[int]:
        """The addresses of the memory that training changes."""
        return {local(p).untyped_storage().data_ptr() for p in self._model.parameters() if p.requires_grad}

    def remove_superseded(self, newest_step: int) -> None:
        """Delete the checkpoints up to `newest_step` that the settings do not keep.

        Later ones are damaged checkpoints that the run skipped. They stay until the run replaces them.
        """
        if self._ranks.rank > 0 or self._cfg.most_kept is None:
            return
        checkpoints, losses = list_checkpoints(self._cfg.output_dir), self._length.eval_losses
        folders = {step: p for p in checkpoints if (step := checkpoint_step(p)) <= newest_step}
        removed = sorted(folders.keys() - kept_steps({step: losses.get(step) for step in folders}, self._cfg))
        for step in removed:
            delete_whole(folders[step])
        if removed:
            setting = "save_every=auto" if self._cfg.keep_last is None else f"keep_last={self._cfg.keep_last}"
            say("removed", f"{', '.join(folders[step].name for step in removed)} ({setting})")


def kept_steps(eval_losses: Mapping[int, float | None], cfg: RecipeConfig) -> set[int]:
    """The steps in `eval_losses` whose checkpoints stay; all of them if no setting limits them.

    A held-out loss that is None or not finite is never among the best. Of equal losses the earlier step is better.
    """
    if cfg.most_kept is None:
        return set(eval_losses)
    kept = set(sorted(eval_losses)[-cfg.most_kept :])
    kept.update(step for step in eval_losses if cfg.keep_every and step % cfg.keep_every == 0)
    losses = {step: loss for step, loss in eval_losses.items() if loss is not None and math.isfinite(loss)}
    kept.update(sorted(losses, key=lambda step: (losses[step], step))[: cfg.keep_best])
    return kept


def most_checkpoints(length: Length, start_step: int) -> int:
    """The largest number of checkpoints after `start_step` that are on the disk at one time."""
    cfg, total_steps = length.cfg, length.total_steps
    saves = total_steps - start_step
    if (every := cfg.save_every) != "auto":
        saves = length.num_due(every, total_steps) - length.num_due(every, start_step)
        saves += not length.is_due(every, total_steps)  # the last step is always saved
    if cfg.most_kept is None:
        return saves
    multiples = total_steps // cfg.keep_every - start_step // cfg.keep_every if cfg.keep_every else 0
    return min(saves, cfg.most_kept + cfg.keep_best + multiples + 1)


def host_copies(parts: Mapping[str, Part], trained: Collection[int] | None = None) -> dict[str, Part]:
    """The parts with copies of their tensors on the CPU. `trained`: addresses of the memory that changes; parts in
    other memory (frozen weights) are shared."""
    return {
        name: part
        if trained is not None and part.values.untyped_storage().data_ptr() not in trained
        else replace(part, values=part.values.to("cpu", copy=True))
        for name, part in parts.items()
    }


class BackgroundWriter:
    """Runs one write at a time in a thread."""

    def __init__(self) -> None:
        self._written: Future[object] | None = None

    @property
    def is_writing(self) -> bool:
        return self._written is not None and not self._written.done()

    def start(self, write: Callable[[], object]) -> None:
        """Wait for the write under way, then start this one. Raises the error of the former."""
        self.wait()
        thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)  # the thread ends after this write

    def check(self) -> None:
        """Raise the error of a failed write, without waiting for one under way."""
        if not self.is_writing:
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, and raise its error."""
        written, self._written = self._written, None
        if written is not None:
            written.result()


def _plain(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return state and {name: value.item() if isinstance(value, Tensor) else value for name, value in state.items()}
