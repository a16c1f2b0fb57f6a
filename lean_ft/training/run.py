"""`Run` surrounds a training loop, so that the loop itself is plain PyTorch.

`Run` counts steps, writes metrics, shows progress, and ends the loop cleanly on a signal. `lean_ft.training.starting`
decides how it starts, and `Checkpoints` saves it. It never calls the loop's parts: `steps()` yields, and the recipe
does the rest.

A run has the same bits whether or not it was interrupted, on the same machine with the same settings. A checkpoint
holds weights, optimizer state, loss scale, position in the data and every random number generator. If an exception or a
`break` leaves the loop, the complete steps are saved; in the middle of an update there is nothing to save. A run
extended by a larger `max_steps` or `epochs` equals one that had the larger value from the start if the learning rates
of its steps would have
been the same: with `constant`, and with `wsd` from a checkpoint before the decay. Otherwise the change is logged.

With several ranks each has its own `Run`. Rank 0 alone writes metrics and locks the directory; all ranks write
checkpoints. They agree once per step on what to do next: where to resume, a signal to any of them, when to save.
"""

import contextlib
import math
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lean_ft.data import Batch, Batches
from lean_ft.memory.host_memory import trim_heap
from lean_ft.models import Decoder
from lean_ft.models.routing import RoutingStatistics
from lean_ft.optim import Optimizer
from lean_ft.peft import base_fingerprint
from lean_ft.settings import RecipeConfig
from lean_ft.system.foreign_values import valid_text
from lean_ft.system.interrupts import StopSignals
from lean_ft.system.log import say
from lean_ft.system.observer import Observer
from lean_ft.system.random_state import restore_random_state
from lean_ft.system.run_directory import METRICS_FILE, from_checkpoint, read_random_state
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.units import number
from lean_ft.system.world import world
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.answers import say_answers
from lean_ft.training.bad_steps import BadSteps, NonFinite
from lean_ft.training.by_source import check_is_held_out, describe_rows, watched_loss
from lean_ft.training.checkpoint import check_can_save
from lean_ft.training.checkpoints import Carried, Checkpoints, Place, Saved
from lean_ft.training.commands import command_to_continue
from lean_ft.training.evaluations import (
    Missing,
    answers_line,
    check_evaluations,
    describe_evaluation,
    missing_evaluations,
    run_eval_tasks,
)
from lean_ft.training.length import Length
from lean_ft.training.loggers import Loggers
from lean_ft.training.metrics import Metrics, set_metrics_aside, trim_metrics
from lean_ft.training.profiling import profiled
from lean_ft.training.progress import ProgressBar
from lean_ft.training.records import (
    DirectoryLock,
    facts_that_ranks_share,
    lock_directory,
    record_end,
    record_start,
    settings_of,
)
from lean_ft.training.starting import Start, check_recipe, check_schedule, decide_start
from lean_ft.training.summary import Results, log_start


