"""The memory estimate before a run loads weights.

If an upper bound from the shapes is less than half of the free memory, nothing is rehearsed. Otherwise, if rows are not
packed to one length, the data are prepared first, because the longest row may be far below `data.max_length`. The run
then takes the prepared data from the cache.

The rehearsal runs in a fresh process, so that the tracer and the compiler take no memory of the run, and side effects
of a recipe do not reach it. The process gets the recipe's path, the settings and the device.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lean_ft.data.objective import objective_of
from lean_ft.data.prepare import prepare_batches
from lean_ft.models import Decoder, empty_model
from lean_ft.models.vision.tower import VisionTower
from lean_ft.plan.devices import CUDA_CONTEXT_BYTES, Device, choose_device
from lean_ft.plan.known_plans import known, known_or_new
from lean_ft.plan.result import Rehearsal
from lean_ft.settings import (
    SELF,
    DataConfig,
    DistillConfig,
    GenerationConfig,
    MemoryConfig,
    ModelConfig,
    RecipeConfig,
    TaughtDataConfig,
    models_of,
)
from lean_ft.system.catalog import load_recipe
from lean_ft.system.environment import available_bytes
from lean_ft.system.units import gibibytes
from lean_ft.system.user_functions import PASSED, Passed
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.process_memory import rss_bytes

_FASTER = "memory.activation_checkpointing"
_PATIENCE_SECONDS = 35.0  # an 8B model takes less than 10 s, and the import of torch a few more


@dataclass(frozen=True)
class Outlook:
    """The expected memory of a run, and the free memory."""

    peak_bytes: int
    where: str  # empty if `peak_bytes` is an upper bound
    room_bytes: int | None  # free for this process; None if unknown
    device: str
    pinned_bytes: int = 0  # of host memory
    reserved_bytes: int = 0  # taken by the allocator for the peak, if more
    process_bytes: int = 0  # CPU: of this process and its libraries; metrics count both
    faster_peak_bytes: int | None = None  # without activation checkpointing, if that is faster and fits too

    @property
    def fits(self) -> bool:
        return self.room_bytes is None or max(self.peak_bytes, self.reserved_bytes) <= self.room_bytes

    def __str__(self) -> str:
        process = f" plus {gibibytes(self.process_bytes)} of the process itself" if self.process_bytes else ""
        room = "" if self.room_bytes is None else f"; {gibibytes(self.room_bytes)} free on {self.device}"
        if not self.where:
            return f"peak memory below {gibibytes(self.peak_bytes)}{process}{room}"
        reserved = f" ({gibibytes(self.reserved_bytes)} reserved)" if self.reserved_bytes > self.peak_bytes else ""
        pinned = f"; {gibibytes(self.pinned_bytes)} of pinned host memory" if self.pinned_bytes else ""
        return f"peak memory {gibibytes(self.peak_bytes)}{reserved}{process}, reached in: {self.where}{pinned}{room}"

    @property
    def advice(self) -> str | None:
        """A faster setting that fits too; None if there is none, or most of the memory is used."""
        if self.faster_peak_bytes is None:
            return None
        peak = f"peak memory {'' if self.where else 'below '}{gibibytes(self.faster_peak_bytes)}"
        return (
            f"{_FASTER}=none would be faster and fit too: {peak}. `leanft plan` with the same arguments lists more "
            "settings."
        )


def foresee(recipe: ModuleType, cfg: RecipeConfig) -> Outlook | None:
    """Return the expected memory of a run; None if its settings are refused, which the run itself will report.

    Raises ValueError for unreadable data, and RuntimeError if the rehearsal fails for another reason.
    """
    device, room_bytes = choose_device(None, cfg.device), _room_bytes(cfg.device)
    process_bytes = (rss_bytes() or 0) if device.is_cpu else 0

    def bound_is_enough(cfg: RecipeConfig) -> Outlook | None:
        bound = upper_bound_bytes(cfg)
        enough = bound is not None and (room_bytes is None or bound < room_bytes // 2)
        if bound is None or not enough:
            return None
        faster = bound if _recomputes(cfg) else None  # the bound is of a run that recomputes nothing
        return Outlook(bound, "", room_bytes, device.name, process_bytes=process_bytes, faster_peak_bytes=faster)

    try:
        outlook = bound_is_enough(cfg)
    except ValueError:
        return None
    if outlook is None and (cfg := as_long_as_its_data(settings := cfg)) is not settings:
        outlook = bound_is_enough(cfg)
    if outlook is not None:
        return outlook

    facts = _rehearse_apart(recipe, cfg, device, room_bytes)
    if facts is None:
        return None
    return Outlook(**facts, room_bytes=room_bytes, device=device.name, process_bytes=process_bytes)


def as_long_as_its_data(cfg: RecipeConfig) -> RecipeConfig:
    """The settings with rows that are no longer than the longest of the data, and no more of them, where none are
    packed.

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


