"""`Run` surrounds a training loop, so that the loop itself is plain PyTorch.

`Run` owns the run directory, resumes, counts steps, writes metrics and checkpoints, shows progress, and ends the loop cleanly
on a signal. It never calls the loop's parts: `steps()` yields, and the recipe does the rest.

A run has the same bits whether or not it was interrupted, on the same machine with the same settings. A checkpoint holds
weights, optimizer state, loss scale, position in the data and every random number generator. If an exception or a `break`
leaves the loop, the complete steps are saved; in the middle of an update there is nothing to save. A run extended by a larger
`max_steps` or `epochs` equals one that had the larger value from the start if the learning rates of its steps would have
been the same: with `constant`, and with `wsd` from a checkpoint before the decay. Otherwise the change is logged.

With several ranks each has its own `Run`. Rank 0 alone writes metrics and locks the directory; all ranks write checkpoints.
They agree once per step on what to do next: where to resume, a signal to any of them, when to save.
"""

import contextlib
import math
import platform
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lean_ft.data import Batch, Batches
from lean_ft.generation.tasks import find_tasks, run_tasks
from lean_ft.memory.host_memory import trim_heap
from lean_ft.models import Decoder
from lean_ft.optim import Optimizer, scheduled
from lean_ft.peft import base_fingerprint
from lean_ft.settings import ModelConfig, RecipeConfig, ScheduleConfig
from lean_ft.system.interrupts import StopSignals
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.units import counted, number
from lean_ft.system.world import world
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.answers import say_answers
from lean_ft.training.bad_steps import BadSteps, TrainingFailed
from lean_ft.training.checkpoint import (
    RandomState,
    capture_random_state,
    from_checkpoint,
    read_random_state,
    read_training_state,
    restore_beside,
    restore_optimizer,
    restore_random_state,
    restore_weights,
)
from lean_ft.training.continuation import (
    check_complete,
    check_output_dir,
    command_to_continue,
    compare_base,
    compare_data,
    compare_settings,
    find_checkpoint,
    is_own,
)
from lean_ft.training.loggers import Loggers, is_number
from lean_ft.training.metrics import Metrics, trim_metrics
from lean_ft.training.profiling import profiled
from lean_ft.training.progress import ProgressBar
from lean_ft.training.regularization import check_applied
from lean_ft.training.run_directory import (
    LOCK_FILE,
    METRICS_FILE,
    DirectoryLock,
    facts_that_ranks_share,
    gather_facts,
    locks,
    record_end,
    record_start,
    remove_half_written,
    settings_of,
)
from lean_ft.training.saving import Place, Saving, is_due
from lean_ft.training.summary import Results, log_start


