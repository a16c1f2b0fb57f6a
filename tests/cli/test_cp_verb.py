"""`leanft cp`: copies of recipes and presets run."""

import pytest

from lean_ft.system import catalog


@pytest.mark.parametrize(
    ("name", "destination", "made"),
    [
        ("toy_single_device", "mine.py", "mine.py"),
        ("toy_single_device", "mine", "mine.py"),
        ("toy_single_device", "folder", "folder/toy_single_device.py"),
        ("toy_single_device", "new/deeper/mine", "new/deeper/mine.py"),
        ("toy_single_device", "version.2", "version.2.py"),
        ("tiny/toy", "mine", "mine.yaml"),
        ("tiny/toy", "mine.yaml", "mine.yaml"),
        ("tiny/toy", "folder/", "folder/toy.yaml"),
        ("tiny/toy", "not_there_yet/", "not_there_yet/toy.yaml"),
        ("tiny/toy", ".", "toy.yaml"),
    ],
)
def test_where_a_copy_goes(leanft, shipped, tmp_path, monkeypatch, name, destination, made):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    answer = leanft.ok("cp", name, destination)
    assert (tmp_path / made).read_bytes() == catalog.find_either(name).read_bytes()
    assert made.removeprefix("./") in answer.out
    assert "Edit it, then: leanft " in answer.out


def test_a_copied_recipe_runs_with_a_copied_preset(leanft, shipped, tmp_path):
    leanft("cp", "toy_single_device", tmp_path / "mine")
    leanft("cp", "tiny/toy", tmp_path / "mine")
    answer = leanft("run", tmp_path / "mine.py", "--config", tmp_path / "mine.yaml")
    assert (answer.code, answer.out) == (0, "ran with tiny 2\n")


def test_nothing_is_overwritten_without_force(leanft, shipped, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("my work")
    refusal = leanft.refused("cp", "toy_single_device", mine)
    assert "--force" in refusal
    assert mine.read_text() == "my work"
    leanft.ok("cp", "toy_single_device", mine, "--force")
    assert mine.read_text() != "my work"


def test_a_file_is_not_copied_onto_itself(leanft, toy_recipe):
    before = toy_recipe.read_text()
    assert leanft("cp", toy_recipe, toy_recipe, "--force").code == 2
    assert toy_recipe.read_text() == before
