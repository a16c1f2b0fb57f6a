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
    for name in ("tests/settings", "recipes"):
        shutil.copytree(script.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    cases = tmp_path / "tests/settings/cases.py"
    cases.write_text(cases.read_text().replace('    "dpo": PAIRS,\n', ""))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    found = script.missing("objective", "dpo")
    assert "tests/settings/cases.py: add the settings of a short run, in BASE" in found
    assert "recipes/dpo.py: write the recipe" not in found
