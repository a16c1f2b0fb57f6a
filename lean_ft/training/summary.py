"""What a run tells about itself when it starts and when it ends."""

import os
import shlex
import sys
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from lean_ft.losses import loss_chunk_tokens
from lean_ft.models import Decoder
from lean_ft.models.config_json import dropouts
from lean_ft.optim import num_warmup_steps
from lean_ft.peft import NF4Linear
from lean_ft.settings import (
    DataConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    RecipeConfig,
    RowsConfig,
    ScheduleConfig,
)
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.settings.text import dotted
from lean_ft.system.launch import COMMAND_VARIABLE
from lean_ft.system.log import say
from lean_ft.system.shards import whole_numel
from lean_ft.system.units import duration, gibibytes, number
from lean_ft.training.metrics import DIVERGED_STEPS, Row, has_diverged

if TYPE_CHECKING:
    from lean_ft.training.run import Run


@dataclass
class Totals:
    """Sums over the steps of this start, kept for the summary."""

    tokens: int = 0
    target_tokens: int = 0
    step_seconds: float = 0.0
    peak_memory_bytes: int = 0
    rss_growth_bytes: int | None = None
    first_loss: float | None = None  # of the whole run, if metrics.jsonl still has its first line
    first_step: int = 1  # that `first_loss` belongs to
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=DIVERGED_STEPS))  # that are finite
    last_loss: float | None = None
    eval_loss: float | None = None

    def add(self, row: Row) -> None:
        self.tokens += row["tokens"]
        self.target_tokens += row["target_tokens"]
        self.step_seconds += row["step_seconds"]
        self.peak_memory_bytes = max(self.peak_memory_bytes, row["peak_memory_bytes"])
        self.rss_growth_bytes = row["rss_growth_bytes"]
        if row["target_tokens"]:
            self.last_loss = row["loss"]
            if self.first_loss is None:
                self.first_loss, self.first_step = row["loss"], row["step"]
            if row["loss"] is not None and "reward" not in row:  # the loss of a policy is about 0
                self.last_losses.append(row["loss"])


def say_start(run: "Run") -> None:
    """A line each for the ranks, the model, the data, the optimizer, the memory settings and the length of the run."""
    cfg, ranks = run.cfg, run.ranks
    if ranks.size > 1:
        copies = ranks.size // ranks.num_shards
        cut = f"the model cut over {ranks.num_shards}" if ranks.num_shards > 1 else "a copy of the model on each"
        cut += f", {copies} copies" if 1 < copies < ranks.size else ""
        if (parallel := cfg.group(ParallelConfig)) is not None:
            shared = {"context": "tokens", "tensor": "heads and features", "experts": "experts"}
            cut += "".join(f", {what} over {n}" for name, what in shared.items() if (n := getattr(parallel, name)) > 1)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        again = f"; started again, for the {restarts}. time" if restarts else ""
        say("ranks", f"{ranks.size} processes, {cut}; the others write to rank_*.log in output_dir{again}")
    say("model", describe_model(run.model))
    say("data", str(run.batches.report))
    if (optimizer := cfg.group(OptimizerConfig)) is not None:
        in_backward = ", stepping in backward" if optimizer.in_backward else ""
        place = {"device": "", "paged": " of managed memory", "streamed": " in pinned host memory"}[optimizer.state]
        state = f"{gibibytes(run.optimizer.state_bytes)}{place}"
        schedule = cfg.group(ScheduleConfig)
        warmup_steps = 0 if schedule is None else num_warmup_steps(schedule, run.total_steps)
        warmup = f" after {warmup_steps} steps of warm-up from 0" if warmup_steps else ""
        say("optimizer", f"{optimizer.name}, lr {optimizer.lr:g}{warmup}, state {state}{in_backward}")
        if warmup_steps >= run.total_steps:
            highest = optimizer.lr * (run.total_steps - 1) / warmup_steps
            say(
                "WARNING",
                f"the whole run is warm-up: of {warmup_steps} steps it makes {run.total_steps}, so the learning rate never "
                f"exceeds {highest:g}. Shorten it (schedule.warmup_ratio=0.1), or train longer.",
            )
    if (memory := cfg.group(MemoryConfig)) is not None:
        tokens = loss_chunk_tokens(run.model, memory.loss_chunk_tokens)
        chunk = f"{tokens} tokens at a time" if tokens else "all tokens at once"
        compiled = "; compiled" if cfg.compile else ""
        say("memory", f"activation checkpointing {memory.activation_checkpointing}; loss on {chunk}{compiled}")
    batch = f"{cfg.batch_size} sequences"
    if cfg.gradient_accumulation_steps > 1:
        batch = f"{cfg.gradient_accumulation_steps} x {batch}"
    begun = f", {run.start_step} of them done" if run.start_step else ""
    say("steps", f"{run.total_steps}{begun}; {run.steps_per_epoch} an epoch, {batch} a step")
    say("output", f"{run.directory}; saved {describe_saving(cfg)}")
    for note in run.optimizer.notes:
        say("adjusted", note)


def describe_saving(cfg: RecipeConfig) -> str:
    """`after each epoch and at least every 30 minutes, the last 2 kept`."""
    match cfg.save_every:
        case "auto":
            often = "after each epoch and at least every 30 minutes"
        case "epoch":
            often = "after each epoch"
        case 0:
            return "at the end"
        case int(steps):
            often = f"every {steps} steps" if steps > 1 else "after every step"
        case share:
            often = f"every {share:g} of an epoch"
    return often if cfg.most_kept is None else f"{often}, the last {cfg.most_kept} kept"


