"""Bad steps: steps whose loss or gradients are not finite. They are counted and logged, and end the run after too many.

`lean_ft.optim.Optimizer` skips a bad step, so the weights stay good. Its loss is null in metrics.jsonl, and
`non_finite` has the value. Its batches are kept in

    bad_batches/step_00000012.safetensors    0.input_ids, 0.labels, 0.positions ... of each micro-batch
    bad_batches/step_00000012.json           the step's line of metrics, and the text of its rows

float16 gradients that overflow at a loss scale above 1 are not a bad step: the scale is adjusted that way. A loss that
stays at the logarithm of the vocabulary size, as for a model that predicts nothing, is logged too.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lean_ft.data import Batch
from lean_ft.models.safetensors_file import write_file
from lean_ft.system.log import say
from lean_ft.system.shards import local
from lean_ft.system.units import counted
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.metrics import Row

FOLDER = "bad_batches"
TEXT_CHARACTERS = 2000  # of each row's text
UNIFORM_STEPS = 10  # steps in a row with the loss of a uniform prediction, within the tolerance
UNIFORM_TOLERANCE = 1e-3


class TrainingFailed(RuntimeError):
    """The run ended itself. The message says why."""


class NonFinite(TrainingFailed):
    """Too many steps, or the weights, are not finite."""


class BadSteps:
    """Counts a run's bad steps. More than `max_bad_steps` are too many."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        max_bad_steps: int,
        vocab_size: int | None = None,
        writes: bool = True,
    ):
        self.count = 0  # of the whole run
        self.steps: list[int] = []  # since this start
        self.batches_without_targets = 0
        self.doubtful = False  # whether a bad step came since the weights were last known to be finite
        self._directory, self._tokenizer, self._limit, self._writes = directory, tokenizer, max_bad_steps, writes
        self._kept: dict[int, list[Batch]] = {}
        self._uniform_loss = None if vocab_size is None else math.log(vocab_size)  # None: unknown, or already logged
        self._uniform_steps = 0

    def keep(self, step: int, micro_batches: list[Batch]) -> None:
        """Keep a step's batches until `look_at` gets its line."""
        self._kept[step] = micro_batches
        self.batches_without_targets += sum(batch.num_targets == 0 for batch in micro_batches)

    def look_at(self, row: Row, *, loss_scale: float = 1.0) -> None:
        """Check a step's line of metrics."""
        micro_batches = self._kept.pop(row["step"], [])
        if row["loss"] is not None and "reward" not in row:  # a policy's loss is always about 0
            self._look_for_uniform_loss(row)
        overflowed = row["loss"] is not None and loss_scale > 1
        if not ("loss" in (bad := row.get("non_finite", {})) or ("grad_norm" in bad and not overflowed)):
            return
        self.count += 1
        self.doubtful = True
        self.steps.append(row["step"])
        if not self._writes:  # rank 0 writes
            return
        try:
            kept = f"Its batch is saved in {write_bad_batch(self._directory, row, micro_batches, self._tokenizer)}."
        except OSError as error:
            kept = f"Its batch could not be saved: {error}."
        what = ", ".join(f"{name.replace('_', ' ')} is {value}" for name, value in bad.items())
        effect = "the step is skipped" if row.get("skipped") else "gradients that are not finite count as zero"
        say("bad step", f"step {row['step']}: {what}; {effect}. {kept}")

    @property
    def too_many(self) -> bool:
        return bool(self.steps) and self.count > self._limit

    def report(self, newest: Path | None) -> str:
        """The error message: why the run ends, and what may help."""
        saved = f"The newest checkpoint is {newest}." if newest else "There is no checkpoint."
        shown = ", ".join(map(str, self.steps[:10])) + (" ..." if len(self.steps) > 10 else "")
        return (
            f"{counted(self.count, 'steps')} of this run had a loss or gradients that were not finite (since this "
            f"start: {shown}), more than max_bad_steps={self._limit}. They did not change the weights. {saved}\nCheck "
            f"the batches in {self._directory / FOLDER}. Try a lower optimizer.lr, a warm-up (schedule.warmup_steps) "
            "or clip_grad_norm=1.0. Set a larger max_bad_steps to continue anyway."
        )

    def say_totals(self) -> None:
        """Log the counts at the end of a run."""
        if self.steps:
            say("bad steps", f"{len(self.steps)} with a loss or gradients that were not finite: {self.steps[:10]}")
        if self.batches_without_targets:
            say("no targets", f"{counted(self.batches_without_targets, 'micro-batches')} had no target tokens")

    def _look_for_uniform_loss(self, row: Row) -> None:
        if self._uniform_loss is None:
            return
        near = abs(row["loss"] - self._uniform_loss) < UNIFORM_TOLERANCE * self._uniform_loss
        self._uniform_steps = self._uniform_steps + 1 if near else 0
        if self._uniform_steps == UNIFORM_STEPS:
            say(
                "WARNING",
                f"the model predicts nothing: for {UNIFORM_STEPS} steps, up to step {row['step']}, the loss has been "
                f"{self._uniform_loss:.4g}, as if all tokens of the vocabulary were equally likely. The weights may be "
                "random or have collapsed. Check model.path and model.random_init, and try a lower optimizer.lr with "
                "a warm-up.",
            )
            self._uniform_loss = None


def write_bad_batch(directory: Path, row: Row, micro_batches: Sequence[Batch], tokenizer: Tokenizer) -> Path:
    """Write a step's batches and their text under `directory`, and return the safetensors file. Raises OSError."""
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{row['step']:08d}.safetensors"
    built = [getattr(batch, "built", batch) for batch in micro_batches]  # a recipe's own class lacks it
    fields = {
        f"{i}.{name}": value
        for i, batch in enumerate(built)
        for name, value in {**vars(batch), **getattr(batch, "inputs", {})}.items()
    }
    write_file(path, {name: value for name, value in fields.items() if isinstance(value, Tensor)}, {})
    texts = [[tokenizer.decode(ids)[:TEXT_CHARACTERS] for ids in batch.input_ids.tolist()] for batch in micro_batches]
    report = {"metrics": row, "num_targets": [batch.num_targets for batch in micro_batches], "texts": texts}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def all_weights_finite(model: torch.nn.Module) -> bool:
    """Whether this rank's part of every parameter is finite."""
    return all(bool(local(parameter).detach().isfinite().all()) for parameter in model.parameters())
