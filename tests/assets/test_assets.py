"""How a model path becomes a folder."""

from pathlib import Path

import pytest

from lean_ft import assets


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert assets.resolve_model_path(tmp_path) == tmp_path
    assert assets.resolve_model_path(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert assets.resolve_model_path("org/name") == Path("org/name")


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert assets.resolve_model_path("~/model") == tmp_path / "model"


def test_tiny_is_the_embedded_model(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "_TINY", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"embedded model is missing.*reinstall"):
        assets.resolve_model_path("tiny")
    (tmp_path / "tiny" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tiny" / "model")
    assert assets.resolve_model_path("tiny") == tmp_path / "tiny" / "model"


def test_what_is_no_folder_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"'org/name-1\.5B' is not a folder here.*download it first"):
        assets.resolve_model_path("org/name-1.5B")
    with pytest.raises(ValueError, match=r"does not exist; expected a folder that holds config\.json, or `tiny`"):
        assets.resolve_model_path(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; expected the folder"):
        assets.resolve_model_path(tmp_path / "model.safetensors")
