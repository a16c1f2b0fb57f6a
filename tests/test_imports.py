"""The check of imports in `scripts/draw_map.py` finds what it looks for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from draw_map import circles, imports_by_string


@pytest.mark.parametrize(("code", "is_found"), [
    ('from importlib import import_module\nimport_module("lean_ft.models.hf_format")', True),
    ('import importlib\nimportlib.import_module(f"lean_ft.{name}")', True),
    ('__import__("lean_ft.models")', True),
    ('import importlib\nimportlib.import_module(".models", "lean_ft")', True),
    ('import importlib\nimportlib.import_module("trackio")', False),
    ("from lean_ft.models import load_model", False),
])  # fmt: skip
def test_a_module_imported_by_a_string_is_found(code, is_found, tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "paths.py").write_text(code)
    assert [one.partition(":")[0] for one in imports_by_string(tmp_path)] == ["lean_ft/hub/paths.py"] * is_found


def test_circles_of_modules_are_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set[str]()}
    assert sorted(circles(edges)) == [["a", "b", "c"], ["d", "e"]]
