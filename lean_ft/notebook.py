"""Functions for notebooks and Python programs: run, plan and evaluate recipes, read metrics and plot curves.

Settings are those of `leanft run`, with groups as dicts, and are validated by the same code. Rows in memory are written
to a file in the cache, named by a hash of its content.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from lean_ft.settings.other_tools import table
from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.system import catalog
from lean_ft.system.before_torch import prepare_torch
from lean_ft.system.units import parse_bytes
from lean_ft.system.user_functions import PASSED, as_factory, as_setting

if TYPE_CHECKING:
    from lean_ft.plan.result import Rehearsal
    from lean_ft.plan.search import Candidate


def run(recipe: str | Path | None = None, config: str | Path | None = None, **settings: object) -> Any:
    """Run a recipe, by name or path, with a preset and settings.

    Returns the run directory of a training recipe (Path). `evaluate` returns its results (dict),
    `quantize` the new folder (Path) and `generate` the texts (list[str]). `chat` returns None, and your own recipe what
    its `main` returns.

    A group of settings is a dict or its pydantic model: `run("finetune", model={"path": "tiny"}, ...)`. Dotted keys
    work too (`**{"model.path": "tiny"}`). The preset may name the recipe. `data.source` and `data.validation_source`
    may be rows in memory: a list of dicts, a generator, a datasets.Dataset or a pandas.DataFrame. A dict with `path` is
    a source, not a row. A setting of the form FILE.py:FUNCTION may be the function itself, an object with `__call__`,
    or its class; `environment` may be a class or a function that makes environments, or an environment, which is copied
    for each completion. TRL's names `reward_funcs` and `environment_factory` are taken for `rewards` and `environment`.
    In a notebook, a bar and a curve show the progress.

    Raises ValueError for an invalid setting, and the errors of the recipe. A run stopped by a signal saves its state
    and raises SystemExit.
    """
    from lean_ft.cli.arguments import load_run
    from lean_ft.cli.run import run_recipe

    prepare_torch()
    name, preset = (None if argument is None else str(argument) for argument in (recipe, config))
    passed_before = PASSED.copy()
    try:
        module, cfg = load_run(name, preset, list(_overrides(settings)), given_by="", runs=True)
        return run_recipe(module, cfg)
    finally:  # the functions of this run may hold models in memory
        PASSED.clear()
        PASSED.update(passed_before)


def evaluate(source: str | Path, /, **settings: object) -> dict[str, Any]:
    """Evaluate a run, a checkpoint or another model with the settings of `leanft run evaluate`: `data`, `tasks`, ...

    Returns `{"answers": {"exact_match", "num_right", "num_questions"}, "tasks": {task: {metric: value}}}`, each if
    asked for; exact_match is a share from 0 to 1. Raises ValueError for an invalid setting, and if there is nothing to
    evaluate.
    """
    return run("evaluate", **{"model.path": source, **settings})


class Plan(NamedTuple):
    """One optimizer step as the planner predicts it, and the settings that fit a budget, the fastest first."""

    step: "Rehearsal"
    """peak_bytes, peak.bytes_by_label, reserved_bytes, step_seconds, tokens_per_second and num_parameters."""
    fitting: "list[Candidate]"
    """peak_bytes, tokens_per_second and `overrides`, which are arguments of `run`."""


def plan_run(
    recipe: str | Path | None = None,
    config: str | Path | None = None,
    *,
    device_name: str | None = None,
    budget: str | None = None,
    **settings: object,
) -> Plan:
    """Predict the memory and the time of a run on one device, as `leanft plan` does, with the arguments of `run`.

    device_name: card to plan for, such as `RTX 4090`; None is this machine's device. budget: amount of memory, such as
    `24GiB`, to search settings for. Needs the model's config.json, and no weights, data or GPU.

    Raises ValueError for an invalid setting or an unknown card, and NotSimulatedError for user code that needs values.
    """
    from lean_ft.cli.arguments import load_run
    from lean_ft.plan.devices import CUDA_CONTEXT_BYTES, choose_device
    from lean_ft.plan.known_plans import known_or_new, todays_cpu
    from lean_ft.plan.search import search

    name, preset = (None if argument is None else str(argument) for argument in (recipe, config))
    module, cfg = load_run(name, preset, list(_overrides(settings)), given_by="", runs=True)
    device = choose_device(device_name, cfg.device)
    device = todays_cpu() if device.is_cpu else device
    step = known_or_new(module, cfg, device)
    if budget is None:
        return Plan(step, [])
    room_bytes = parse_bytes(budget, "budget") - (0 if device.is_cpu else CUDA_CONTEXT_BYTES)
    return Plan(step, search(module, cfg, device, room_bytes, own=step).fitting)


def load_recipe(name_or_path: str | Path) -> ModuleType:
    """Return a recipe as a module with `Config` and `main`; `main(Config(...))` trains.

    Raises ValueError if there is no such recipe, or its file cannot be imported.
    """
    return catalog.load_recipe(catalog.find_recipe(str(name_or_path)))


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl: one dict for each optimizer step and each evaluation, in order.

    Lines of evaluations have `eval_loss` and no `loss`. `pandas.DataFrame(read_metrics(run))` is a table of them.
    Raises ValueError if the directory is no run or has no line yet.
    """
    from lean_ft.training.curves import read_curves

    return read_curves([Path(run)])[0].rows


