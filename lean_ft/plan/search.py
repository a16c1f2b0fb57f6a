"""Search for the fastest settings that fit a memory budget.

Only settings that leave the training the same are varied: how activations, gradients and the loss are kept, what is in
host memory, and the split of a step's rows into micro-batches. Two settings change rounding: 8-bit moments for AdamW,
and the output weight's gradient summed in the weight's dtype. Both are listed in the overrides. If memory is left,
larger micro-batches are tried; those that make a step of more rows, which is another training, are listed apart.

Techniques form a ladder from the fastest to the smallest. Each rung takes less memory than the one before, so for each
kind of optimizer state bisection finds the first rung that fits with at most three rehearsals. With a smaller state,
only faster rungs are tried, and that rung.

Many devices also have layouts: copies or shards of the model, a gathered or sharded vocabulary. They are ordered by
what they send. A layout is skipped after one rehearsal if its smallest settings do not fit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from lean_ft.data.objective import objective_of
from lean_ft.plan.devices import ONE_DEVICE, Device, Machines
from lean_ft.plan.known_plans import known_or_new
from lean_ft.plan.result import Rehearsal
from lean_ft.settings import DataConfig, LoRAConfig, OptimizerConfig, RecipeConfig, RewardLossConfig, Settings
from lean_ft.settings.conflicts import check_conflicts
from lean_ft.system.catalog import load_recipe, recipes

Overrides = dict[str, Any]

_CHECKPOINTING = "memory.activation_checkpointing"
# Settings that save memory and take time, off.
_OFF: Overrides = {
    "memory.activation_offload": False,
    "memory.tied_gradient": "fused",
    "memory.frozen_embeddings": "device",
    "memory.experts": "device",
    "memory.tile_mlp": 0,
}
_LARGEST_RAISE = 8  # times the given batch_size


@dataclass(frozen=True)
class Candidate:
    """Overrides of the user's settings, and the rehearsal with them."""

    overrides: Overrides
    rehearsal: Rehearsal

    @property
    def peak_bytes(self) -> int:
        return self.rehearsal.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """Memory that the device needs: on a GPU more than the peak."""
        return self.rehearsal.reserved_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.rehearsal.tokens_per_second

    @property
    def command_line(self) -> str:
        """The overrides as arguments of `leanft run`."""
        return _command_line(self.overrides)


@dataclass(frozen=True)
class Search:
    """The candidates that were rehearsed."""

    fitting: list[Candidate]  # the fastest first; of equally fast ones, the unchanged settings
    more_rows: list[Candidate]  # fitting too, with more rows per step, in the same order
    too_large: list[Candidate]  # the smallest first
    refused: dict[str, str]  # overrides -> the recipe's error