def upper_bound_bytes(cfg: RecipeConfig) -> int | None:
    """An upper bound of memory for any settings: everything in float32, nothing recomputed. None for a mixture of
    experts, whose activations do not follow from its shapes, and for a recipe without a model or data. Raises as
    `load_model`."""
    model_settings = cfg.group(ModelConfig)
    distill, data = cfg.group(DistillConfig), cfg.group(TaughtDataConfig)
    if model_settings is None or cfg.row_tokens is None:
        return None
    model = empty_model(model_settings.of_same_rows(model_settings.path), dtype=torch.float32)
    if model.mixture is not None:
        return None
    # Weights, gradients and both moments, and half as much again for workspace.
    bound = 6 * sum(parameter.nbytes for parameter in model.parameters()) + _activation_bytes(
        model, cfg, cfg.row_tokens
    )
    paths = {place: path for place, path in models_of(cfg).items() if place != ("model", "path")}
    if distill is not None and distill.teacher == SELF:
        paths["distill", "teacher"] = model_settings.path
    for (group, _), path in paths.items():  # a teacher: one layer's activations, and its logits
        reads_rows = group == "distill"
        other = empty_model(model_settings.of_same_rows(path) if reads_rows else path, dtype=torch.float32)
        if other.mixture is not None:
            return None
        row_tokens = cfg.row_tokens if data is None or not reads_rows else max(cfg.row_tokens, data.teacher_tokens)
        bound += sum(parameter.nbytes for parameter in other.parameters()) + _activation_bytes(other, cfg, row_tokens)
    generation = cfg.group(GenerationConfig)
    if generation is None:
        return bound
    answers = cfg.batch_size * cfg.gradient_accumulation_steps * generation.steps_per_round
    return bound + model.cache_bytes(answers, cfg.row_tokens) + 4 * 4 * answers * model.config.vocab_size


def _activation_bytes(model: Decoder, cfg: RecipeConfig, row_tokens: int) -> int:
    config = model.config
    features = sum(m.out_features + m.in_features for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    features += (
        config.num_layers * 16 * config.hidden_size * model.model.num_streams
    )  # norms, rotary embeddings, residuals
    data = cfg.group(DataConfig)
    tokens = cfg.batch_size * row_tokens * (1 if data is None else len(data.sides))
    return (
        4 * tokens * (2 * features + 4 * config.vocab_size + (2 * _tower_features(model.vision) if model.vision else 0))
    )


def _tower_features(tower: VisionTower) -> int:
    """Values that a tower keeps for each of its embeddings: of its patches in each layer, and their pixels."""
    config = tower.config
    features = sum(m.out_features + m.in_features for m in tower.modules() if isinstance(m, torch.nn.Linear))
    return config.merge**2 * (features + config.num_layers * 16 * config.hidden_size + 9 * config.patch_size**2)


def _room_bytes(setting: str) -> int | None:
    """Free memory of the device of `device=setting`, without the driver's context."""
    if setting != "cpu" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] - CUDA_CONTEXT_BYTES
    return available_bytes()


