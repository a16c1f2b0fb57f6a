"""Print where the name of something new is still missing: tables of tests, docs, presets, examples and other tools'
names.

    python scripts/missing.py KIND NAME      KIND: objective, loss, format, setting, family or technique

One line for each file, with what to add; nothing and exit status 0 if the name is everywhere. A line with `if` may not
apply.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Place(NamedTuple):
    """One of `files` (globs, in which NAME is replaced) must have `pattern` in it, within `table` if there is one."""

    files: str
    pattern: str
    add: str
    table: str = ""


ROW = r"^\|.*`NAME`.*\|"
PLACES = {
    "objective": [
        Place("recipes/NAME.py", "^def main", "write the recipe"),
        Place("configs/tiny/NAME.yaml", "^recipe: NAME$", "write a preset that trains in seconds"),
        Place("docs/recipes.md", ROW, "add a row to the table of recipes"),
        Place("README.md", ROW, "run scripts/make_docs_tables.py"),
        Place("docs/hyperparameters.md", ROW, "add a row, if runs have shown good learning rates and batch sizes"),
        Place("docs/choosing.md", "`NAME`", "say when to choose it, if no other recipe reads such data"),
        Place("lean_ft/assets/examples.yaml", r"^  recipes: \[.*\bNAME\b",
            "name the recipe beside a row that it reads"),
        Place("lean_ft/assets/other_tools.yaml", r"recipe=NAME\b", "name the recipe, if other tools have it"),
        Place("tests/recipes/test_NAME.py", "^def test_", "write its tests"),
    ],
    "loss": [
        Place("lean_ft/losses/*.py", r"^def _?NAME\(|\"NAME\"", "write the function"),
        Place("lean_ft/settings/losses.py", r'"NAME"', "add a row to PREFERENCE_LOSSES or POLICY_LOSSES"),
        Place("tests/losses/*.py", r'"NAME"|_NAME_is', "compare it with TRL or the paper's formula"),
        Place("docs/preferences.md docs/online.md", ROW, "add a row to the table of losses"),
        Place("lean_ft/assets/other_tools.yaml", r"loss.name=NAME\b", "name it in `loss_type`, if other tools have it"),
    ],
    "format": [
        Place("lean_ft/data/*.py", r'"NAME": \w*Fields\(', "add an entry to FORMATS, or to the objective's file"),
        Place("lean_ft/settings/data.py", r'^ +"NAME",', "add the name", table="FormatName"),
        Place("lean_ft/assets/examples.yaml", "^NAME:", "add rows for `leanft data example`"),
        Place("docs/data.md", ROW, "run scripts/make_docs_tables.py"),
        Place("docs/data_by_example.md", "^## `NAME`", "run scripts/make_docs_tables.py"),
        Place("tests/data/test_*.py", '"NAME"', "add cases: rendered with and without a chat template, and detected"),
    ],
    "family": [
        Place("lean_ft/models/families/*.py", r'"NAME"', "add a row"),
        Place("tests/models/family_cases.py", r'\("NAME", ', "add a case"),
        Place("docs/families.md", r"^\| .*`NAME`.*passes", "run scripts/make_families_table.py NAME; not for encoders"),
        Place("docs/families.md", r"^\| [^|]*`NAME`[^|]*\| (?![-\d, ]+\|)",
            "describe the architecture in the second table"),
        Place("docs/models.md", "`NAME`", "run scripts/make_models_page.py"),
        Place("lean_ft/gguf/*.py", '"NAME"', "add a row, if llama.cpp reads the family"),
        Place("docs/export.md", ROW, "run scripts/make_export_table.py, if llama.cpp reads the family"),
    ],
    "technique": [
        Place("lean_ft/**/*.py", r"(memory|optimizer|config|settings)\.NAME\b", "read the setting in one function"),
        Place("lean_ft/settings/devices.py lean_ft/settings/optim*.py", "^    NAME: ", "add the field"),
        Place("tests/memory/test_pairs.py", r"(memory|optimizer)\.NAME", "add a row", table="SILENT NUMERIC"),
        Place("benchmarks/memory_ladder.py", r"\.NAME\b", "add a rung, if it lowers the peak"),
        Place("docs/memory.md", r"\.NAME\b", "describe what it does, when to use it and what it costs"),
    ],
    "setting": [
        Place("lean_ft/settings/*.py", r"^    LAST: ", "add the field with a range and a description"),
        Place("docs/*.md", r"`[^`]*\bNAME\b[^`]*`", "say when to use it"),
        Place("lean_ft/assets/other_tools.yaml", r"\bNAME\b", "name it, if other tools have it"),
    ],
}  # fmt: skip


def is_there(place: Place, name: str) -> bool:
    for name_or_glob in place.files.replace("NAME", name).split():
        for file in sorted(ROOT.glob(name_or_glob)):
            text = file.read_text(encoding="utf-8")
            if place.table:  # from its name to the first line that begins with a closing bracket
                tables = rf"^(?:{place.table.replace(' ', '|')})\b.*?^[\])}}]"
                text = "\n".join(re.findall(tables, text, re.MULTILINE | re.DOTALL))
            pattern = place.pattern.replace("NAME", re.escape(name)).replace("LAST", name.rpartition(".")[2])
            if re.search(pattern, text, re.MULTILINE):
                return True
    return False


def missing(kind: str, name: str) -> list[str]:
    """One line per place where the name is missing: the file and what to add."""
    lines = []
    for file, pattern, add, table in PLACES[kind]:
        if not is_there(Place(file, pattern, add, table), name):
            where = f", in {table}" if table else ""
            lines.append(f"{file}: {add}{where}".replace("NAME", name))
    if kind == "setting":
        lines += _missing_case(name)
    return lines


def _missing_case(key: str) -> list[str]:
    """Whether the tests of effects have a value for a setting, or its type implies one."""
    from tests.settings.cases import BASE, case_of, settings_of

    recipes = [recipe for recipe in BASE if key in settings_of(recipe)]
    try:
        return [] if [case_of(recipe, key) for recipe in recipes] else [f"recipes: no recipe has the setting {key}"]
    except AssertionError as error:
        return [f"tests/settings/cases.py: {error}"]


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PLACES:
        sys.exit(__doc__)
    found = missing(*sys.argv[1:])
    for line in found:
        print(line)
    sys.exit(bool(found))
