"""The log lines at a run's start and end."""

import os
import shlex
from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from lean_ft.losses import loss_chunk_tokens
from lean_ft.models import Decoder
from lean_ft.models.attention.kernels import any_in_blocks, describe_kernels
from lean_ft.models.config_json import dropouts
from lean_ft.models.drafting import drafting_remark
from lean_ft.models.frozen_weight import num_parameters, quantized_weights
from lean_ft.models.vision.tower import NO_TOWER
from lean_ft.optim import first_decay_step, num_warmup_steps
from lean_ft.peft import has_adapter
from lean_ft.peft.targets import describe_targets
from lean_ft.settings import (
    DataConfig,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    ScheduleConfig,
    ScoreLossConfig,
    recipe_name,
)
from lean_ft.system.installation import install_command
from lean_ft.system.log import say
from lean_ft.system.shards import whole_numel
from lean_ft.system.units import counted, duration, gibibytes, number
from lean_ft.tokenizers.media import media_of_run
from lean_ft.training.commands import command_that_tries
from lean_ft.training.metrics import DIVERGED_STEPS, HEADLINES, Row, has_diverged
from lean_ft.training.records import settings_of
from lean_ft.training.view import not_in_files

if TYPE_CHECKING:
    from lean_ft.training.run import Run

FAR = 100  # a rate that many times above or below the usual one is likely a slip
SMALL_MODEL = 5e8  # parameters; smaller models take higher rates


def log_start(run: "Run", held_out: str | None = None) -> None:
    """Log a line each about ranks, model, data, optimizer, memory settings, steps and output.

    held_out: how many held-out rows each source has, if there are several.
    """
    cfg = run.cfg
    if run.ranks.size > 1:
        say("ranks", _describe_ranks(run))
    say("model", describe_model(run.model))
    if isinstance(run.model, Decoder) and run.model.vision is not None and has_adapter(run.model):
        say("adapter", describe_targets(run.model))
    if run.device.type == "cuda" and isinstance(run.model, Decoder):
        dtype = getattr(torch, cfg.needed(ModelConfig).dtype)
        capability = torch.cuda.get_device_capability(run.device)
        say("attention", describe_kernels(run.model, dtype, capability))
        if any_in_blocks(run.model, dtype, capability):
            _warn_of_one_row(cfg.group(DataConfig), cfg.batch_size)
    say("data", str(run.batches.report))
    for use in run.batches.report.sources:
        say("source", str(use))
    if held_out is not None:
        say("held out", held_out)
    if (optimizer := cfg.group(OptimizerConfig)) is not None:
        _log_optimizer(run, optimizer)
    if (memory := cfg.group(MemoryConfig)) is not None:
        chunk = ""
        if cfg.group(ScoreLossConfig) is None:  # else there are no logits
            tokens = loss_chunk_tokens(run.model, memory.loss_chunk_tokens)
            chunk = "; loss computed on " + (f"{tokens:,} tokens at a time" if tokens else "all tokens at once")
        compiled = "; compiled" if cfg.compile else ""
        say("memory", f"activation checkpointing: {memory.activation_checkpointing}{chunk}{compiled}")
    data, unit = cfg.group(DataConfig), run.batches.unit
    batch = counted(cfg.batch_size, "packed rows" if data and data.packs_rows else unit)
    if data and data.batch_tokens is not None:
        batch = f"up to {data.batch_tokens:,} positions"
    if cfg.gradient_accumulation_steps > 1:
        batch = f"{cfg.gradient_accumulation_steps} x {batch}"
    done = f", {run.start_step:,} done" if run.start_step else ""
    pace = f"{run.length.steps_per_epoch:,} per epoch; {batch} per step"
    say("steps", f"{run.total_steps:,}{done}; limited by {run.length.limits}; {pace}")
    kept = "all" if cfg.most_kept is None else cfg.most_kept
    say("output", f"{cfg.output_dir}; save_every={cfg.save_every}; checkpoints kept: {kept}")
    for note in run.optimizer.notes:
        say("adjusted", note)


def _warn_of_one_row(data: DataConfig | None, batch_size: int) -> None:
    """Warn of rows that are longer than they need be: attention in blocks computes each token with all earlier ones of
    its row."""
    if data is not None and data.packing == "padding_free" and batch_size > 1:
        say(
            "WARNING",
            f"data.packing=padding_free makes one row of the {batch_size} documents of a batch, and attention without "
            f"a kernel goes over whole rows, so it takes up to {batch_size} times as long. Set data.packing=bfd or "
            "none.",
        )