class _Rehearsals:
    """Rehearses each setting once."""

    def __init__(
        self,
        recipe: ModuleType,
        cfg: RecipeConfig,
        device: Device,
        progress: Callable[[str], None],
        machines: Machines = ONE_DEVICE,
    ) -> None:
        self.recipe, self.cfg, self.device, self.progress, self.machines = recipe, cfg, device, progress, machines
        self.found: dict[str, Candidate] = {}
        self.refused: dict[str, str] = {}

    def of(self, wanted: Overrides) -> Candidate | None:
        """The candidate with the settings `wanted`; None if the recipe refuses them."""
        overrides = {key: value for key, value in wanted.items() if attrgetter(key)(self.cfg) != value}
        name = str(overrides)
        if name not in self.found and name not in self.refused:
            self.progress(_command_line(overrides) or "the given settings")
            try:
                rehearsal = known_or_new(self.recipe, with_overrides(self.cfg, overrides), self.device, self.machines)
                self.found[name] = Candidate(overrides, rehearsal)
            except ValueError as error:
                self.refused[name] = str(error)
        return self.found.get(name)

    def first_that_fits(self, rungs: list[Overrides], budget_bytes: int) -> int:
        """Bisect `rungs`, ordered from the most memory to the least. Returns their number if none fits."""
        first, beyond = 0, len(rungs)
        while first < beyond:
            middle = (first + beyond) // 2
            candidate = self.of(rungs[middle])
            if candidate is not None and candidate.reserved_bytes <= budget_bytes:
                beyond = middle
            else:
                first = middle + 1
        return first

    def result(self, budget_bytes: int) -> Search:
        """What was rehearsed so far."""
        found = sorted(self.found.values(), key=lambda candidate: candidate.reserved_bytes)
        fitting = [candidate for candidate in found if candidate.reserved_bytes <= budget_bytes]
        ranked = sorted(fitting, key=lambda c: (-c.tokens_per_second, bool(c.overrides), c.reserved_bytes))
        rows = _rows_per_step(self.cfg)
        has_more = [_rows_per_step(with_overrides(self.cfg, candidate.overrides)) > rows for candidate in ranked]
        return Search(
            [candidate for candidate, more in zip(ranked, has_more, strict=True) if not more],
            [candidate for candidate, more in zip(ranked, has_more, strict=True) if more],
            [candidate for candidate in found if candidate.reserved_bytes > budget_bytes],
            self.refused,
        )


def search(
    recipe: ModuleType,
    cfg: RecipeConfig,
    device: Device,
    budget_bytes: int,
    progress: Callable[[str], None] = lambda settings: None,
    own: Rehearsal | None = None,
    machines: Machines = ONE_DEVICE,
) -> Search:
    """Rehearse variations of `cfg`, and compare their reserved memory with `budget_bytes` of each device.

    `own` is the rehearsal of `cfg` itself, if there is one.
    """
    rehearsals = _Rehearsals(recipe, cfg, device, progress, machines)
    if own is not None:
        rehearsals.found[str({})] = Candidate({}, own)

    def fits(candidate: Candidate | None) -> bool:
        return candidate is not None and candidate.reserved_bytes <= budget_bytes

    is_alone = machines.num_devices == 1
    all_states, ladder = _states(cfg, device, is_alone), _ladder(cfg, device, is_alone)
    for layout in _layouts(machines):
        if not is_alone and not fits(rehearsals.of({**ladder[-1], **all_states[-1], **layout})):
            continue
        first = len(ladder)
        for states in all_states:
            rungs = [{**rung, **states, **layout} for rung in ladder]
            first = rehearsals.first_that_fits(rungs[:first], budget_bytes)  # no slower rung than with a larger state
            if first < len(rungs) and fits(rehearsals.of(rungs[first])):
                for chunk in _larger_chunks(cfg):
                    if not fits(rehearsals.of({**rungs[first], **chunk})):
                        break
    if not any(map(fits, rehearsals.found.values())) and rehearsals.found and cfg.batch_size > 1:
        leanest = min(rehearsals.found.values(), key=lambda candidate: candidate.reserved_bytes)
        for batch in _smaller_batches(cfg):
            if fits(rehearsals.of(leanest.overrides | batch)):
                break
    if compares_steps(cfg) and not fits(rehearsals.of({**ladder[0], **all_states[0]})):
        for batch in _smaller_batches(cfg):  # a second forward pass, as checkpointing has
            if fits(rehearsals.of({**ladder[0], **all_states[0], **batch})):
                break
    if fitting := rehearsals.result(budget_bytes).fitting:
        for batch in _larger_batches(with_overrides(cfg, fitting[0].overrides)):
            if not fits(rehearsals.of(fitting[0].overrides | batch)):
                break
    return rehearsals.result(budget_bytes)