class Run:
    """A training run, new or resumed.

    A step takes `gradient_accumulation_steps` batches; the last step of an epoch takes the remaining ones.

    All `ranks` that train the model make a Run and call it equally often. `carried` is further state of the loop that
    checkpoints hold: a module that trains besides the model, or an object with `state_dict` (plain numbers, text and
    scalar tensors) and `load_state_dict`.

    Raises:
        ValueError: `output_dir` is in use, holds something else, or holds a run that does not fit these settings or
            data; the disk has no room for a checkpoint, or checkpoints cannot hold the model's parameters;
            `stop_after_evals` is set and nothing is held out; or the ranks differ in settings or data.
    """

    def __init__(
        self,
        cfg: RecipeConfig,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        tokenizer: Tokenizer,
        held_out: Iterable[Batch] | None = None,
        ranks: Ranks = ALONE,
        carried: Carried | None = None,
    ):
        self.cfg, self.model, self.optimizer, self.batches, self.tokenizer = cfg, model, optimizer, batches, tokenizer
        self.ranks, self._held_out = ranks, held_out
        self.directory, self.device = cfg.output_dir, next(model.parameters()).device
        self.writes = False  # whether this process writes metrics and samples: rank 0 does, once the directory is open
        self.length = length = Length(cfg, batches.batches_per_epoch)
        self._start = Start()
        self._step = 0  # the current step, from 1 in the loop
        self._done_steps = 0
        self._begun: Place | None = None  # the place at which the current step began
        self._logged = False  # whether the current step has called log()
        self._warned_of_mode = False
        self._missing = Missing()  # evaluations of the start's step
        writes, vocab_size = ranks.rank == 0, model.config.vocab_size if isinstance(model, Decoder) else None
        self._metrics = Metrics(self.directory / METRICS_FILE, self.device, length.steps_per_epoch, writes=writes)
        self._results = Results()
        self._bad_steps = BadSteps(self.directory, tokenizer, cfg.max_bad_steps, vocab_size, writes=writes)
        saved = Saved(model, optimizer, batches, tokenizer, carried)
        self._checkpoints = Checkpoints(cfg, saved, length, self._bad_steps, ranks)
        self._signals = StopSignals()
        self._world = world()
        self._observers: tuple[Observer, ...] = (self._world.observer,)  # and in the loop, progress bar and profiler
        self._lock: DirectoryLock | None = None  # held by rank 0

        if isinstance(model, Decoder) and model.mixture is not None:
            model.routing = RoutingStatistics()

        check_recipe(cfg, model, tokenizer)
        self._world.begin_run(self, self._enter)

    def _enter(self) -> None:
        """Check what the run needs, lock its directory, and begin."""
        check_can_save(self.model)
        check_evaluations(self.cfg, self.model, self.ranks, has_held_out=self._held_out is not None)
        check_is_held_out(self.cfg, self._held_out)
        self.ranks.check_same(facts_that_ranks_share(self.cfg, self.batches))
        self._lock = lock_directory(self.directory, self.ranks)
        try:
            self._open()
        except BaseException:
            self._release()
            raise

    @property
    def start_step(self) -> int:
        """Number of steps that were done when the run started."""
        return self._start.step

    @property
    def total_steps(self) -> int:
        """Number of steps after which the run ends."""
        return self.length.total_steps

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that was written, or the one that the run resumed from."""
        return self._checkpoints.newest

    # Starting -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Start in the locked directory: new, from a checkpoint, or complete."""
        cfg, length, data = self.cfg, self.length, self.batches
        base = self.ranks.on_rank_zero(lambda: base_fingerprint(self.model))
        self._start = start = self.ranks.on_rank_zero(lambda: decide_start(cfg, length, data, base))
        self._checkpoints.base_fingerprint = base
        self.writes = self.ranks.rank == 0
        self._step = self._done_steps = start.step
        self._bad_steps.count = start.state.get("bad_steps", 0)
        length.eval_losses |= start.eval_losses
        for row in start.rows:
            self._results.note(row)
        if start.folder is not None:
            self._checkpoints.restore(start)
        self._missing = missing_evaluations(cfg, start, length, has_held_out=self._held_out is not None)
        if start.is_complete:
            length.total_steps = start.step  # a smaller `max_steps` undoes no steps
            if not any(self._missing):
                return
        else:
            check_schedule(cfg, start, self.total_steps)
        needed_bytes = self._checkpoints.needed_bytes()

        def record() -> None:
            if start.is_own:
                trim_metrics(self._metrics.path, start.step)
            else:
                set_metrics_aside(self._metrics.path)
            if not start.is_complete:
                self._checkpoints.check_free_space(needed_bytes, start.step)
            record_start(
                cfg, self.device, data.fingerprint, start.step, start.folder, self.ranks.size, length.total_steps
            )
            self._metrics.loggers = Loggers(cfg.log, self.directory, settings_of(cfg), start.step)

        self.ranks.on_rank_zero(record)
        if not start.is_complete:
            log_start(self, describe_rows(cfg, data.report, data, self._held_out))

    def _finish_evaluations(self) -> None:
        """Run the tasks that an earlier start did not finish, and name an evaluation that the recipe did not repeat."""
        if self._missing.rows and self.start_step not in self.length.eval_losses:
            again = "To repeat it, call run.evaluation_due() before the loop too, as the recipes of lean_ft do"
            say("missing", f"the evaluation after step {self.start_step}, which was interrupted. {again}")
        if self._missing.tasks:
            self._run_tasks()

    def _restore_random_state(self) -> None:
        if (folder := self._start.folder) is not None:
            with from_checkpoint(folder, ValueError):
                restore_random_state(read_random_state(folder), self.device)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # The loop -----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the 0-based index of each optimizer step; between steps, write metrics, save, and stop if asked to.

        The body calls `log` once. After the last step, or an early one with `stop_after_evals`, a checkpoint is saved
        and a summary printed. On SIGINT or SIGTERM the current step is finished and saved, and SystemExit(130 or 143)
        raised. On SIGUSR1 the step is saved and the run continues. If the body raises, the steps before are saved.

        Raises:
            NonFinite, a TrainingFailed: more than `max_bad_steps` steps were not finite (raised when their lines are
                written, up to `log_every` steps late), or the weights are not finite, and so are not saved.
            TrainingFailed: a checkpoint could not be written (with `save_async`, raised after a later step).
        """
        return self._world.steps(self._loop)

    def _end_again(self) -> None:
        """End a run that an earlier start had completed."""
        say("complete", f"{self.length.ending(self.total_steps)}. Checkpoint: {self.checkpoint}")
        say("", f"To continue training, raise {self.length.limits}. To start another run, set a new output_dir.")
        try:
            self._answer_held_out()
        finally:
            if self._metrics.loggers is not None:
                self._metrics.loggers.close(done=True)
                self._checkpoints.remove_superseded(self.total_steps)
            self._release()
        record_end(self.directory, writes=self.writes)

    def _loop(self) -> Iterator[int]:
        self._finish_evaluations()
        if self._start.is_complete:
            self._end_again()
            return
        if self._missing.answers:
            self._answer_held_out()
        cfg, length, started = self.cfg, self.length, time.perf_counter()
        self._checkpoints.begin_steps()
        try:
            with (
                self._signals as signals,
                ProgressBar(self.start_step, self.total_steps, self.directory) as progress,
                profiled(cfg, self.model, self.device, writes=self.writes) as profiler,
            ):
                self._observers = self._world.observer, progress, profiler
                self._restore_random_state()
                for step in range(self.start_step, self.total_steps):
                    if length.stops_early:  # by an evaluation that was missing
                        break
                    if step <= self.start_step + 1:  # preparing data and compiling leave much freed memory
                        trim_heap()
                    self._step, self._logged = step + 1, False
                    if self.ranks.rank > 0:  # its draws (dropout) differ from other ranks' and repeat after a resume
                        torch.manual_seed(zlib.crc32(f"{cfg.seed} {step} {self.ranks.rank}".encode()))
                    self._begun = self._checkpoints.place()
                    self._metrics.begin_step()
                    for observer in self._observers:
                        observer.begin_step()
                    try:
                        yield step
                    except GeneratorExit:  # an exception or a break left the loop; which one is unknown here
                        self._save_complete_steps()
                        raise
                    for observer in self._observers:
                        observer.end_step()
                    # Read once: a signal that arrives while this step is saved counts for the next step.
                    received = self._signal_to_stop(signals)
                    self._finish_step(stopping=received is not None)
                    if received is not None and step + 1 < self.total_steps:
                        self._stop(128 + received)
                    if length.stops_early:
                        break
                    if step + 1 < self.total_steps and length.is_due(cfg.eval_tasks_every, step + 1):
                        self._run_tasks()
                self._run_tasks()
            self._answer_held_out()
        finally:
            self._observers = (self._world.observer,)
            with contextlib.suppress(Exception):  # the loop's own error matters more; without one it was raised before
                self._checkpoints.writer.wait()
            with contextlib.suppress(Exception):  # after an error, write the metrics that are left
                self._metrics.flush()
            if self._metrics.loggers is not None:
                self._metrics.loggers.close(done=length.is_over(self._done_steps))
            self._release()
        self._end(time.perf_counter() - started)

    def _end(self, seconds: float) -> None:
        """Say how the run ended, and record it."""
        self._checkpoints.remove_superseded(self._done_steps)  # the last evaluation may change the best
        say("ended", self.length.ending(self._done_steps))
        self._bad_steps.say_totals()
        self._results.log(self, seconds=seconds, steps=self._done_steps - self.start_step)
        record_end(self.directory, writes=self.writes)

    def log(
        self,
        *,
        loss: Tensor | float,
        lr: float,
        grad_norm: Tensor | float | None,
        micro_batches: Iterable[Batch],
        **more: Tensor | float | None,
    ) -> None:
        """Record the current step, once, after the update. Tensors stay on the device until their line is written.

        loss: mean over the step's targets. grad_norm: before clipping; None if it was not computed. more: further
        values for the step's line; None values are left out.
        """
        if self._logged:
            raise RuntimeError("run.log() was called twice in one step; metrics.jsonl has one line per step.")
        self._logged = True
        for observer in self._observers:
            observer.logged()
        micro_batches = list(micro_batches)
        routing = getattr(self.model, "routing", None)
        more |= {} if routing is None else routing.take(self.ranks)
        self._bad_steps.keep(self._step, micro_batches)
        self._metrics.record(
            self._step,
            lr=lr,
            values={"loss": loss, "grad_norm": grad_norm, **more},
            micro_batches=micro_batches,
            skipped=self._begun is not None and self.optimizer.skipped_steps > self._begun.skipped_steps,
        )

    @property
    def trainer_state(self) -> SimpleNamespace:
        """The progress, under the names of transformers' TrainerState. A step is done once it is logged."""
        done = self._step if self._logged else self._done_steps
        return SimpleNamespace(
            global_step=done,
            max_steps=self.total_steps,
            epoch=done / self.length.steps_per_epoch,
            num_train_epochs=math.ceil(self.total_steps / self.length.steps_per_epoch),
            is_local_process_zero=True,
            is_world_process_zero=True,
        )

    def log_metric(self, name: str, value: Tensor | float) -> None:
        """Add a value to the next line: of the step, or of the evaluation as `eval_NAME`. The line has the mean of its
        values."""
        self._metrics.further.setdefault(valid_text(str(name)), []).append(float(value))

    def evaluation_due(self) -> bool:
        """Whether the loop's body evaluates now: as often as `eval_every` says, and after the last step, which is saved
        first. False if nothing is held out. Before the loop: whether an earlier start was interrupted in the evaluation
        after its last step."""
        if self._held_out is None:
            return False
        if self._begun is None:
            if self._missing.rows:
                self._restore_random_state()
            return self._missing.rows
        if self._step < self.total_steps:
            return self.length.is_due(self.cfg.eval_every, self._step)
        if self._logged:
            self._finish_step(stopping=False)
        return True

    def log_evaluation(self, eval_loss: Tensor | float | None, **more: Tensor | float | str | None) -> None:
        """Write an evaluation's line: `eval_loss` (None if no held-out token has a label), and further numbers or
        text."""
        self._flush()
        row = self._metrics.write_line(self._step, {"eval_loss": eval_loss, **more})
        self._results.note(row)
        self.length.eval_losses[self._step] = watched_loss(self.cfg, row)
        when = f"after step {self._step}" if self._step else "before training"
        say("evaluation", f"{when}: {describe_evaluation(self.cfg, row)}")

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Show a few of the model's completions to the loggers. All rows have the same fields."""
        if self._metrics.loggers is not None:
            self._metrics.loggers.write_samples(self._step, rows)

    def held_out(self) -> Iterator[Batch]:
        """This rank's held-out batches, for an evaluation. On SIGINT or SIGTERM, save the current step and raise
        SystemExit.

        Log the step before the evaluation, so that all of it is saved.
        """
        held_out: Any = () if self._held_out is None else self._held_out
        if not hasattr(held_out, "__getitem__"):
            held_out = list(held_out)
        for batch, _ in self.ranks.share(held_out):
            if self.model.training and not self._warned_of_mode:
                self._warned_of_mode = True
                say(
                    "evaluation",
                    "the model is in training mode, in which dropout and NEFTune act. In the recipe, replace "
                    "@torch.no_grad() by @evaluating(model), from lean_ft.training",
                )
            if self._logged and (received := self._signal_to_stop(self._signals)) is not None:
                say("evaluation", f"after step {self._step}: interrupted; the next start repeats it")
                self._finish_step(stopping=True)
                self._stop(128 + received)
            yield batch

    # Between steps ------------------------------------------------------------------------------------------------

    def _finish_step(self, *, stopping: bool) -> None:
        """Write and save what is due after the current step, once."""
        done = self._step
        if not self._logged:
            raise RuntimeError(f"Step {done} ended without run.log(...). Call it once per step.")
        if self._done_steps == done:
            return
        self._done_steps = done
        ending = stopping or self.length.is_over(done)
        # Rank 0's clock decides whether a save is due; a signal may come to any rank.
        due = self.ranks.rank == 0 and self._checkpoints.is_due(done)
        saving = ending or any(self.ranks.highest(self._signals.take_save_request(), due))
        if saving or done % self.cfg.log_every == 0:
            self._flush()
        self._checkpoints.writer.check()
        if self._bad_steps.too_many:
            self._save(wait=True)  # raises if the weights are not finite
            raise NonFinite(self._bad_steps.report(self.checkpoint))
        if saving:
            self._save(wait=ending)

    def _flush(self) -> None:
        self._metrics.take_highest_peaks(self.ranks.highest)
        rows = self._metrics.flush()
        for row in rows:
            self._results.add(row)
        for observer in self._observers if rows else ():
            observer.written(rows[-1])
        for row in rows:
            self._bad_steps.look_at(row, loss_scale=self.optimizer.scaler.value)

    def _signal_to_stop(self, signals: StopSignals) -> int | None:
        """The signal that reached any rank."""
        return self.ranks.highest(signals.received or 0)[0] or None

    def _save_complete_steps(self) -> None:
        """Save the steps before the interrupted one, or that one too if it was logged.

        Between a step's first update and its log the weights belong to no step, so nothing is saved. An error here is
        only logged, because the loop's own error is on its way.
        """
        begun = self._begun
        newest = f"the newest checkpoint is {self.checkpoint}" if self.checkpoint else "there is no checkpoint"
        if self.ranks.size > 1:  # the other ranks are busy, and a save takes all of them
            say("not saved", f"step {self._step} failed on rank {self.ranks.rank}; {newest}")
            return
        try:
            if self._logged:
                self._finish_step(stopping=True)
            elif begun is None or self._checkpoints.has_updated_since(begun):
                say("not saved", f"step {self._step} was interrupted during its update; {newest}")
            elif self._done_steps > self._checkpoints.saved_steps:
                self.optimizer.zero_grad()  # frees memory for the save
                self._flush()
                self._save(wait=True, place=begun)
        except Exception as error:
            say("not saved", f"{type(error).__name__}: {error}")

    def _save(self, *, wait: bool, place: Place | None = None) -> None:
        """Save the finished steps, at the run's place now or an earlier `place`; in the background if allowed, unless
        `wait`."""
        self._metrics.sync_to_disk()
        self._checkpoints.save(self._done_steps, wait=wait, place=place)

    def _answer_held_out(self) -> None:
        """Have the model answer held-out questions, if `eval_answers` asks for it, and write the share of right
        answers, unless an earlier start has written it."""
        step, model, cfg = self._done_steps, cast(Decoder, self.model), self.cfg
        when = f"at step {step}"
        report = say_answers(when, model, self.tokenizer, self._held_out, cfg.eval_answers, pattern=cfg.eval_pattern)
        if report is None:
            return
        fields = answers_line(report, cfg.eval_pattern)
        written = [row for row in self._start.rows if row["step"] == step]
        if not any(fields.items() <= row.items() for row in written if "eval_questions" in row):
            self._results.note(self._metrics.write_line(step, fields))

    def _run_tasks(self) -> None:
        """Run `eval_tasks`, without an effect on the rest of the run."""
        if self.cfg.eval_tasks:
            row = run_eval_tasks(self.cfg, cast(Decoder, self.model), self.tokenizer)
            self._flush()
            self._metrics.write_line(self._done_steps, row)
            say("tasks", f"after step {self._done_steps}: {', '.join(f'{k[5:]} {number(v)}' for k, v in row.items())}")

    # Ending -------------------------------------------------------------------------------------------------------

    def _stop(self, exit_code: int) -> None:
        say("stopped", f"after step {self._done_steps} of {self.total_steps}; all steps are saved. To resume, run:")
        say("", command_to_continue(self.cfg))
        raise SystemExit(exit_code)
