"""A run plans itself before it loads weights, and says what would help after it ran out of memory.

The rehearsal runs in a process of its own: the tracer and the compiler that it brings stay out of the run's own
memory, and a recipe that does more than the library calls cannot spoil the run that follows. It is forked, which costs
nothing, unless CUDA has begun to work here: no fork may use it then, and none may go backward after this process did. A
fresh process, which sees no GPU, is then told the recipe's path, the settings and what the device is. Where a bound from
the shapes alone shows that the run takes less than half of what is there, nothing is rehearsed.

Where that bound does not say enough, and rows are not packed to one length, the data are prepared first, as the run would
do next: `data.max_length` may be far from the longest row. They are kept in the cache, from which the run maps them.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lean_ft.data.objective import objective_of
from lean_ft.data.prepare import prepare_batches
from lean_ft.models import Decoder, empty_model
from lean_ft.plan.devices import CUDA_CONTEXT_BYTES, Device, choose_device
from lean_ft.settings import (
    DataConfig,
    GenerationConfig,
    ModelConfig,
    RecipeConfig,
    models_of,
)
from lean_ft.system.catalog import load_recipe
from lean_ft.system.environment import available_bytes
from lean_ft.system.units import gibibytes
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.process_memory import rss_bytes

_PATIENCE_SECONDS = 20.0  # for one rehearsal before a run; an 8 B model takes under 10
_PATIENCE_AFTER_SECONDS = 120.0  # for several, once a run has ended
_START_SECONDS = 15.0  # on top, for a fresh process, which imports torch

_Work = Callable[[ModuleType, RecipeConfig, Device], Any]  # what is done in another process; JSON comes back


@dataclass(frozen=True)
class Outlook:
    """What a run is going to take, and what there is."""

    peak_bytes: int
    where: str  # empty where `peak_bytes` is a bound and not a rehearsal's
    room_bytes: int | None  # what the device has left for this process; None where it does not tell
    device: str
    pinned_bytes: int = 0  # of the host's memory, for what does not stay on the device
    reserved_bytes: int = 0  # what the allocator takes from the device for the peak, where that is more
    process_bytes: int = 0  # on a CPU, what this process and its libraries hold already; the metrics count both

    @property
    def fits(self) -> bool:
        return self.room_bytes is None or max(self.peak_bytes, self.reserved_bytes) <= self.room_bytes

    def __str__(self) -> str:
        room = "" if self.room_bytes is None else f" of the {gibibytes(self.room_bytes)} that {self.device} has free"
        own = f", and the process itself {gibibytes(self.process_bytes)}" if self.process_bytes else ""
        if not self.where:
            return f"takes less than {gibibytes(self.peak_bytes)}{room}{own}"
        pinned = f"; pins {gibibytes(self.pinned_bytes)} of the host's memory" if self.pinned_bytes else ""
        more = f" ({gibibytes(self.reserved_bytes)} reserved)" if self.reserved_bytes > self.peak_bytes else ""
        return f"will take {gibibytes(self.peak_bytes)}{more}{room}, at its highest in: {self.where}{pinned}{own}"


def foresee(recipe: ModuleType, cfg: RecipeConfig) -> Outlook | None:
    """Returns what a run of the recipe will take; None where its settings are refused, as the run is going to say.

    Raises ValueError for data that cannot be read, and RuntimeError where the rehearsal fails for another reason.
    """
    device, room_bytes = choose_device(None, cfg.device), _room_bytes(cfg.device)
    process_bytes = (rss_bytes() or 0) if device.is_cpu else 0

    def bound_is_enough(cfg: RecipeConfig) -> Outlook | None:
        bound = upper_bound_bytes(cfg)
        enough = bound is not None and (room_bytes is None or bound < room_bytes // 2)
        return (
            Outlook(bound, "", room_bytes, device.name, process_bytes=process_bytes)
            if bound is not None and enough
            else None
        )

    try:
        outlook = bound_is_enough(cfg)
    except ValueError:
        return None
    if outlook is None and (cfg := as_long_as_its_data(given := cfg)) is not given:
        outlook = bound_is_enough(cfg)
    if outlook is not None:
        return outlook

    found = _in_child(_peak, recipe, cfg, device, _PATIENCE_SECONDS)
    if found is None:
        return None
    peak_bytes, where, pinned_bytes, reserved_bytes = found
    return Outlook(peak_bytes, where, room_bytes, device.name, pinned_bytes, reserved_bytes, process_bytes)


def _peak(recipe: ModuleType, cfg: RecipeConfig, device: Device) -> list[Any]:
    from lean_ft.plan.rehearsal import rehearse

    rehearsal = rehearse(recipe, cfg, device)
    return [rehearsal.peak_bytes, rehearsal.peak.where, rehearsal.pinned_bytes, rehearsal.reserved_bytes]


def as_long_as_its_data(cfg: RecipeConfig) -> RecipeConfig:
    """The settings with rows that are no longer than the longest of the data, and no more of them, where none are packed.

    Prepares the data, and raises ValueError as that does.
    """
    data, model = cfg.group(DataConfig), cfg.group(ModelConfig)
    if data is None or model is None or data.packs_rows or data.streaming:
        return cfg
    tokenizer, objective = load_tokenizer(model, data.chat_template), objective_of(data)
    batches, _ = prepare_batches(data, tokenizer, cfg.batch_size, cfg.seed, objective.shares_prompts)
    update = objective.fitted(data, batches)
    name = next(name for name, value in cfg if value is data)
    batch_size = min(cfg.batch_size, batches.num_rows)
    return cfg.model_copy(update={name: data.model_copy(update=update), "batch_size": batch_size})


def what_takes_less(recipe: ModuleType, cfg: RecipeConfig) -> str:
    """Returns lines that name settings which take less memory, with the peak of each, the leanest first."""
    device, cfg = choose_device(None, cfg.device), as_long_as_its_data(cfg)
    return _in_child(_lines_of_remedies, recipe, cfg, device, _PATIENCE_AFTER_SECONDS) or ""


def _lines_of_remedies(recipe: ModuleType, cfg: RecipeConfig, device: Device) -> str:
    from lean_ft.plan.search import remedies

    own, found = remedies(recipe, cfg, device)
    if not found:
        return "Every setting that saves memory is in use; a shorter data.max_length or a smaller model takes less."
    width = max(len(candidate.command_line) for candidate in found)
    return "\n".join(
        [f"Predicted peak {gibibytes(own.peak_bytes)}. What takes less, one at a time and the last together:"]
        + [
            f"  {c.command_line:<{width}}  {gibibytes(c.peak_bytes)} ({gibibytes(own.peak_bytes - c.peak_bytes)} less)"
            for c in found
        ]
    )


def planned_step(recipe: ModuleType, cfg: RecipeConfig) -> list[tuple[float, int]] | None:
    """Returns the memory of one planned step: (estimated seconds, bytes) at each change; None for settings that are refused.

    Raises RuntimeError where the rehearsal fails for another reason.
    """
    device, cfg = choose_device(None, cfg.device), as_long_as_its_data(cfg)
    return _in_child(_timeline, recipe, cfg, device, _PATIENCE_AFTER_SECONDS)


def _timeline(recipe: ModuleType, cfg: RecipeConfig, device: Device) -> list[tuple[float, int]]:
    from lean_ft.plan.rehearsal import rehearse

    return [(seconds, sum(alive.values())) for seconds, alive in rehearse(recipe, cfg, device).timeline]


_WORKS: dict[str, _Work] = {work.__name__: work for work in (_peak, _lines_of_remedies, _timeline)}


def upper_bound_bytes(cfg: RecipeConfig) -> int | None:
    """Memory that no setting exceeds: everything in float32, nothing recomputed. None for a mixture of experts, whose
    activations are more than its shapes tell, and for a recipe without a model or data. Raises as `load_model` does."""
    model_settings = getattr(cfg, "model", None)
    if model_settings is None or cfg.row_tokens is None:
        return None
    model = empty_model(model_settings.path, torch.float32)
    if model.mixture is not None:
        return None
    # Weights, gradients, both moments, and half of them again for what a step takes on the side.
    bound = 6 * sum(parameter.nbytes for parameter in model.parameters()) + _activation_bytes(model, cfg)
    for place, path in models_of(cfg).items():
        if place != ("model", "path"):  # a teacher: of one layer's activations, and of its logits beside the student's
            other = empty_model(path, torch.float32)
            if other.mixture is not None:
                return None
            bound += sum(parameter.nbytes for parameter in other.parameters()) + _activation_bytes(other, cfg)
    generation = cfg.group(GenerationConfig)
    if generation is None:
        return bound
    answers = cfg.batch_size * cfg.gradient_accumulation_steps * generation.steps_per_round
    return bound + model.cache_bytes(answers, cfg.row_tokens) + 4 * 4 * answers * model.config.vocab_size


def _activation_bytes(model: Decoder, cfg: Any) -> int:
    config = model.config
    features = sum(m.out_features + m.in_features for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    features += config.num_layers * 16 * config.hidden_size  # norms, rotary embeddings, residuals
    data = cfg.group(DataConfig)
    tokens = cfg.batch_size * cfg.row_tokens * (1 if data is None else len(data.sides))
    return 4 * tokens * (2 * features + 4 * config.vocab_size)


def _room_bytes(setting: str) -> int | None:
    """What is free on the device of `device=setting`, less what the driver takes."""
    if setting != "cpu" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] - CUDA_CONTEXT_BYTES
    return available_bytes()


def _in_child(work: _Work, recipe: ModuleType, cfg: RecipeConfig, device: Device, patience_seconds: float) -> Any:
    """What `work` returns in another process, as JSON has it; None where it raises ValueError.

    Raises RuntimeError where it raises anything else, dies, or takes too long.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
    ask = _forked if can_fork else _fresh
    answer = ask(work, recipe, cfg, device, patience_seconds)
    # Said by torch 2.11 for CUDA, of a process that went backward without any.
    if "Autograd-and-Fork" in answer.get("failure", ""):
        answer = _fresh(work, recipe, cfg, device, patience_seconds)
    if "failure" in answer:
        raise RuntimeError(answer["failure"])
    return answer["result"]