def _describe_ranks(run: "Run") -> str:
    """`4 processes; model sharded over 2, 2 copies; the others log to rank_*.log in output_dir`."""
    ranks = run.ranks
    copies = ranks.size // ranks.num_shards
    how = f"model sharded over {ranks.num_shards}" if ranks.num_shards > 1 else "a copy of the model on each"
    how += f", {copies} copies" if 1 < copies < ranks.size else ""
    if (parallel := run.cfg.group(ParallelConfig)) is not None:
        shared = {"context": "tokens", "tensor": "heads and features", "experts": "experts"}
        how += "".join(f", {what} over {n}" for name, what in shared.items() if (n := getattr(parallel, name)) > 1)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    again = f"; restart {restarts}" if restarts else ""
    return f"{ranks.size} processes; {how}; the others log to rank_*.log in output_dir{again}"


def _log_optimizer(run: "Run", optimizer: OptimizerConfig) -> None:
    place = {"device": "", "paged": " in managed memory", "streamed": " in pinned host memory"}[optimizer.state]
    schedule, total_steps = run.cfg.group(ScheduleConfig), run.total_steps
    warmup_steps = 0 if schedule is None else num_warmup_steps(schedule, total_steps)
    warmup = f" after {counted(warmup_steps, 'warm-up steps')}" if warmup_steps else ""
    if schedule is not None and schedule.name == "wsd":
        warmup += f", constant until step {first_decay_step(schedule, total_steps):,}, then decays"
    in_backward = "; updates during backward" if optimizer.in_backward else ""
    state = f"{gibibytes(run.optimizer.state_bytes)} of state{place}"
    has_usual = "lr" not in optimizer.model_fields_set
    trained = "all parameters" if run.cfg.group(LoRAConfig) is None else "an adapter"
    rate = f"lr {optimizer.peak_lr:g}{f' (the default for {trained})' if has_usual else ''}"
    say("optimizer", f"{optimizer.name}; {rate}{warmup}; {state}{in_backward}")
    if note := note_of_rate(run.cfg, num_parameters(run.model)):
        say("note", note)
    if warmup_steps >= total_steps:
        highest = optimizer.peak_lr * (total_steps - 1) / warmup_steps
        highest_rate = f"at or below {highest:g}" if highest else "0"
        say(
            "WARNING",
            f"the whole run is warm-up: it has {counted(total_steps, 'steps')} and "
            f"{counted(warmup_steps, 'warm-up steps')}, so the learning rate stays {highest_rate}. Set a "
            "shorter warm-up (schedule.warmup_ratio=0.1), or train longer.",
        )


def note_of_rate(cfg: RecipeConfig, num_parameters: int) -> str:
    """A note on a learning rate 100 times above or below the usual one, or empty.

    Smaller models take higher rates: the best rate of Adam falls with the width (Yang et al. 2022, arXiv:2203.03466),
    so with the root of the number of parameters. SGD's rates have another scale, and a rate of 0 is on purpose.
    """
    optimizer, usual = cfg.group(OptimizerConfig), cfg.usual_rate
    if optimizer is None or optimizer.name == "sgd" or not optimizer.lr:
        return ""
    highest = usual * max(1.0, (SMALL_MODEL / num_parameters) ** 0.5)
    if usual / FAR < optimizer.lr < highest * FAR:
        return ""
    trained = "all parameters" if cfg.group(LoRAConfig) is None else "an adapter"
    small = f", and a model of this size about {highest:.0e}" if highest > usual else ""
    return (
        f"optimizer.lr={optimizer.lr:g} is far from the usual rate: {recipe_name(cfg)} takes {usual:g} for {trained}"
        f"{small}. Check the number."
    )