class Run:
    """A training run, new or resumed.

    `total_steps` and `start_step` count optimizer steps. A step takes `gradient_accumulation_steps` batches; the last step
    of an epoch takes the remaining ones.

    All `ranks` that train the model make a Run and call it equally often. `carried` is further state of the loop that
    checkpoints hold: a module that trains besides the model, or an object with `state_dict` (plain numbers, text and scalar
    tensors) and `load_state_dict`.

    Raises:
        ValueError: `output_dir` is in use, holds something else, or holds a run that does not fit these settings or data;
            the disk has no room for a checkpoint; `stop_after_evals` is set and nothing is held out; or the ranks differ in
            settings or data.
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
        carried: Any = None,
    ):
        self.cfg, self.model, self.optimizer, self.batches, self.tokenizer = cfg, model, optimizer, batches, tokenizer
        self.ranks, self._held_out = ranks, held_out
        self.start_step = 0
        check_applied(model, cfg)
        settings = cfg.group(ModelConfig)
        if settings is not None and any(tokenizer.token_id(token) is None for token in settings.new_tokens):
            raise ValueError(
                "the tokenizer lacks model.new_tokens. In the recipe, load it by load_tokenizer(cfg.model, ...)."
            )
        self.writes = ranks.rank == 0  # whether this process writes metrics and samples
        self.directory = cfg.output_dir
        self.device = next(model.parameters()).device

        self.steps_per_epoch = math.ceil(batches.batches_per_epoch / cfg.gradient_accumulation_steps)
        self._epoch_steps = max(1, math.ceil(cfg.epochs * self.steps_per_epoch - 1e-9))  # steps that `epochs` allows
        self.total_steps = min(self._epoch_steps, cfg.max_steps or self._epoch_steps)

        self._step = 0  # the current step, from 1 in the loop
        self._done_steps = 0
        self._begun: Place | None = None  # the place at which the current step began
        self._logged = False  # whether the current step has called log()
        self._random_state: RandomState | None = None
        self._saving = Saving(self, carried)
        self._metrics = Metrics(self.directory / METRICS_FILE, self.device, self.steps_per_epoch, writes=self.writes)
        self._results = Results()
        vocab_size = model.config.vocab_size if isinstance(model, Decoder) else None
        self._bad_steps = BadSteps(self.directory, tokenizer, cfg.max_bad_steps, vocab_size, writes=self.writes)
        self._skipped_before = 0  # the optimizer's count of skipped steps when the current step began
        self._eval_losses: dict[int, float | None] = {}  # held-out losses by step
        self._lacks_evaluation = self._lacks_tasks = False  # a finished run whose last evaluation was interrupted
        self._signals = StopSignals()
        self._progress: ProgressBar | None = None
        self._lock: DirectoryLock | None = None  # held by rank 0
        world().begin_run(self, self._enter)

    def _enter(self) -> None:
        """Check what the run needs, lock its directory, and begin."""
        cfg = self.cfg
        if cfg.eval_tasks:
            self._check_tasks()
        if cfg.stop_after_evals and self._held_out is None:
            raise ValueError(
                f"stop_after_evals={cfg.stop_after_evals} needs held-out rows, and there are none. Set "
                "data.validation_source or data.validation_fraction, or remove stop_after_evals."
            )
        self.ranks.check_same(facts_that_ranks_share(cfg, self.batches))
        try:
            self._lock_directory()
            self._begin()
        except BaseException:
            self._release()
            raise

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that was written, or the one that the run resumed from."""
        return self._saving.newest

    @property
    def limits(self) -> str:
        """The settings that end the run: `max_steps`, `max_steps and epochs`, or `epochs (max_steps=9 needs epochs=5)`."""
        if self._stops_early:
            return "stop_after_evals"
        bound, by_epochs = self.cfg.max_steps, self._epoch_steps
        if bound is not None and bound > by_epochs:
            return f"epochs (max_steps={bound} needs epochs={math.ceil(bound / self.steps_per_epoch)})"
        return "epochs" if bound is None else "max_steps" if bound < by_epochs else "max_steps and epochs"

    # Starting -----------------------------------------------------------------------------------------------------

    def _lock_directory(self) -> None:
        """Lock the run directory, and check that all ranks see the same one."""

        def lock() -> str:
            check_output_dir(self.cfg)
            self._lock = locks.pop(self.directory, None) or DirectoryLock(self.directory)
            remove_half_written(self.directory)
            return (self.directory / LOCK_FILE).read_text(encoding="utf-8")

        holder, file = self.ranks.on_rank_zero(lock), self.directory / LOCK_FILE

        def look() -> None:
            if not file.is_file() or file.read_text(encoding="utf-8") != holder:
                raise ValueError(
                    f"output_dir={self.directory}: rank {self.ranks.rank} on {platform.node()} does not see the folder of "
                    "rank 0. All ranks write checkpoints. Set output_dir to a folder on a disk that all machines share."
                )

        if self.ranks.size > 1:
            self.ranks.on_every_rank(look)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _begin(self) -> None:
        """Resume from a checkpoint or start the run, and record the start."""
        folder, self._base_fingerprint = self.ranks.on_rank_zero(
            lambda: (find_checkpoint(self.cfg), base_fingerprint(self.model))
        )
        if folder is not None:
            self._resume(folder)
        if self.start_step >= self.total_steps:
            if self._lacks_evaluation or self._lacks_tasks:
                self.ranks.on_rank_zero(self._open_loggers)
            return
        if (
            schedule := self.cfg.group(ScheduleConfig)
        ) is not None:  # a user's function fails now rather than in an hour
            for step in range(self.start_step, self.total_steps):
                scheduled(schedule, step, self.total_steps)
        needed_bytes = self._saving.needed_bytes()

        def record() -> None:
            if folder is None or not is_own(self.cfg, folder):
                self._set_earlier_attempt_aside()
            self._saving.check_free_space(needed_bytes, self.start_step, self.total_steps)
            facts = gather_facts(self.cfg, self.device, self.batches.fingerprint, self.start_step)
            if self.ranks.size > 1:
                facts["processes"] = self.ranks.size
            if folder is not None:
                facts["resumed_from"] = str(folder)
            record_start(self.directory, self.cfg, facts)
            self._open_loggers()

        self.ranks.on_rank_zero(record)
        log_start(self)

    def _open_loggers(self) -> None:
        self._metrics.loggers = Loggers(self.cfg.log, self.directory, settings_of(self.cfg), self.start_step)

    def _set_earlier_attempt_aside(self) -> None:
        """Rename the metrics file of an earlier start in this directory that never reached a checkpoint."""
        metrics = self._metrics.path
        if metrics.exists() and metrics.stat().st_size:
            aside = metrics.with_stem("metrics.previous")
            metrics.replace(aside)
            say("starting", f"from step 0: an earlier attempt saved no checkpoint. Its metrics are now in {aside}")

    def _resume(self, folder: Path) -> None:
        state = read_training_state(folder)
        with from_checkpoint(folder):
            changes = compare_settings(self.cfg, state, folder)
        self._bad_steps.count = state.get("bad_steps", 0)
        compare_data(self.cfg, self.batches.fingerprint, state, folder)
        compare_base(self._base_fingerprint, state, folder)
        self.start_step = self._step = self._done_steps = self._saving.saved_steps = state["step"]
        self._saving.newest = folder
        is_own_run, rows = is_own(self.cfg, folder), []
        if is_own_run and (rows := self.ranks.on_rank_zero(lambda: trim_metrics(self._metrics.path, self.start_step))):
            for row in rows:
                self._results.note(row)
            losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
            self._eval_losses = {step: loss for step, loss in losses.items() if loss is None or is_number(loss)}
        restore_weights(folder, self.model)  # also for a finished run, which can still answer questions
        if self.start_step >= self.total_steps or self._stops_early:
            check_complete(self.cfg, state, self.limits)
            self.total_steps = self.start_step  # a smaller `max_steps` undoes no steps
            last = [row for row in rows if row["step"] == self.total_steps and "tokens" not in row]
            self._lacks_evaluation = (
                is_own_run and self._held_out is not None and self.total_steps not in self._eval_losses
            )
            self._lacks_tasks = is_own_run and bool(self.cfg.eval_tasks) and all("eval_loss" in row for row in last)
            return

        restore_optimizer(folder, self.optimizer)
        if self._saving.beside is not None:
            restore_beside(folder, self._saving.beside)
        with from_checkpoint(folder):
            self.batches.load_state_dict(state["batches"])
            if state["scaler"] is not None:
                self.optimizer.scaler.load_state_dict(state["scaler"])
            if self._saving.carried is not None and state.get("carried") is not None:
                self._saving.carried.load_state_dict(state["carried"])
        self._random_state = read_random_state(folder)
        say("resuming", f"from {folder}, after step {self.start_step} of {self.total_steps}")
        for change in changes:
            say("changed", f"{change}. The results will differ from a run that had this value from the start")
        schedule, planned = self.cfg.group(ScheduleConfig), state["total_steps"]
        if schedule is not None and any(
            scheduled(schedule, step, planned) != scheduled(schedule, step, self.total_steps)
            for step in range(self.start_step if planned != self.total_steps else 0)
        ):
            effect = f"schedule.name={schedule.name} uses the new total from now on"
            say("changed", f"total steps: {planned} then, {self.total_steps} now. {effect}")

    # The loop -----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the 0-based index of each optimizer step; between steps, write metrics, save, and stop if asked to.

        The body calls `log` once. After the last step, or an early one with `stop_after_evals`, a checkpoint is saved and a
        summary printed. On SIGINT or SIGTERM the current step is finished and saved, and SystemExit(130 or 143) raised. On
        SIGUSR1 the step is saved and the run continues. If the body raises, the steps before are saved.

        Raises:
            TrainingFailed: more than `max_bad_steps` steps were not finite (raised when their lines are written, up to
                `log_every` steps late); the weights are not finite, and so are not saved; or a checkpoint could not be
                written (with `save_async`, raised after a later step).
        """
        if self.start_step >= self.total_steps:
            try:
                yield from self._evaluate_again()
            finally:
                if self._metrics.loggers is not None:
                    self._metrics.loggers.close(done=True)
                self._release()
            say("complete", f"{self._ending}. Checkpoint: {self.checkpoint}")
            say("", f"To continue training, raise {self.limits}. To start another run, set a new output_dir.")
            self._answer_held_out(f"at step {self.total_steps}")
            record_end(self.directory, writes=self.writes)
            return
        self._answer_held_out(f"at step {self.start_step}")
        cfg = self.cfg
        started = time.perf_counter()
        self._saving.begin_steps()
        try:
            with (
                self._signals as signals,
                ProgressBar(self.start_step, self.total_steps, self.directory) as self._progress,
                profiled(self.cfg, self.model, self.device, writes=self.writes) as profiler,
            ):
                if self._random_state is not None:
                    with from_checkpoint(self.checkpoint or self.directory, ValueError):
                        restore_random_state(self._random_state, self.device)
                for step in range(self.start_step, self.total_steps):
                    if step <= self.start_step + 1:  # preparing data and compiling leave much freed memory
                        trim_heap()
                    self._step, self._logged = step + 1, False
                    if self.ranks.rank > 0:  # its draws (dropout) differ from other ranks' and repeat after a resume
                        torch.manual_seed(zlib.crc32(f"{self.cfg.seed} {step} {self.ranks.rank}".encode()))
                    self._begun = self._saving.place()
                    self._skipped_before = self.optimizer.skipped_steps
                    self._metrics.begin_step()
                    try:
                        yield step
                    except GeneratorExit:  # an exception or a break left the loop; which one is unknown here
                        self._save_complete_steps()
                        raise
                    if profiler is not None:
                        profiler.step()
                    # Read once: a signal that arrives while this step is saved counts for the next step.
                    received = self._signal_to_stop(signals)
                    self._finish_step(stopping=received is not None)
                    if received is not None and step + 1 < self.total_steps:
                        self._stop(128 + received)
                    if self._stops_early:
                        break
                    if step + 1 < self.total_steps and is_due(cfg.eval_tasks_every, step + 1, self.steps_per_epoch):
                        self._run_tasks()
                self._run_tasks()
        finally:
            self._progress = None
            with contextlib.suppress(Exception):  # the loop's own error matters more; without one it was raised before
                self._saving.writer.wait()
            with contextlib.suppress(Exception):  # after an error, write the metrics that are left
                self._metrics.flush()
            if self._metrics.loggers is not None:
                self._metrics.loggers.close(done=self._done_steps >= self.total_steps or self._stops_early)
            self._release()
        self._saving.remove_superseded(self._done_steps, self._eval_losses)  # the last evaluation may change the best
        say("ended", self._ending)
        self._bad_steps.say_totals()
        seconds = time.perf_counter() - started
        self._results.log(self, seconds=seconds, steps=self._done_steps - self.start_step)
        self._answer_held_out(f"at step {self._done_steps}")
        record_end(self.directory, writes=self.writes)

    def _evaluate_again(self) -> Iterator[int]:
        """Repeat the last evaluation of a finished run if it was interrupted.

        Only the loop's body can evaluate, so it takes its last step again. The result of that step is discarded:
        `evaluation_due` reads the checkpoint's weights again.
        """
        if self._lacks_evaluation:
            say("evaluation", f"repeating the interrupted evaluation after step {self.total_steps}")
            self._step, self._logged = self.total_steps, False
            with self._signals:
                yield self.total_steps - 1
            self._lacks_evaluation = False
        if self._lacks_tasks:
            self._run_tasks()

    @property
    def is_training(self) -> bool:
        """Whether the current step counts. False while a finished run repeats its last evaluation."""
        return not self._lacks_evaluation

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

        loss: mean over the step's targets. grad_norm: before clipping; None if it was not computed. more: further values for
        the step's line; None values are left out.
        """
        if self._logged:
            raise RuntimeError("run.log() was called twice in one step; metrics.jsonl has one line per step.")
        self._logged = True
        if not self.is_training:
            self._metrics.further.clear()
            return
        micro_batches = list(micro_batches)
        self._bad_steps.keep(self._step, micro_batches)
        self._metrics.record(
            self._step,
            lr=lr,
            values={"loss": loss, "grad_norm": grad_norm, **more},
            micro_batches=micro_batches,
            skipped=self.optimizer.skipped_steps > self._skipped_before,
        )

    @property
    def trainer_state(self) -> SimpleNamespace:
        """The progress, under the names of transformers' TrainerState. A step is done once it is logged."""
        done = self._step if self._logged else self._done_steps
        return SimpleNamespace(
            global_step=done,
            max_steps=self.total_steps,
            epoch=done / self.steps_per_epoch,
            num_train_epochs=math.ceil(self.total_steps / self.steps_per_epoch),
            is_local_process_zero=True,
            is_world_process_zero=True,
        )

    def log_metric(self, name: str, value: Tensor | float) -> None:
        """Add a value to the next line: of the step, or of the evaluation as `eval_NAME`. The line has the mean of its values."""
        self._metrics.further.setdefault(name, []).append(float(value))

    def evaluation_due(self) -> bool:
        """Whether the loop's body evaluates now: as often as `eval_every` says, and after the last step, which is saved first.
        False if nothing is held out."""
        if self._held_out is None:
            return False
        if not self.is_training and self.checkpoint is not None:
            restore_weights(self.checkpoint, self.model)
            if self._saving.beside is not None:
                restore_beside(self.checkpoint, self._saving.beside)
            restore_random_state(read_random_state(self.checkpoint), self.device)
            return True
        if self._step < self.total_steps:
            return is_due(self.cfg.eval_every, self._step, self.steps_per_epoch)
        if self._logged:
            self._finish_step(stopping=False)
        return True

    def log_evaluation(self, eval_loss: Tensor | float | None, **more: Any) -> None:
        """Write an evaluation's line: `eval_loss` (None if no held-out token has a label), and further numbers or text."""
        self._flush()
        row = self._metrics.write_line(self._step, {"eval_loss": eval_loss, **more})
        self._results.note(row)
        self._eval_losses[self._step] = row["eval_loss"]
        text = "no held-out token has a label" if eval_loss is None else f"held-out loss {number(row['eval_loss'])}"
        if "eval_completion_length" in row:
            reward = row.get("eval_reward")
            text = "no held-out completion got a reward" if reward is None else f"held-out reward {number(reward)}"
            text += f", completion length {number(row['eval_completion_length'])}"
        if (right := row.get("eval_rewards/accuracies")) is not None:
            text += f", {right:.1%} of pairs right"
        if (right := row.get("eval_accuracy")) is not None:
            text += f", {right:.1%} of texts right, macro-F1 {row['eval_macro_f1']:.3f}"
        say("evaluation", f"{f'after step {self._step}' if self._step else 'before training'}: {text}")

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Show a few of the model's completions to the loggers. All rows have the same fields."""
        if self._metrics.loggers is not None:
            self._metrics.loggers.write_samples(self._step, rows)

    def held_out(self) -> Iterator[Batch]:
        """This rank's held-out batches, for an evaluation. On SIGINT or SIGTERM, save the current step and raise SystemExit.

        Log the step before the evaluation, so that all of it is saved.
        """
        held_out: Any = () if self._held_out is None else self._held_out
        if not hasattr(held_out, "__getitem__"):
            held_out = list(held_out)
        for batch, _ in self.ranks.share(held_out):
            if self._logged and (received := self._signal_to_stop(self._signals)) is not None:
                again = "the next start repeats it" if self._step == self.total_steps else "it is not repeated"
                say("evaluation", f"after step {self._step}: interrupted; {again}")
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
        ending = stopping or done == self.total_steps or self._stops_early
        # Rank 0's clock decides whether a save is due; a signal may come to any rank.
        due = self.ranks.rank == 0 and self._saving.is_due(done)
        saving = ending or any(self.ranks.highest(self._signals.take_save_request(), due))
        if saving or done % self.cfg.log_every == 0:
            self._flush()
        self._saving.writer.check()
        if self._bad_steps.too_many:
            self._save(wait=True)  # raises if the weights are not finite
            raise TrainingFailed(self._bad_steps.report(self.checkpoint))
        if saving:
            self._save(wait=ending)

    def _flush(self) -> None:
        self._metrics.take_highest_peaks(self.ranks.highest)
        rows = self._metrics.flush()
        for row in rows:
            self._results.add(row)
        if rows and self._progress is not None:
            self._progress.update(rows[-1])
        for row in rows:
            self._bad_steps.look_at(row, loss_scale=self.optimizer.scaler.value)

    @property
    def _stops_early(self) -> bool:
        """Whether the last `stop_after_evals` evaluations all missed the lowest held-out loss."""
        patience, losses = self.cfg.stop_after_evals, list(self._eval_losses.values())
        return bool(losses) and 0 < patience < len(losses) - losses.index(self._lowest_eval_loss)

    @property
    def _lowest_eval_loss(self) -> float | None:
        return min((loss for loss in self._eval_losses.values() if loss is not None), default=None)

    def _signal_to_stop(self, signals: StopSignals) -> int | None:
        """The signal that reached any rank."""
        return self.ranks.highest(signals.received or 0)[0] or None

    def _save_complete_steps(self) -> None:
        """Save the steps before the interrupted one, or that one too if it was logged.

        Between a step's first update and its log the weights belong to no step, so nothing is saved. An error here is only
        logged, because the loop's own error is on its way.
        """
        optimizer, begun, newest = self.optimizer, self._begun, self._saving.newest_or_none
        if self.ranks.size > 1:  # the other ranks are busy, and a save takes all of them
            say("not saved", f"step {self._step} failed on rank {self.ranks.rank}; {newest}")
            return
        try:
            if self._logged:
                self._finish_step(stopping=True)
            elif begun is None or not optimizer.is_whole or begun.num_updates != self._saving.num_updates:
                say("not saved", f"step {self._step} was interrupted during its update; {newest}")
            elif self._done_steps > self._saving.saved_steps:
                optimizer.zero_grad()  # frees memory for the save
                self._flush()
                self._save(wait=True, place=begun)
        except Exception as error:
            say("not saved", f"{type(error).__name__}: {error}")

    def _save(self, *, wait: bool, place: Place | None = None) -> None:
        """Save the finished steps, at the run's place now or an earlier `place`; in the background if allowed, unless `wait`."""
        self._metrics.sync_to_disk()
        facts = {"total_steps": self.total_steps, "base_fingerprint": self._base_fingerprint}
        self._saving.save(self._done_steps, facts, self._bad_steps, self._eval_losses, wait=wait, place=place)

    def _answer_held_out(self, when: str) -> None:
        """Have the model answer held-out questions, if `eval_answers` asks for it."""
        if self.cfg.eval_answers:
            model, cfg = cast(Decoder, self.model), self.cfg
            say_answers(when, model, self.tokenizer, self._held_out, cfg.eval_answers, pattern=cfg.eval_pattern)

    def _check_tasks(self) -> None:
        """Raise ValueError now, rather than after an hour, if `eval_tasks` cannot run."""
        if self.ranks.size > 1:
            raise ValueError(
                f"eval_tasks needs one process, and there are {self.ranks.size}. Remove it, and use leanft run evaluate after "
                "training."
            )
        if not isinstance(self.model, Decoder) or self.model.config.scores:
            raise ValueError("eval_tasks needs a language model. Remove it.")
        find_tasks(self.cfg.eval_tasks)

    def _run_tasks(self) -> None:
        """Run `eval_tasks`, without an effect on the rest of the run."""
        cfg = self.cfg
        if not cfg.eval_tasks:
            return
        model, random_state = cast(Decoder, self.model), capture_random_state(self.device)
        options = {"limit": cfg.eval_tasks_limit, "seed": cfg.seed, "tokens_at_a_time": cfg.pass_tokens}
        found = run_tasks(model, self.tokenizer, cfg.eval_tasks, **options)
        restore_random_state(random_state, self.device)
        self._flush()
        row = {f"eval_{task}/{name}": value for task, values in found.items() for name, value in values.items()}
        self._metrics.write_line(self._done_steps, row)
        say("tasks", f"after step {self._done_steps}: {', '.join(f'{k[5:]} {number(v)}' for k, v in row.items())}")

    # Ending -------------------------------------------------------------------------------------------------------

    def _stop(self, exit_code: int) -> None:
        say("stopped", f"after step {self._done_steps} of {self.total_steps}; all steps are saved. To resume, run:")
        say("", command_to_continue(self.cfg))
        raise SystemExit(exit_code)

    @property
    def _ending(self) -> str:
        """How the run ended."""
        if not self._stops_early:
            return f"{counted(self.total_steps, 'steps')} done, limited by {self.limits}"
        step = next(step for step, loss in self._eval_losses.items() if loss == self._lowest_eval_loss)
        return (
            f"stopped early, after step {self._done_steps}: the held-out loss has not been below "
            f"{number(self._lowest_eval_loss)} since step {step} (stop_after_evals={self.cfg.stop_after_evals})"
        )