def describe_model(model: nn.Module) -> str:
    """`1,234 parameters, all trained, 4.8 KiB in bfloat16, on cpu`."""
    parameters = list(model.parameters())
    quantized = [module for module in model.modules() if isinstance(module, NF4Linear)]
    count = sum(whole_numel(p) for p in parameters) + sum(q.in_features * q.out_features for q in quantized)
    trained = sum(whole_numel(p) for p in parameters if p.requires_grad)
    share = "all trained" if trained == count else f"{trained:,} ({trained / count:.2%}) trained"
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters}) + ["nf4"] * bool(quantized)
    weights = sum(whole_numel(p) * p.element_size() for p in parameters) + sum(q.num_bytes for q in quantized)
    text = f"{count:,} parameters, {share}, {gibibytes(weights)} in {', '.join(dtypes)}, on {parameters[0].device}"
    if isinstance(model, Decoder) and model.source.part_of:
        text += f"; the language model of a {model.source.part_of}, without what reads images"
    if isinstance(model, Decoder) and model.source.quantization:
        text += f"; its folder has them in {model.source.quantization['quant_method']}, what is saved is in {dtypes[0]}"
    if isinstance(model, Decoder) and (ignored := dropouts(model.source.config)):
        text += f"; without dropout ({', '.join(ignored)} of config.json)"
    return text


def say_end(run: "Run", totals: Totals, *, seconds: float, steps: int) -> None:
    """A line each for rows left out, speed, memory, time and the next commands, and the loss last."""
    if (left_out := run.batches.report.left_out) is not None:
        say("data", left_out)
    if totals.step_seconds > 0:
        speed = totals.tokens / totals.step_seconds
        target_speed = totals.target_tokens / totals.step_seconds
        say("speed", f"{speed:,.0f} tokens a second, {target_speed:,.0f} of them targets")
    kind = "resident" if run.device.type == "cpu" else "allocated"
    growth = ""
    if (grown := totals.rss_growth_bytes) is not None:
        growth = f"; resident {'+-'[grown < 0]}{gibibytes(abs(grown))} since step 10"
    say("memory", f"{gibibytes(totals.peak_memory_bytes)} {kind} at the peak{growth}")
    say("time", f"{duration(seconds)} for {steps} steps, with evaluations and checkpoints")
    if run.checkpoint is not None:
        say("checkpoint", str(run.checkpoint))
        say("next", shlex.join(["leanft", *_command_that_tries(run)]))
        needs = "" if find_spec("matplotlib") else ": pip install 'lean-ft[plots]'"
        say("", shlex.join(["leanft", "plot", str(run.directory)]) + f"   # its curves{needs}")
    evaluation = "" if totals.eval_loss is None else f"; held-out {number(totals.eval_loss)}"
    first = "the first step" if totals.first_step == 1 else f"step {totals.first_step}"
    say("loss", f"{number(totals.first_loss)} at {first}, {number(totals.last_loss)} at the last{evaluation}")
    if has_diverged(totals.first_loss, totals.last_losses):
        say(
            "WARNING",
            f"the run diverged: its loss ended far above {number(totals.first_loss)}, where it began. Do not use this model. "
            "Try a lower optimizer.lr, a warm-up (schedule.warmup_ratio=0.1) or clip_grad_norm=1.0.",
        )


def _command_that_tries(run: "Run") -> list[str]:
    """The arguments of the command that tries the trained model: a chat, a text, or the scores of the run's own rows."""
    if not (isinstance(run.model, Decoder) and run.model.config.scores):
        chats = run.tokenizer.chat_template is not None
        return ["chat", str(run.checkpoint)] if chats else ["generate", str(run.checkpoint), "prompt=Hello"]
    data = run.cfg.group(DataConfig)
    assert data is not None
    fields = set(RowsConfig.model_fields) - {"validation_fraction"}
    rows = data.model_dump(mode="json", include=fields, exclude_defaults=True)
    source, held_out = rows.pop("source"), rows.pop("validation_source", None)
    settings = [f"data.{key}={to_yaml(value, flow=True)}" for key, value in dotted(rows)]
    return ["score", str(run.checkpoint), to_yaml(held_out or source, flow=True), *settings]


def command_to_continue(resume: str) -> str:
    """The command that goes on with this run: the one that started it, which resumes by itself unless told not to.
    In a notebook or at Python's prompt that is no command."""
    if COMMAND_VARIABLE in os.environ:  # of all processes, of which this is one
        program, *arguments = shlex.split(os.environ[COMMAND_VARIABLE])
    else:
        program, *arguments = sys.argv
    if Path(program).name in ("", "-", "-c", "ipykernel_launcher.py"):
        return "the same call again" if resume == "auto" else "the same call again, with resume='auto'"
    if resume != "auto":
        arguments = [a for a in arguments if not a.startswith("resume=")] + ["resume=auto"]
    # `python -m lean_ft` too; a script of the user's may well lie in a checkout that is called lean_ft.
    is_leanft = Path(program).name == "leanft" or Path(program).parts[-2:] == ("lean_ft", "__main__.py")
    return shlex.join((["leanft"] if is_leanft else ["python", program]) + arguments)
