"""`leanft validate`: check whether a run would start."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, load_run
from lean_ft.hub.download import find_cached
from lean_ft.hub.paths import repository_name, resolve_data_path
from lean_ft.settings import (
    AnswersConfig,
    DataConfig,
    DataSource,
    DistillConfig,
    GroupT,
    ModelConfig,
    ParallelConfig,
    PromptDataConfig,
    RecipeConfig,
    ValueConfig,
    models_of,
)
from lean_ft.settings.text import dump, dump_chosen
from lean_ft.system.catalog import is_shipped
from lean_ft.system.redaction import redact
from lean_ft.system.user_functions import is_function_path

if TYPE_CHECKING:
    from lean_ft.tokenizers import Tokenizer


def validate(
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    everything: Annotated[bool, typer.Option("--all", help="Print the settings at their defaults too.")] = False,
    debug: Debug = False,
) -> None:
    """Check a run's settings, files, first rows, device, output_dir and LoRA targets without running it.

    Prints a preset of the run: required and common settings, and those that are not at their default. Runs none of your
    functions, only a recipe's file that you name.
    """
    module, cfg = load_run(recipe, config, overrides)
    if isinstance(cfg, RecipeConfig) and "output_dir" not in cfg.model_fields_set:
        from lean_ft.training.starting import choose_output_dir  # here, because it imports torch

        cfg = cfg.model_copy(update={"output_dir": choose_output_dir(cfg)[0]})
    problems, notes = _find_problems(module, cfg)
    if problems:
        raise ValueError("\n".join(problems))
    text = dump(cfg) if everything else dump_chosen(cfg)
    name = f"recipe: {Path(module.__file__ or '').stem}\n" if is_shipped(module) else ""
    ok = "ok: the settings are valid." if everything else "ok: the settings are valid. --all prints the others too."
    typer.echo(name + redact(text) + "\n".join(f"# {line}" for line in (*notes, ok)))


def _find_problems(recipe: ModuleType, cfg: BaseModel) -> tuple[list[str], list[str]]:
    """Return the problems and notes of a rehearsal, and of what a rehearsal leaves out: files, tokenizers, rows,
    rewards.

    Uses no network. Skips repositories that are not in the Hub's cache.
    """
    # Imported here because torch is slow to import and most verbs do not need it.
    from lean_ft.data import prompt_rows
    from lean_ft.frozen.reference import choose_kind
    from lean_ft.frozen.teacher import check_cached, check_tokenizer
    from lean_ft.generation.tasks import find_tasks
    from lean_ft.models.device import check_dtype, resolve_device
    from lean_ft.online.rewards import check_rewards
    from lean_ft.tokenizers import load_tokenizer
    from lean_ft.training.starting import decide_start, hold_rate, read_earlier

    def group(group_class: type[GroupT]) -> GroupT | None:
        return next((value for _, value in cfg if isinstance(value, group_class)), None)

    problems, notes, tokenizer = list[str](), list[str](), None
    model, distill = group(ModelConfig), group(DistillConfig)
    rows = group(DataConfig) or group(PromptDataConfig)
    with _gathered(problems):
        if (device := getattr(cfg, "device", None)) is not None:
            check_dtype(model.dtype if model else "float32", resolve_device(device))
    if isinstance(cfg, RecipeConfig):
        with _gathered(problems):
            decide_start(hold_rate(cfg, read_earlier(cfg, quick=True), log=False))
    if isinstance(cfg, RecipeConfig) and cfg.eval_tasks:
        with _gathered(problems):
            find_tasks(cfg.eval_tasks)
    if isinstance(cfg, AnswersConfig):
        notes.append("reference: {}{}".format(*choose_kind(cfg)))
    teacher, value = models_of(cfg).get(("distill", "teacher")), group(ValueConfig)
    missing = [path for path in (teacher, value and value.path) if path and not _is_here(path)]
    if model and not _is_here(model.path, weights=not model.random_init):
        missing.append(model.path)
    notes += [f"{path} is not on this machine. The run downloads it." for path in missing]
    if model and not missing:
        with _gathered(problems):
            notes += _rehearse(recipe, cfg, model)
    if model and rows and model.path not in missing:
        with _gathered(problems):
            tokenizer = load_tokenizer(model, rows.chat_template)
    if distill and teacher not in missing:
        with _gathered(problems):
            if distill.cached is not None:
                stored = check_cached(distill)["model"]
                notes.append(f"teacher: stored tokens of {stored}. The run checks that the rows match.")
            if tokenizer is not None:
                check_tokenizer(distill, tokenizer)
    if isinstance(rows, PromptDataConfig):
        with _gathered(problems, "data.source: "):
            if tokenizer is not None:
                notes.append(f"data.source: {prompt_rows(rows, tokenizer, seed=0)[0].report}")
        with _gathered(problems):
            check_rewards(cfg.rewards)  # pyright: ignore[reportAttributeAccessIssue]
    elif rows is not None:
        notes += _read_sources(rows, tokenizer, problems)
    return problems, notes


def _read_sources(rows: DataConfig, tokenizer: "Tokenizer | None", problems: list[str]) -> list[str]:
    """Read the first rows of each source. Return a note for each, and add to `problems`."""
    notes = []
    for setting, value in (("source", rows.source), ("validation_source", rows.validation_source)):
        sources = [value] if isinstance(value, str) else value or []
        for source in sources:
            with _gathered(problems, f"data.{setting}: "):
                report = _read_first_rows(rows, tokenizer, source, is_alone=len(sources) == 1)
                notes.append(f"data.{setting}: {report}")
    return notes


def _is_here(path: str, *, weights: bool = True) -> bool:
    """Whether a path is a folder or a file, or a Hub repository in the cache."""
    name = repository_name(path)
    return name is None or find_cached(name, weights=weights) is not None


def _rehearse(recipe: ModuleType, cfg: BaseModel, model: ModelConfig) -> list[str]:
    """Run the recipe up to its first step on shapes, and return notes. Raise ValueError for settings that the model
    does not support. Only builds the model for a recipe of the user's own, or one that takes no steps."""
    from lean_ft.plan.devices import Machines, choose_device
    from lean_ft.plan.rehearsal import rehearse

    if not isinstance(cfg, RecipeConfig) or not is_shipped(recipe):
        from lean_ft.models import empty_model

        empty_model(model)
        return []
    num_ranks = 1
    if (parallel := cfg.group(ParallelConfig)) is not None:  # the fewest ranks that these settings allow
        of_copy = (parallel.shard or 1) * parallel.context * parallel.tensor
        num_ranks = parallel.replicate * (of_copy if parallel.shard else math.lcm(of_copy, parallel.experts))
    try:
        rehearse(recipe, cfg, choose_device(None, cfg.device), Machines(num_ranks, 1), takes_step=False)
    except RuntimeError as error:
        return [f"building the model was not checked: {error}"]
    return []


