"""lean_ft from Python, a notebook say: what `leanft run` does, as a call.

Settings are those of the command line, groups of them as dicts; they go the same way, so that the same ones are refused
with the same words. What Python can say and a command line cannot is rows of data that lie in memory: they become a
file in the cache, named by its content, and from there on are data like any other.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from pydantic import BaseModel

from lean_ft import catalog
from lean_ft.before_torch import prepare_torch
from lean_ft.strict_yaml import to_yaml
from lean_ft.whole_files import write_whole


def run(recipe: str | Path | None = None, config: str | Path | None = None, **settings: Any) -> Path | None:
    """Runs a recipe, given by name or path, with the settings of a preset and of one's own; returns its `output_dir`.

    A group of settings is a dict or its pydantic model: `run("finetune", model={"path": "tiny"}, ...)`; dotted keys do as
    well (`**{"model.path": "tiny"}`). The preset may name the recipe. `data.source` and `data.validation_source` may be a
    list of rows, each a dict; a dict with `path` is a source and no row. Raises ValueError where a setting is wrong, and
    what the recipe raises; a run that is stopped by a signal ends in SystemExit, as everything is saved.
    """
    from lean_ft.cli.arguments import load_run
    from lean_ft.cli.run import run_recipe

    prepare_torch()
    name, preset = (None if one is None else str(one) for one in (recipe, config))
    module, cfg = load_run(name, preset, list(_overrides(settings)))
    run_recipe(module, cfg)
    return getattr(cfg, "output_dir", None)


def load_recipe(name_or_path: str | Path) -> ModuleType:
    """Returns a recipe as a module, with its `Config` and `main`: `main(Config(...))` trains. Raises ValueError where
    there is none of that name, or its file cannot be run."""
    return catalog.load_recipe(catalog.find_recipe(str(name_or_path)))


def _overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`key=value` for every setting, as the command line has them."""
    for name, value in settings.items():
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        if name.rpartition(".")[2] in ("source", "validation_source") and _are_rows(value):
            value = _write_rows(value, f"{prefix}{name}")
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={to_yaml(json.loads(json.dumps(value, default=str)), flow=True)}"


def _are_rows(value: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(value, Sequence) and all(
        isinstance(row, Mapping) and "path" not in row for row in value[:1] or [0]
    )


def _write_rows(rows: Sequence[Mapping[str, Any]], key: str) -> Path:
    """A JSONL file of rows in the cache. Raises ValueError for a row that is no JSON."""
    from lean_ft.data.cache import cache_folder  # here, as it brings numpy

    try:
        content = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key}: a row holds what JSON cannot: {error}. Expected text, numbers, lists and dicts."
        ) from None
    file = cache_folder(None) / "rows" / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.jsonl"
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        with write_whole(file) as temporary:
            temporary.write_bytes(content)
    return file
