"""Recipes and presets are found by name; shipped recipes are short and independent, and presets fit one."""

import ast

import pytest

from lean_ft.system import catalog


def test_a_file_in_the_working_directory_does_not_hide_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, file in catalog.recipes().items():
        (tmp_path / name).mkdir()
        assert catalog.find_recipe(name) == file


@pytest.mark.parametrize("name", list(catalog.recipes()))
def test_a_shipped_recipe_is_short_and_imports_no_recipe_or_framework(name):
    imported, source = set(), catalog.recipes()[name].read_text()
    assert len(source.splitlines()) <= 160
    assert catalog.summary(catalog.recipes()[name])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert "lean_ft" in imported
    assert not imported & {"recipes", "transformers", "peft", "trl", "datasets", *catalog.recipes()}
