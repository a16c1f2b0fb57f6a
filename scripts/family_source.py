"""The source of a family's row and of its test cases, for scripts/new_family.py."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from lean_ft.models.config import FamilyParts
from lean_ft.models.families import FAMILIES, Family
from lean_ft.models.families.older import spelled
from lean_ft.system.config_fields import ConfigFields
from scripts.make_models_page import published

ROOT = Path(__file__).resolve().parent.parent
# The files of rows; each imports only from earlier ones. Those of one family are last.
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
FILES += (
    "hybrids",
    "mamba",
    "gemma4",
    "gemma3n",
    "llama4",
    "nanochat",
    "gpt_oss",
    "phimoe",
    "falcon_h1",
    "mimo_v2_flash",
    "cohere2_moe",
)
MODULES = {file: import_module(f"lean_ft.models.families.{file}") for file in FILES}
# Fields of a row that the search takes whole from another row.
WHOLE_FIELDS = ("has_window", "rope", "layer_facts", "reads_layer_types", "activation_field", "activations")
WHOLE_FIELDS += ("norm_eps_field", "has_mixture", "mixture", "parts", "own")
MADE: dict[Callable[..., Any], str] = {}  # the source of functions that the search makes


def if_flag(value: Any, name: str, otherwise: Any) -> Callable[[ConfigFields], Any]:
    """A fact that a flag of config.json turns on: a constant, or another row's function of the fields."""

    def read(fields: ConfigFields) -> Any:
        return (value(fields) if callable(value) else value) if fields.flag(name) else otherwise

    source = f"{text(value)}(fields)" if callable(value) else text(value)
    MADE[read] = f'lambda fields: {source} if fields.flag("{name}") else {text(otherwise)}'
    return read


def in_usual_spelling(
    spellings: dict[str, str], ignored: tuple[str, ...]
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A row's `preprocessed` for fields with other names, by these names, and for usual names that transformers
    ignores."""
    read = spelled(spellings, ignored)
    MADE[read] = f"spelled({text(spellings)}{f', {text(ignored)}' if ignored else ''})"
    return read


def text(value: Any) -> str:
    """The source of a fact: a literal, a reader of a field, a public name, or the fact of another row."""
    if isinstance(value, methodcaller):
        kind, *given = reader_of(value)
        kind = {"positive": "number", "positive_or_null": "number_or_null"}.get(kind, kind)
        return f"{kind}({', '.join(given)})"
    if not callable(value) and not isinstance(value, dict | FamilyParts):
        return repr(value).replace("'", '"')
    if callable(value) and value in MADE:
        return MADE[value]
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
    """The entry of `CASES` in tests/models/family_cases.py."""
    items = [
        f"{text(key)}: {text(value)},".replace(" ", "\0") for key, value in settings.items()
    ]  # lines break between items
    indent = " " * 8
    lines = textwrap.fill(" ".join(items), 120, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    inner = "\n" + lines.replace("\0", " ") + "\n    " if settings else ""
    return f'    "{name}": ("{model_type}", {{{inner}}}),'


def source_of_draws(model_type: str, row: Family) -> str:
    """The entry of `DRAWS` in tests/models/random_configurations.py, or "" if the family needs none."""
    if row.facts.get("position_row") is not None:
        return f'    "{model_type}": LEARNED,'
    if "head_dim" in CONFIG_MAPPING[model_type]().to_dict():
        return ""
    return f'    "{model_type}": SQUARE,'


def table_line(model_type: str, row: Family, nearest: str) -> str:
    """The family's line of the table of architectures in docs/families.md."""
    other = FAMILIES[nearest]
    pairs = [(row.facts, other.facts), (row.mixture, other.mixture)]
    facts = [f"`{n}={text(v)}`" for own, of in pairs for n, v in own.items() if text(v) != text(of.get(n))]
    return f"| `{model_type}` | {published(model_type).strip('`')} | {', '.join([f'as `{nearest}`', *facts])} |"


def formatted(source: str) -> str:
    ruff = [sys.executable, "-m", "ruff", "format", "-q", "--no-cache", "--line-length", "120", "-"]
    return subprocess.run(ruff, input=source, capture_output=True, text=True, check=True).stdout.rstrip()


def insert(root: Path, model_type: str, row: str, cases: list[str], draws: str, line: str) -> None:
    """Add a family's row, cases, random draws and line of docs/families.md to the files of a checkout."""
    families, file = root / "lean_ft" / "models" / "families", file_of(row)
    known = vars(MODULES[file])
    imports = [
        f"from lean_ft.models.families.{of} import {name}\n" for name, of in origins(row).items() if name not in known
    ]
    edit(families / f"{file}.py", r"(?m)^(?=from lean_ft\.)", "".join(imports))
    edit(families / f"{file}.py", r"\Z", f"\n{row}\n")
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "-q", "--no-cache", "--fix", "--select", "I", families / f"{file}.py"]
    )
    tests = root / "tests"
    if draws:
        place = r"(?m)(?<=^DRAWS: )(?s:.*?)(?=^}$)"
        edit(tests / "models" / "random_configurations.py", place, r"\g<0>" + draws + "\n")
    edit(tests / "models" / "family_cases.py", r"(?m)(?<=^CASES: )(?s:.*?)(?=^}$)", r"\g<0>" + "\n".join(cases) + "\n")
    head = r"\| `model_type` \| models \| architecture \|"
    edit(root / "docs" / "families.md", rf"(?s)(?<={head}\n).*?(?=\n\n)", f"\\g<0>\n{line}")


def edit(file: Path, place: str, new: str) -> None:
    """Replace the first match of a pattern in a file."""
    changed, number = re.subn(place, lambda match: new.replace(r"\g<0>", match[0]), file.read_text(), count=1)
    assert number == 1, f"{file} has no {place}"
    file.write_text(changed)


def run_tests(model_type: str) -> int:
    """Write the tables that scripts make, and run the family's tests."""
    python = [sys.executable, "-m", "pytest", "-q", "-m", ""]
    scripts = [["make_families_table.py", model_type], ["make_models_page.py"]]
    commands = [[sys.executable, str(ROOT / "scripts" / name), *given] for name, *given in scripts]
    commands.append([*python, "-k", model_type, "tests/models/test_families.py", "tests/models/test_parity.py"])
    return max(subprocess.run(command, cwd=ROOT).returncode for command in commands)