@contextmanager
def _gathered(problems: list[str], prefix: str = "") -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if f"{error}" not in problems:  # the model and its tokenizer may report the same missing folder
            problems.append(f"{prefix}{error}")


def _read_first_rows(data: DataConfig, tokenizer: "Tokenizer | None", source: str | DataSource, is_alone: bool) -> str:
    """Read the first rows of one source (without a tokenizer only their fields) and return a report. `is_alone`:
    whether the run has no other source.

    Raise ValueError for rows that would stop the run.
    """
    from lean_ft.data.documents import check_any_left, renderer_of
    from lean_ft.data.formats import NUM_ROWS_TO_DETECT, formats_of, reading
    from lean_ft.data.objective import objective_of
    from lean_ft.data.sources import RowSources, source_files

    sources = RowSources.of(data, [source])
    (data_source,) = sources.sources
    path = data_source.path
    if is_function_path(data_source.format):
        return f"{data_source.format} reads the rows of {path} in the run. validate does not call it"
    if source_files(path) is None and not resolve_data_path(path).is_dir():
        return f"{path} is a dataset of the Hub. The run downloads it."
    rows = sources.first_rows(NUM_ROWS_TO_DETECT)
    if tokenizer is not None:
        _, report = renderer_of(data, tokenizer, [source])(rows)
        if len(rows) < NUM_ROWS_TO_DETECT and is_alone:  # these are all rows
            check_any_left(report, data, path)
        return f"of the first rows, {report}"
    form = formats_of(sources, rows, objective_of(data).reader.known)[0]
    for row in rows:
        with reading(row):
            form.fields_of(row)
    return f"the first {len(rows)} rows are {form.name}"