def plot(runs: str | Path | Sequence[str | Path]) -> Any:
    """Draw the curves of a run, or of several in one picture, as `leanft plot` does; returns a matplotlib figure.

    A notebook shows the figure; `plot(...).savefig("curves.png")` writes a file. Raises ValueError if a directory is no
    run or matplotlib is missing.
    """
    from lean_ft.training.curves import figure_of

    return figure_of([Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)])


def _overrides(keywords: Mapping[str, Any]) -> Iterator[str]:
    """Yield every setting of a call as `key=value`, like on the command line, with our names for those of other tools.

    Raises ValueError for a setting under two names.
    """
    ours = table("keywords")
    for theirs in keywords.keys() & ours.keys():
        if ours[theirs] in keywords:
            raise ValueError(f"{theirs} and {ours[theirs]} are one setting. Pass one of them.")
    return _assignments({str(ours.get(name, name)): value for name, value in keywords.items()})


def _assignments(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        if (
            name.rpartition(".")[2] in ("source", "validation_source")
            and (rows := _rows(value, prefix + name)) is not None
        ):
            value = _write_rows(rows, f"{prefix}{name}")
        if name == "environment":
            try:
                value = as_factory(value)
            except ValueError as error:
                raise ValueError(f"{prefix}{name}: {error}") from None
        if isinstance(value, Mapping) and value:
            yield from _assignments(value, f"{prefix}{name}.")
        else:
            value = json.loads(json.dumps(value, default=partial(_plain, prefix + name)))
            # Quoted, so that a text with a comma is no list.
            text = json.dumps(value) if isinstance(value, str) and "," in value else to_yaml(value, flow=True)
            yield f"{prefix}{name}={text}"


def _plain(key: str, value: Any) -> Any:
    """Return a value as plain Python: numbers and arrays of numpy or torch as numbers and lists, a model of pydantic as
    a dict, a function as its setting's text, and other objects as text. Raises ValueError for an object that has
    none."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        value = as_setting(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        name = type(value).__name__
        raise ValueError(
            f"{key}: found an object of {name}, which is no value of a setting. Expected text, a number, "
            "a list, a dict, a function, or an object that can be called."
        )
    return str(value)


def _rows(value: Any, key: str) -> Iterable[Any] | None:
    """Return the in-memory rows of a value of `key`, or None for paths and sources."""
    if hasattr(value, "iterrows"):  # a pandas.DataFrame
        return value.to_dict("records")
    if isinstance(value, Mapping) and value and all(hasattr(split, "features") for split in value.values()):
        raise ValueError(f"{key} is a DatasetDict; expected one of its splits: {', '.join(map(repr, value))}.")
    if isinstance(value, str | Path | Mapping) or not isinstance(value, Iterable):
        return None
    if isinstance(value, list | tuple):
        return value if all(isinstance(row, Mapping) and "path" not in row for row in value[:1] or [0]) else None
    return value  # a datasets.Dataset, a generator


def _write_rows(rows: Iterable[Any], key: str) -> Path:
    """Write rows to a JSONL file in the cache, named by its content. Raises ValueError for a row that is not JSON."""
    from lean_ft.data.arrow_rows import json_lines
    from lean_ft.system.cache import cache_folder  # imported here, because it imports numpy

    folder, digest = cache_folder(None) / "rows", hashlib.blake2b(digest_size=16)
    temporary = folder / f".rows.tmp-{threading.get_native_id()}"
    folder.mkdir(exist_ok=True)
    try:
        with temporary.open("wb") as file:
            for line in json_lines(rows):
                file.write(line)
                digest.update(line)
        return temporary.replace(folder / f"{digest.hexdigest()}.jsonl")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: a row holds what JSON cannot: {error}. Expected dicts of text, numbers, lists and dicts."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