def search_adapters(
    recipe: ModuleType,
    cfg: RecipeConfig,
    device: Device,
    budget_bytes: int,
    progress: Callable[[str], None] = lambda settings: None,
    machines: Machines = ONE_DEVICE,
) -> dict[str, Search]:
    """Rehearse the recipe with LoRA and with QLoRA: as given, and if that does not fit, with techniques that save
    memory.

    Keys are the recipe with the overrides that turn the adapter on. full_finetune_single_device becomes finetune, which
    does the same with an adapter. Empty for other recipes without `lora` settings, and for settings with an adapter.
    """
    if Path(recipe.__file__ or "") == recipes()["full_finetune_single_device"]:
        recipe = load_recipe(recipes()["finetune"])
        cfg = recipe.Config(**dict(cfg))
    if getattr(cfg, "lora", cfg) is not None:
        return {}
    groups = {name: group for name, group in cfg if isinstance(group, Settings)}
    needed = {f"{name}.{key}": value for name, group in groups.items() for key, value in group.for_adapter().items()}
    cfg, searches = with_overrides(cfg, needed), dict[str, Search]()
    for quantize in ("none", "nf4"):
        lora = LoRAConfig.model_validate({"quantize": quantize})
        adapter = {"lora.rank": lora.rank, **({"lora.quantize": quantize} if quantize != "none" else {}), **needed}
        with_adapter, command = cfg.model_copy(update={"lora": lora}), _command_line(adapter)
        rehearsals = _Rehearsals(recipe, with_adapter, device, _after(f"{command}: ", progress), machines)
        unchanged = rehearsals.of({})
        if unchanged is not None and unchanged.reserved_bytes > budget_bytes:
            rehearsals.first_that_fits(_ladder(rehearsals.cfg, device, machines.num_devices == 1), budget_bytes)
        searches[f"{Path(recipe.__file__ or '').stem} {command}"] = rehearsals.result(budget_bytes)
    return searches


def _after(prefix: str, progress: Callable[[str], None]) -> Callable[[str], None]:
    return lambda settings: progress(prefix + settings)


def with_overrides(cfg: RecipeConfig, overrides: Overrides) -> RecipeConfig:
    """The settings with `group.name` keys replaced. Raises ValueError if they contradict each other."""
    updates: dict[str, Any] = {}
    for key, value in overrides.items():
        group, _, name = key.rpartition(".")
        if not group:
            updates[name] = value
        else:
            own: BaseModel = updates.get(group, getattr(cfg, group))
            updates[group] = own.model_copy(update={name: value})
    changed = cfg.model_copy(update=updates)
    check_conflicts(changed)  # `model_copy` does not validate
    return changed


def _layouts(machines: Machines) -> list[Overrides]:
    """Layouts of the model, from the least communication to the least memory: a copy per device, a sharded copy per
    machine, one sharded copy; sharded copies with the vocabulary gathered and sharded."""
    if machines.num_devices == 1:
        return [{}]
    copies = dict.fromkeys((machines.num_devices, machines.count, 1))
    return [
        {"parallel.replicate": number, "parallel.shard": None, "parallel.vocabulary": vocabulary}
        for number in copies
        for vocabulary in (("gathered", "cut") if number < machines.num_devices else ("gathered",))
    ]


def _has_no_logits(cfg: RecipeConfig) -> bool:
    """Whether the settings of the logits' memory do not apply: a reward model has none."""
    return cfg.group(RewardLossConfig) is not None


def _ladder(cfg: RecipeConfig, device: Device, is_alone: bool = True) -> list[Overrides]:
    """Complete settings for activations, gradients and the loss, from the fastest to the smallest."""
    given = {key: attrgetter(key)(cfg) for key in _OFF}
    off = {key: value for key, value in _OFF.items() if given[key] not in (value, "separate")}
    always: Overrides = off if cfg.clip_grad_norm is not None else {"optimizer.in_backward": True} | off
    rungs: list[Overrides] = [
        {_CHECKPOINTING: "none"},
        {_CHECKPOINTING: "every_n"},
        {_CHECKPOINTING: "selective"},
        {_CHECKPOINTING: "full"},
        lean := {
            _CHECKPOINTING: "full",
            **(
                {}
                if _has_no_logits(cfg)
                else {"memory.loss_accumulation_dtype": "weight", "memory.loss_chunk_tokens": 1024}
            ),
        },
    ]
    if is_alone and not device.is_cpu:  # not supported on several devices
        trains_embeddings = cfg.group(LoRAConfig) is None
        away = {"memory.tied_gradient" if trains_embeddings else "memory.frozen_embeddings": "host"}
        rungs += [lean := {**lean, "memory.activation_offload": True}, {**lean, **away}]
    rungs += [{**rungs[-1], **{key: given[key] for key in off}}] if off else []
    return [{**always, **rung} for rung in rungs]


