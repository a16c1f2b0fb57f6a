"""Example rows of every format: recipes read them, and docs/data_by_example.md shows them and what trains in them."""

import importlib
import importlib.util
import json
import pkgutil
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import lean_ft.data
from lean_ft.cli.data import EXAMPLES
from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings import FormatName
from lean_ft.system import catalog
from scripts import make_docs_tables

PAGE = (Path(__file__).parents[2] / "docs" / "data_by_example.md").read_text()
FORMATS: dict[str, dict[str, Any]] = yaml.safe_load(EXAMPLES.read_text())
FIRST = ("messages",)
NEEDS_TEMPLATE = ("tools", "reasoning")  # the page shows these with Qwen3's template


def section_of(name: str) -> str:
    return PAGE.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]


def compact(preview: str) -> str:
    """A preview without the headings of rows and without spaces, since the page breaks long lines."""
    return re.sub(r"(?m)^── .*$|\s", "", preview)


@pytest.fixture
def chatml_model(tmp_path) -> list[str]:
    """The embedded model with the tokens and the chat template of Qwen3, as settings."""
    spec = importlib.util.find_spec("trl")
    template = Path(spec.origin).parent / "chat_templates" / "qwen3.jinja" if spec and spec.origin else Path("-")
    if not template.exists():
        pytest.skip("needs TRL, which ships published chat templates")
    folder = tmp_path / "model"
    folder.mkdir()
    for file in resolve_model_path("tiny").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for old, new in (("<|begin|>", "<|im_start|>"), ("<|end|>", "<|im_end|>")):
        for file in folder.glob("*.json"):
            file.write_text(file.read_text().replace(old, new))
    return [f"model.path={folder}", f"data.chat_template={template}"]


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_tables_of_recipes_and_formats_are_what_their_script_writes(page):
    text = (make_docs_tables.ROOT / page).read_text()
    assert make_docs_tables.PAGES[page](text) == text, "run python scripts/make_docs_tables.py"


def test_every_format_of_the_code_has_an_example():
    names = [f"lean_ft.data.{module.name}" for module in pkgutil.iter_modules(lean_ft.data.__path__)]
    objectives = [getattr(importlib.import_module(name), "OBJECTIVE", None) for name in names]
    readers = {objective.reader for objective in objectives if objective is not None}
    assert len(readers) > 4
    known = {name for reader in readers for name, fields in reader.known.items() if not fields.is_alias}
    assert known <= FORMATS.keys(), "add rows to lean_ft/assets/examples.yaml"
    # The first alternative of `FormatName` has the names.
    names = set(get_args(get_args(get_args(FormatName)[0])[0]))
    assert names - {"auto"} == known - {"prompts"}, "correct FormatName in lean_ft/settings/data.py"
    assert {recipe for each in FORMATS.values() for recipe in each["recipes"]} <= catalog.recipes().keys()


@pytest.mark.first(len(FIRST))
@pytest.mark.parametrize("name", dict.fromkeys([*FIRST, *FORMATS]))
def test_an_example_is_read_by_its_recipes_and_shown_on_the_page(leanft, tmp_path, request, name: str):
    example = FORMATS[name]
    printed = leanft.quiet("data", "example", name)
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert rows == example["rows"]
    file = tmp_path / f"{name}.jsonl"
    file.write_text(printed.out)
    shown_json, shown_text = re.findall(r"```(?:json|text)\n(.*?)```", section_of(name), re.DOTALL)[:2]
    assert [json.loads(row) for row in shown_json.split("\n\n")] == rows
    model = request.getfixturevalue("chatml_model") if name in NEEDS_TEMPLATE else ["model.path=tiny"]
    for number, recipe in enumerate(example["recipes"]):
        settings = [*model, *example.get("settings", ())]
        preview = leanft.quiet("data", "preview", recipe, f"data.source={file}", *settings, "-n", "9")
        assert "fields not read" not in preview.out
        if number == 0:
            texts = compact(preview.out.rpartition("\nfrom ")[0])
            for part in shown_text.split("\n...\n"):  # lines that the page leaves out
                _, found, texts = texts.partition(compact(part))
                assert found, f"{part}\nis not in\n{preview.out}"
            assert not texts


def test_formats_are_listed_and_a_misspelled_one_is_named(leanft):
    listed = leanft("data", "example").out
    assert re.findall(r"(?m)^(\w+) ", listed)[1:] == list(FORMATS)
    assert listed in PAGE
    refusal = leanft.refused("data", "example", "mesages")
    assert "Did you mean 'messages'?" in refusal
