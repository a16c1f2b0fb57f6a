"""What the documents tell a reader to type: every `key=value` in them is one that a recipe takes."""

import re
from pathlib import Path

import pytest

from lean_ft import catalog
from lean_ft.settings_text import load_config

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_SETTING = {"shell=True"}  # of Python
PLACEHOLDERS = {"N": "4", "FOLDER": "folder"}


def settings_in(text: str) -> list[str]:
    """`a=b|c` is a=b and a=c; `a=N` a number. Blocks of Python, which tests/test_notebook.py runs, are none."""
    text = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)
    found = re.findall(
        r"(?:^|(?<=[\s`(]))([a-z_]+(?:\.[a-z_]+)*)=(\"[^\"]*\"|(?!\.\.\.)[^\s`|=]+(?:\|[^\s`|]+)*)", text, re.MULTILINE
    )
    pairs = [(key, choice) for key, value in found for choice in value.strip('"').split("|")]
    return sorted({f"{key}={PLACEHOLDERS.get(value, value)}" for key, value in pairs} - NO_SETTING)


def refusal(config_class: type, setting: str) -> str:
    """What is wrong with a setting; that others are missing is not."""
    try:
        load_config(config_class, None, [setting])
    except ValueError as error:
        return str(error) if "(command line)" in str(error) else ""
    return ""


@pytest.fixture(scope="module")
def config_classes() -> list[type]:
    return [catalog.load_recipe(file).Config for file in catalog.recipes().values()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_setting_in_a_document_is_taken_by_a_recipe(config_classes, document):
    for setting in settings_in(document.read_text()):
        refusals = [refusal(config_class, setting) for config_class in config_classes]
        assert "" in refusals, refusals


def test_settings_are_found_and_wrong_ones_refused(config_classes):
    text = '`a.b=[c,d.[0-3].*]`, `x=1|y` (e="f g"), `h=N`\nj=2\n`=k` m==n'
    assert settings_in(text) == ["a.b=[c,d.[0-3].*]", "e=f g", "h=4", "j=2", "x=1", "x=y"]
    assert len(settings_in((ROOT / "docs" / "lora.md").read_text())) > 10
    assert all(refusal(config_class, "lora.targts=[q_proj]") for config_class in config_classes)
