"""`leanft launch-file`: write a file that runs a recipe on SkyPilot, Modal or Hugging Face Jobs.

The templates are in `lean_ft/assets/launch`. A job installs lean_ft, receives the files that its settings name, and keeps its
run on a volume, so that it resumes after a preemption.
"""

import glob
import json
import os
import re
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
import typer

from lean_ft.cli.arguments import Debug, Overrides, Preset, Recipe, batches_of, load_run
from lean_ft.settings import RecipeConfig, models_of
from lean_ft.settings.run import LOGGER_PACKAGES
from lean_ft.settings.text import dotted
from lean_ft.system import installation
from lean_ft.system.redaction import on_one_line, redact
from lean_ft.system.user_functions import is_function_path

TEMPLATES = Path(__file__).parents[1] / "assets" / "launch"
KINDS = {
    "skypilot": ("skypilot.yaml", "H100:1"),
    "modal": ("modal.py", "H100:1"),
    "hf-jobs": ("hf-jobs.sh", "a100-large"),
}
"""Kind of job -> its template and the GPU by default."""


def launch_file(
    kind: Annotated[
        Literal["skypilot", "modal", "hf-jobs"], typer.Argument(metavar="skypilot|modal|hf-jobs", show_default=False)
    ],
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Preset = None,
    volume: Annotated[str, typer.Option(metavar="NAME", help="Bucket or volume that keeps the run.")] = "",
    gpu: Annotated[
        str, typer.Option(metavar="NAME[:N]", help="GPU and number: H100:8, or a flavor of Hugging Face Jobs: h200x8.")
    ] = "",
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Docker image with Python 3.11 or newer.")] = "",
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="VARIABLE", help="Environment variable to pass, such as HF_TOKEN. The file has no value."),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            metavar="WHEEL|git+URL", help="Where the job installs lean_ft from, if not as it is installed here."
        ),
    ] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    debug: Debug = False,
) -> None:
    """Write a file that runs a recipe on SkyPilot, Modal or Hugging Face Jobs. Read and edit it, then start it.

    Checks the settings first. output_dir becomes a folder of the volume, so a preempted job resumes by itself.
    Files that the settings name must be in the current folder: the job uploads them. `leanft slurm` is for Slurm.
    """
    template, default_gpu = KINDS[kind]
    if (parts := re.fullmatch(r"[\w.!-]+?(?:[:x]([1-9]\d*))?", gpu := gpu or default_gpu)) is None:
        raise ValueError(f"--gpu {gpu}: expected a GPU of {kind}, such as {default_gpu}.")
    num_gpus = int(parts[1] or 1)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+" if kind == "hf-jobs" else r"[\w.-]+", volume):
        form = "ACCOUNT/BUCKET" if kind == "hf-jobs" else "NAME"
        raise ValueError(f"--volume {volume or 'is missing'}: expected {form}, a bucket or volume to keep the run in.")
    for name in secret or []:
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or redact(name) != name:
            raise ValueError(f"--secret expects the name of a variable, such as HF_TOKEN, found {redact(name)}.")
    output = output or Path(f"leanft_{template.replace('-', '_')}")
    _check_names(
        *[("--image", part) for part in re.split("[/:@]", image) if part],
        *[("--source", part) for part in re.split("[/:@+]+", source) if part],
        *[("--output", part) for part in output.parts if part != "/"],
    )
    cfg, words = words_of_job(recipe, config, overrides, num_gpus)
    if not isinstance(cfg, RecipeConfig):
        raise ValueError("this recipe writes no run directory, so a job would lose its result. Run it on your machine.")
    _check_names(("output_dir", cfg.output_dir.name))
    files = sorted(set(_files_of(cfg, recipe, config)))
    source = source or installation.source_elsewhere()
    wheel = source if source.endswith(".whl") and "://" not in source else None
    if wheel is not None and not Path(wheel).is_file():
        raise ValueError(f"--source {wheel}: no such file.")
    loggers = [name for name in cfg.log.to if name in LOGGER_PACKAGES]
    extras = ",".join(["datasets", *loggers, *(["eval"] if cfg.eval_tasks else [])])
    lean_ft = f"./{Path(wheel).name}[{extras}]" if wheel else f"{installation.DISTRIBUTION}[{extras}] @ {source}"
    packages = [f"torch=={metadata.version('torch').partition('+')[0]}", lean_ft]
    many = ["--nproc-per-node", str(num_gpus), "--max-restarts", "3"] if num_gpus > 1 else []
    words = [word for word in words if not word.startswith("output_dir=")]
    if output.exists() and not force:
        raise ValueError(f"{output} exists; choose another name with --output, or overwrite it with --force.")
    text = render(
        template,
        file=output,
        job="leanft-" + re.sub(r"[^a-z0-9]+", "-", cfg.output_dir.name.lower()).strip("-"),
        run=cfg.output_dir.name,
        gpu=gpu,
        image=image,
        volume=volume,
        secrets=secret or [],
        packages=packages,
        wheel=wheel,
        uploads={file: file for file in files} | ({Path(wheel).name: wheel} if wheel else {}),
        folders=[file for file in files if Path(file).is_dir()],
        words=["leanft", "run", *many, *words, f"output_dir=/runs/{cfg.output_dir.name}"],
    )
    output.write_text(text, encoding="utf-8")
    typer.echo(f"wrote     {output}, whose first lines show how to start it")
    typer.echo(f"installs  {shlex.join(packages)}")
    typer.echo(f"uploads   {', '.join([*files, *([wheel] if wheel else [])]) or 'no files'}")