def _states(cfg: RecipeConfig, device: Device, is_alone: bool = True) -> list[Overrides]:
    """Settings for the optimizer's state: in the device's memory if it is not, unchanged, then smaller."""
    streams, optimizer = is_alone and not device.is_cpu, cfg.needed(OptimizerConfig)
    if (rule := optimizer.name) == "paged_adamw_8bit":
        return [{"optimizer.name": "adamw_8bit"}, {}]
    on_device: list[Overrides] = [] if optimizer.state == "device" else [{"optimizer.state": "device"}]
    return on_device + _smaller_states(rule, streams)


def _smaller_states(rule: str, streams: bool) -> list[Overrides]:
    if rule != "adamw":
        return [{}] if not streams or rule == "sgd" else [{}, {"optimizer.state": "streamed"}]
    lean: Overrides = {"optimizer.name": "adamw_8bit"}
    return [{}, lean] if not streams else [{}, lean, {**lean, "optimizer.state": "streamed"}]


def _larger_chunks(cfg: RecipeConfig) -> Iterator[Overrides]:
    """Larger chunks of the loss, which sum the output weight's gradient less often, up to the number of tokens."""
    for tokens in () if _has_no_logits(cfg) else (8192, 32768):
        if tokens < cfg.batch_size * (cfg.row_tokens or 0) * 2:
            yield {"memory.loss_chunk_tokens": tokens}


def _smaller_batches(cfg: RecipeConfig) -> Iterator[Overrides]:
    """The same rows per step in more micro-batches."""
    rows = cfg.batch_size * cfg.gradient_accumulation_steps
    for batch_size in range(cfg.batch_size // 2, 0, -1):
        if rows % batch_size == 0 and math.log2(batch_size).is_integer():
            yield {"batch_size": batch_size, "gradient_accumulation_steps": rows // batch_size}


def compares_steps(cfg: RecipeConfig) -> bool:
    """Whether the loss compares all rows of a step. More of them are then another loss."""
    data = cfg.group(DataConfig)
    return data is not None and data.batch_tokens is None and objective_of(data).batch_type.compares_steps


def _larger_batches(cfg: RecipeConfig) -> Iterator[Overrides]:
    """Micro-batches of 2, 4 and 8 times the rows: fewer of them per step as long as that is possible, then more rows
    per step. If the loss compares all rows of a step: of any size that keeps their number."""
    data = cfg.group(DataConfig)
    if compares_steps(cfg):
        rows, batch_size = _rows_per_step(cfg), cfg.batch_size * 2
        while rows % batch_size == 0:
            yield {"batch_size": batch_size, "gradient_accumulation_steps": rows // batch_size}
            batch_size *= 2
        return
    if data is not None and data.batch_tokens is not None:  # it sets the size of a batch
        return
    times, number = 2, cfg.gradient_accumulation_steps
    while times <= _LARGEST_RAISE:
        number = number // 2 if number % 2 == 0 else number
        yield {"batch_size": cfg.batch_size * times, "gradient_accumulation_steps": number}
        times *= 2


def _rows_per_step(cfg: RecipeConfig) -> int:
    return cfg.batch_size * cfg.gradient_accumulation_steps


def _command_line(overrides: Overrides) -> str:
    return " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in overrides.items())