class Results:
    """Results of a run for its last log lines. Sums are over the steps of this start."""

    def __init__(self) -> None:
        self._tokens = self._target_tokens = self._peak_memory_bytes = 0
        self._step_seconds = 0.0
        self._rss_growth_bytes: int | None = None
        self._course: dict[str, list[tuple[int, float | None]]] = {}  # first and last step and value, of the whole run
        self._last_losses: deque[float] = deque(maxlen=DIVERGED_STEPS)  # finite ones

    def note(self, row: Row) -> None:
        """Keep the first and the last values of an objective. Values that are not finite are kept too, missing ones are
        not."""
        for name in (*HEADLINES, *(f"eval_{name}" for name in HEADLINES)):
            if row.get(name) is not None or name in row.get("non_finite", {}):
                self._course[name] = [*self._course.get(name, [])[:1], (row["step"], row[name])]

    def add(self, row: Row) -> None:
        """Count a step by its line of metrics."""
        self._tokens += row["tokens"]
        self._target_tokens += row["target_tokens"]
        self._step_seconds += row["step_seconds"]
        self._peak_memory_bytes = max(self._peak_memory_bytes, row["peak_memory_bytes"])
        self._rss_growth_bytes = row["rss_growth_bytes"]
        self.note(row)
        if row["loss"] is not None and "reward" not in row:  # a policy's loss is about 0
            self._last_losses.append(row["loss"])

    def log(self, run: "Run", *, seconds: float, steps: int) -> None:
        """Log a line each about skipped rows, speed, memory, time, the next commands and the objective's metrics."""
        if (left_out := run.batches.report.left_out) is not None:
            say("data", left_out)
        if self._step_seconds > 0:
            speed, targets = (n / self._step_seconds for n in (self._tokens, self._target_tokens))
            say("speed", f"{speed:,.0f} tokens/s, {targets:,.0f} target tokens/s")
        memory_kind = "allocated" if run.device.type != "cpu" else "resident"
        growth = ""
        if (grown := self._rss_growth_bytes) is not None:
            growth = f"; resident {'+-'[grown < 0]}{gibibytes(abs(grown))} since step 10"
        say("memory", f"peak {gibibytes(self._peak_memory_bytes)} {memory_kind}{growth}")
        say("time", f"{duration(seconds)} for {counted(steps, 'steps')}, with evaluations and checkpoints")
        if run.checkpoint is not None:
            scores = isinstance(run.model, Decoder) and bool(run.model.config.num_scores)
            say("checkpoint", str(run.checkpoint))
            settings = settings_of(run.cfg)
            for sentence in not_in_files(settings, media_of_run(run.tokenizer.media, settings)):
                say("elsewhere", sentence)
            needs = "" if find_spec("matplotlib") else f": {install_command('plots')}"
            plot = shlex.join(["leanft", "plot", str(run.cfg.output_dir)]) + f"   # draws the curves{needs}"
            tried = command_that_tries(run.cfg, run.checkpoint, run.tokenizer, scores=scores)
            for i, command in enumerate(filter(None, (tried, plot))):
                say("" if i else "next", command)
        written = {"loss": "none: no step had a trained token"}
        for name, course in self._course.items():
            written[name] = ", ".join(f"{number(value)} at step {step}" for step, value in course)
        if "value_loss" in written:  # the loss of PPO is the value model's and a policy's, which is about 0
            del written["loss"]
        for name, title in HEADLINES.items():
            held_out = f"; held-out {written[f'eval_{name}']}" if f"eval_{name}" in written else ""
            if name in written:
                say(title, written[name] + held_out)
        first_loss = self._course.get("loss", [(0, None)])[0][1]
        if has_diverged(first_loss, self._last_losses):
            say(
                "WARNING",
                f"the run diverged: the loss ended far above its first value, {number(first_loss)}. Do not use this "
                "model. Try a lower optimizer.lr, a warm-up (schedule.warmup_ratio=0.1) or clip_grad_norm=1.0.",
            )


def describe_model(model: nn.Module) -> str:
    """`1,234 parameters, all trained; 4.8 KiB in bfloat16 on cpu`."""
    parameters = list(model.parameters())
    quantized = [weight.frozen for weight in quantized_weights(model).values()]
    count = num_parameters(model)
    trained = sum(whole_numel(p) for p in parameters if p.requires_grad)
    share = "all trained" if trained == count else f"{trained:,} ({trained / count:.2%}) trained"
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters}) + sorted(
        {weight.form.kind for weight in quantized}
    )
    weights = sum(whole_numel(p) * p.element_size() for p in parameters) + sum(weight.nbytes for weight in quantized)
    text = f"{count:,} parameters, {share}; {gibibytes(weights)} in {', '.join(dtypes)} on {parameters[0].device}"
    if not isinstance(model, Decoder):
        return text
    source = model.source
    if source.part_of:
        tower = NO_TOWER if model.vision is None else model.vision.describe()
        text += f"; the language model of {source.part_of}, {tower}"
    if source.quantization:
        method = source.quantization["quant_method"]
        is_kept = {"mxfp4": "mxfp4", "fp8": "float8"}[method] in {weight.form.kind for weight in quantized}
        text += f"; loaded from {method} weights and " + ("kept so" if is_kept else f"saved in {dtypes[0]}")
    if not has_adapter(model) and (drafting := drafting_remark(source)):
        text += f"; {drafting}"
    if ignored := dropouts(source.config):
        text += f"; dropout is ignored ({', '.join(ignored)} in config.json)"
    return text
