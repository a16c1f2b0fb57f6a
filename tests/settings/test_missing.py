"""`scripts/missing.py` names the places where something new is still missing, and no place of something that is
complete."""

import re
import shutil

import pytest

from scripts import missing as script

COMPLETE = {
    "objective": "dpo",
    "loss": "orpo",
    "format": "preference",
    "setting": "neftune_alpha",
    "family": "olmo3",
    "technique": "tile_mlp",
}


@pytest.mark.parametrize("kind", script.PLACES)
def test_what_is_complete_lacks_nothing_and_an_unknown_name_everything(kind):
    assert script.missing(kind, COMPLETE[kind]) == []
    lines = script.missing(kind, "unheard_of")
    assert len(lines) == len(script.PLACES[kind]) + (kind == "setting")  # and its case
    assert all(": " in line and "NAME" not in line for line in lines)


PAGES = ("CONTRIBUTING.md", "docs/design.md", "docs/new_family.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_folders_that_a_page_for_contributors_names_are_there(page):
    text = (script.ROOT / page).read_text()
    named = {
        name for name in re.findall(r"`((?:\w+/)+[\w.]*)[`: ]", text) if not re.search("NAME|MODEL|FILE|FAMILY", name)
    }
    roots = {path.name for path in script.ROOT.iterdir()}
    named = {name for name in named if name.partition("/")[0] in roots | {"gguf", "tokenizers"}}
    missing = {name for name in named if not any((script.ROOT / top / name).exists() for top in ("", "lean_ft"))}
    assert named and not missing


def test_the_names_that_contributing_gives_with_a_file_are_in_it():
    text = (script.ROOT / "CONTRIBUTING.md").read_text()
    found = {*re.findall(r"`(\w+)` (?:in|of) `((?:\w+/)+\w+\.\w+)`", text)}
    assert len(found) > 4
    for name, file in found:
        assert re.search(rf"(?m)^ *(class |def )?{name}\b", (script.ROOT / file).read_text()), (name, file)


def test_a_table_that_lacks_a_name_is_named_though_the_file_has_it(tmp_path, monkeypatch):
    for name in ("lean_ft/settings", "lean_ft/data"):
        shutil.copytree(script.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "lean_ft/settings/data.py"
    text = settings.read_text()
    assert text.count('"unpaired"') > text.count('        "unpaired",\n') == 1
    settings.write_text(text.replace('        "unpaired",\n', ""))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    found = script.missing("format", "unpaired")
    assert "lean_ft/settings/data.py: add the name, in FormatName" in found
    assert not any("add an entry to FORMATS" in line for line in found)