def _forked(
    work: _Work, recipe: ModuleType, cfg: RecipeConfig, device: Device, patience_seconds: float
) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    rehearse = partial(work, recipe, cfg, device)
    process = context.Process(target=lambda: sender.send_bytes(_answer(rehearse)), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(patience_seconds):
            raise RuntimeError(f"it took longer than {patience_seconds:.0f} s")
        return json.loads(receiver.recv_bytes())
    except EOFError:
        raise RuntimeError("the rehearsal's process died") from None
    finally:
        process.kill()
        process.join()


def _fresh(
    work: _Work, recipe: ModuleType, cfg: RecipeConfig, device: Device, patience_seconds: float
) -> dict[str, Any]:
    patience_seconds += _START_SECONDS
    question = {
        "recipe": recipe.__file__,
        "work": work.__name__,
        "settings": cfg.model_dump(mode="json", round_trip=True),
        "device": asdict(device),
    }
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path),
    }
    # Not by multiprocessing, which would run the main module again; and not a terminal's Ctrl-C, which is the run's.
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer_a_question; answer_a_question()"]
    try:
        process = subprocess.run(
            command,
            input=json.dumps(question).encode(),
            stdout=subprocess.PIPE,
            timeout=patience_seconds,
            env=environment,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took longer than {patience_seconds:.0f} s") from None
    if not process.stdout:
        raise RuntimeError("the rehearsal's process died")
    return json.loads(process.stdout)


def answer_a_question() -> None:
    """The other end of a fresh process: a question on standard input, the answer as JSON on standard output."""
    out = os.dup(1)
    os.dup2(2, 1)  # what a recipe prints is no answer
    question = json.load(sys.stdin)

    def ask() -> Any:
        recipe = load_recipe(Path(question["recipe"]))
        try:  # through JSON's text, of which strict settings take text for a path and a list for a tuple
            cfg = recipe.Config.model_validate_json(json.dumps(question["settings"]), strict=True)
        except ValueError as error:
            raise RuntimeError(f"the settings did not arrive as they were: {error}") from None
        device: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in question["device"].items()
        }
        return _WORKS[question["work"]](recipe, cfg, Device(**device))

    with os.fdopen(out, "wb") as answers:
        answers.write(_answer(ask))


def _answer(work: Callable[[], Any]) -> bytes:
    try:
        answer = {"result": work()}
    except ValueError:
        answer = {"result": None}
    except BaseException as error:
        answer = (
            {"failure": f"{error}"}
            if type(error).__name__ == "NotSimulatedError"
            else {"failure": traceback.format_exception_only(error)[-1].strip()}
        )
    return json.dumps(answer).encode()
