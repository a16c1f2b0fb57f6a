"""Functions for notebooks and Python programs: run recipes, read metrics and plot curves.

Settings are those of `leanft run`, with groups as dicts, and are validated by the same code. Rows in memory are written
to a file in the cache, named by a hash of its content.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from lean_ft.settings.strict_yaml import to_yaml
from lean_ft.system import catalog
from lean_ft.system.before_torch import prepare_torch
from lean_ft.system.user_functions import as_setting, forgotten_functions


def run(recipe: str | Path | None = None, config: str | Path | None = None, **settings: Any) -> Path | None:
    """Run a recipe, by name or path, with a preset and settings. Return its `output_dir`.

    A group of settings is a dict or its pydantic model: `run("finetune", model={"path": "tiny"}, ...)`. Dotted keys
    work too (`**{"model.path": "tiny"}`). The preset may name the recipe. `data.source` and `data.validation_source`
    may be rows in memory: a list of dicts, a generator, a datasets.Dataset or a pandas.DataFrame. A dict with `path` is
    a source, not a row.

    Raises ValueError for an invalid setting, and the errors of the recipe. A run stopped by a signal saves its state
    and raises SystemExit.
    """
    from lean_ft.cli.arguments import load_run
    from lean_ft.cli.run import run_recipe

    prepare_torch()
    name, preset = (None if one is None else str(one) for one in (recipe, config))
    with forgotten_functions():
        module, cfg = load_run(name, preset, list(_overrides(settings)), given_by="", runs=True)
        run_recipe(module, cfg)
    return getattr(cfg, "output_dir", None)


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

    return figure_of([Path(one) for one in ([runs] if isinstance(runs, str | Path) else runs)])


def _overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every setting as `key=value`, like on the command line."""
    for name, value in settings.items():
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        if (
            name.rpartition(".")[2] in ("source", "validation_source")
            and (rows := _rows(value, prefix + name)) is not None
        ):
            value = _write_rows(rows, f"{prefix}{name}")
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={to_yaml(json.loads(json.dumps(value, default=_plain)), flow=True)}"


def _plain(value: Any) -> Any:
    """A value that JSON does not have: a function, a number of numpy, a path or a dtype."""
    return value.item() if hasattr(value, "item") else str(as_setting(value))


def _rows(value: Any, key: str) -> Iterable[Any] | None:
    """Return the in-memory rows of a value of `key`, or None for paths and sources."""
    if hasattr(value, "iterrows"):  # a pandas.DataFrame
        return value.to_dict("records")
    if isinstance(value, Mapping) and value and all(hasattr(one, "features") for one in value.values()):
        raise ValueError(f"{key} is a DatasetDict; expected one of its splits: {', '.join(map(repr, value))}.")
    if isinstance(value, str | Path | Mapping) or not isinstance(value, Iterable):
        return None
    if isinstance(value, list | tuple):
        return value if all(isinstance(row, Mapping) and "path" not in row for row in value[:1] or [0]) else None
    return value  # a datasets.Dataset, a generator


def _write_rows(rows: Iterable[Any], key: str) -> Path:
    """Write rows to a JSONL file in the cache, named by its content. Raises ValueError for a row that is not JSON."""
    from lean_ft.data.arrow_rows import as_json
    from lean_ft.data.cache import cache_folder  # imported here, because it imports numpy

    folder, digest = cache_folder(None) / "rows", hashlib.blake2b(digest_size=16)
    convert = as_json if hasattr(rows, "features") else dict  # a datasets.Dataset has dates, and nulls for missing keys
    temporary = folder / f".rows.tmp-{threading.get_native_id()}"
    folder.mkdir(exist_ok=True)
    try:
        with temporary.open("wb") as file:
            for row in rows:
                line = json.dumps(convert(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
                file.write(line)
                digest.update(line)
        return temporary.replace(folder / f"{digest.hexdigest()}.jsonl")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: a row holds what JSON cannot: {error}. Expected dicts of text, numbers, lists and dicts."
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