def words_of_job(
    recipe: str | None, config: str | None, overrides: list[str] | None, num_processes: int
) -> tuple[Any, list[str]]:
    """Return the settings of a job's run, and the words after `leanft run`. Raise ValueError for settings that are invalid, or
    that hold a secret."""
    _, cfg = load_run(recipe, config, overrides, processes=num_processes)
    if isinstance(cfg, RecipeConfig) and num_processes > 1:
        from lean_ft.training.process import refuse_on_many  # here, because it imports torch

        refuse_on_many(cfg, num_processes)
    given = [*([recipe] if recipe else []), *(["--config", config] if config else []), *(overrides or [])]
    given += batches_of(cfg, given) if num_processes > 1 else []
    if bad := next((word for word in given if "[token]" in redact(word) or on_one_line(word) != word), None):
        is_one_line = on_one_line(bad) == bad
        problem = "holds a secret, which the job script would keep"
        raise ValueError(
            f"{on_one_line(bad.partition('=')[0])} {problem if is_one_line else 'has several lines or control characters'}. Put this setting into a preset that only you can read, and pass --config PATH."
        )
    return cfg, given


def _check_names(*names: tuple[str, str]) -> None:
    """Raise ValueError for a name with other characters than letters, digits, `.`, `-` and `_`: the templates write names into
    comments, a docstring and unquoted shell words.

    names: pairs of an option and a name.
    """
    for what, name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f"{what}: {name!r} is written into a program, so it may have only letters, digits, . - and _."
            )


def render(template: str, **facts: Any) -> str:
    """Return a job's file."""
    environment = jinja2.Environment(  # not HTML, so no autoescape
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "quote": shlex.quote,
        "command": shlex.join,
        "basename": os.path.basename,
        "text": lambda value: json.dumps(value, ensure_ascii=False),
    }
    return environment.from_string((TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")).render(facts)


def _files_of(cfg: RecipeConfig, recipe: str | None, config: str | None) -> Iterator[str]:
    """Yield the files and folders that the settings name, relative to the current folder. Raise ValueError for others, which
    would have another path on the job's machine."""
    from lean_ft.data.sources import source_files

    models = {".".join(place) for place in models_of(cfg)}
    for key, text in [("RECIPE", recipe or ""), ("--config", config or ""), *_texts(cfg)]:
        path = os.path.normpath(text.rpartition(":")[0] if is_function_path(text) else text)
        found = glob.glob(os.path.expanduser(path)) if key in models or re.search(r"\w[./]|/\w", path) else []
        if not found and os.path.isabs(path):
            typer.echo(f"note: {key}: {path} is not on this machine. The job expects it on its own.", err=True)
        elif not found and re.match(r"data\.\w*source", key):
            source_files(text)  # raises ValueError if it is no Hub data set
        for one in found:
            if os.path.isabs(one) or one.startswith(".."):
                raise ValueError(
                    f"{key}: {text} is not a path below the current folder, from which the job uploads files. Run the command in "
                    "the folder that has the file, and give its relative path."
                )
            if on_one_line(one) != one:
                raise ValueError(f"{key}: the name of the file {one!r} has control characters. Rename it.")
            yield one


def _texts(cfg: RecipeConfig) -> Iterator[tuple[str, str]]:
    """Yield all texts in the settings with their key, also those inside lists."""
    for key, value in dotted(cfg.model_dump(mode="json", exclude={"output_dir"})):
        for item in value if isinstance(value, list) else [value]:
            inner = item.values() if isinstance(item, dict) else [item]
            yield from ((key, text) for text in inner if isinstance(text, str))
