"""`scripts/missing.py` names the places where something new is still missing, and no place of something that is
complete."""

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