def _recomputes(cfg: RecipeConfig) -> bool:
    memory = cfg.group(MemoryConfig)
    return memory is not None and memory.activation_checkpointing != "none"


def _rehearse_apart(
    recipe: ModuleType, cfg: RecipeConfig, device: Device, room_bytes: int | None
) -> dict[str, Any] | None:
    """Rehearse a step in a fresh process without a GPU, unless the plan is known. Return the facts for `Outlook`; None
    if it raises ValueError.

    Raises RuntimeError if it raises another error, dies, or takes too long.
    """
    with suppress(LookupError):
        return _facts(recipe, cfg, device, room_bytes, known)
    question = {
        "recipe": recipe.__file__,
        "settings": cfg.model_dump(mode="json", round_trip=True),
        "device": asdict(device),
        "room_bytes": room_bytes,
        "functions": list(PASSED),
    }
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path),
    }
    # Not multiprocessing: a fork may not use an initialized CUDA, and other start methods run the main module again.
    # A new session keeps a terminal's Ctrl-C for the run.
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer_a_question; answer_a_question()"]
    try:
        process = subprocess.run(
            command,
            input=json.dumps(question).encode(),
            stdout=subprocess.PIPE,
            timeout=_PATIENCE_SECONDS,
            env=environment,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took longer than {_PATIENCE_SECONDS:.0f} s") from None
    if not process.stdout:
        raise RuntimeError("the rehearsal process died")
    answer = json.loads(process.stdout)
    if "failure" in answer:
        raise RuntimeError(answer["failure"])
    return answer["result"]


def answer_a_question() -> None:
    """The main function of the fresh process: read a question as JSON from standard input, write the answer to standard
    output."""
    out = os.dup(1)
    os.dup2(2, 1)  # output of the recipe goes to standard error
    try:
        answer = {"result": _answer(json.load(sys.stdin))}
    except ValueError:
        answer = {"result": None}
    except BaseException as error:
        is_explained = type(error).__name__ == "NotSimulatedError"
        answer = {"failure": f"{error}" if is_explained else traceback.format_exception_only(error)[-1].strip()}
    with os.fdopen(out, "w") as answers:
        json.dump(answer, answers)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    recipe = load_recipe(Path(question["recipe"]))
    PASSED.update(dict.fromkeys(question["functions"], Passed(print)))  # never called
    try:  # validated from JSON text, where strict settings accept text for a path and a list for a tuple
        cfg = recipe.Config.model_validate_json(json.dumps(question["settings"]), strict=True)
    except ValueError as error:
        raise RuntimeError(f"the settings changed on the way to the other process: {error}") from None
    device = question["device"]
    device = Device(**device | {"capability": tuple(device["capability"])})  # JSON has no tuples
    return _facts(recipe, cfg, device, question["room_bytes"], known_or_new)


def _facts(
    recipe: ModuleType, cfg: RecipeConfig, device: Device, room_bytes: int | None, rehearse: Callable[..., Rehearsal]
) -> dict[str, Any]:
    from lean_ft.plan.search import with_overrides

    rehearsal = rehearse(recipe, cfg, device)
    names = ("peak_bytes", "pinned_bytes", "reserved_bytes")
    facts = {"where": rehearsal.peak.where} | {name: getattr(rehearsal, name) for name in names}
    if room_bytes is None or rehearsal.reserved_bytes > room_bytes / 2:
        return facts
    if not _recomputes(cfg) or rehearsal.planning_seconds > _PATIENCE_SECONDS / 4:
        return facts
    try:
        faster = rehearse(recipe, with_overrides(cfg, {_FASTER: "none"}), device)
    except ValueError:  # another setting needs checkpointing
        return facts
    fits = faster.reserved_bytes < 0.9 * room_bytes and faster.step_seconds < rehearsal.step_seconds
    return facts | ({"faster_peak_bytes": faster.peak_bytes} if fits else {})
