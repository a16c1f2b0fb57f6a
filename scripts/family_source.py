"""The source of a family's row and of its test cases, for scripts/new_family.py."""

import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import Any

from lean_ft.models.families import FAMILIES, Family
from scripts.make_models_page import published

ROOT = Path(__file__).resolve().parent.parent
# The files of rows; each imports only from earlier ones.
FILES = (
    "family",
    "dense",
    "layer_norm",
    "older",
    "gemma",
    "mixtures",
    "corrected_mixtures",
    "latent",
    "unusual_attention",
)
MODULES = {file: import_module(f"lean_ft.models.families.{file}") for file in (*FILES, "hybrids", "mamba")}
# Fields of a row that the search takes whole from another row.
WHOLE_FIELDS = ("has_window", "rope", "layer_facts", "reads_layer_types", "activation_field", "activations")
WHOLE_FIELDS += ("norm_eps_field", "has_mixture", "mixture")


def text(value: Any) -> str:
    """The source of a fact: a literal, a reader of a field, a public name, or the fact of another row."""
    if isinstance(value, methodcaller):
        kind, *given = reader_of(value)
        kind = {"positive": "number", "positive_or_null": "number_or_null"}.get(kind, kind)
        return f"{kind}({', '.join(given)})"
    if not callable(value) and not isinstance(value, dict):
        return repr(value).replace("'", '"')
    names = {name: own for module in MODULES.values() for name, own in vars(module).items() if not name.startswith("_")}
    if name := next((name for name, own in names.items() if own is value), None):
        return name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items()) + "}"
    return next(place for place, own in facts_of_rows() if own is value)


def reader_of(value: methodcaller) -> list[str]:
    """The method of ConfigFields that a reader of a field calls, and its arguments."""
    maker, given = value.__reduce__()
    kind, *names = (*getattr(maker, "args", ()), *given)
    options = [f"{name}={text(option)}" for name, option in getattr(maker, "keywords", {}).items()]
    return [kind, *map(text, names), *options]


def facts_of_rows() -> "list[tuple[str, Any]]":
    """Facts of all rows by their source, as `DENSE["llama"].rope`."""
    found = []
    for file, module in MODULES.items():
        for model_type, row in getattr(module, file.upper(), {}).items():
            place = f'{file.upper()}["{model_type}"]'
            found += [(f"{place}.{field.name}", getattr(row, field.name)) for field in fields(Family)]
            found += [(f'{place}.facts["{name}"]', fact) for name, fact in row.facts.items()]
            found += [(f'{place}.mixture["{name}"]', fact) for name, fact in row.mixture.items()]
    return found


def source_of_row(model_type: str, row: Family) -> str:
    """The statement that adds the row to the table of its file."""
    given = {field.name: getattr(row, field.name) for field in fields(Family)}
    changed = [f"{name}={text(value)}" for name, value in given.items() if value != getattr(Family(), name)]
    return formatted(f'{file_of(" ".join(changed)).upper()}["{model_type}"] = Family({", ".join(changed)})')


def file_of(source: str) -> str:
    """The first file of rows that can import everything that a row's source names."""
    return max(["dense", *origins(source).values()], key=list(MODULES).index)


def origins(source: str) -> dict[str, str]:
    """The first file of rows with each name of a source."""
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", source))
    places = {name: [file for file, module in MODULES.items() if name in vars(module)] for name in names}
    return {name: files[0] for name, files in places.items() if files}


def source_of_case(name: str, model_type: str, settings: dict[str, Any]) -> str:
    return formatted(f'CASES["{name}"] = ("{model_type}", {text(settings)})')


def table_line(model_type: str, row: Family, nearest: str) -> str:
    """The family's line of the table of architectures in docs/families.md."""
    other = FAMILIES[nearest]
    pairs = [(row.facts, other.facts), (row.mixture, other.mixture)]
    facts = [f"`{n}={text(v)}`" for own, of in pairs for n, v in own.items() if text(v) != text(of.get(n))]
    return f"| `{model_type}` | {published(model_type).strip('`')} | {', '.join([f'as `{nearest}`', *facts])} |"


def formatted(source: str) -> str:
    ruff = [sys.executable, "-m", "ruff", "format", "-q", "--line-length", "120", "-"]
    return subprocess.run(ruff, input=source, capture_output=True, text=True, check=True).stdout.rstrip()


def write(model_type: str, row: str, cases: list[str], line: str) -> int:
    """Insert the row, its cases and its line of docs/families.md, and run the family's tests."""
    raise NotImplementedError
