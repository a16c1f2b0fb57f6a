"""Model paths become folders."""

from pathlib import Path

import pytest

from lean_ft.hub import paths
from lean_ft.peft.stored_adapter import read_adapter
from tests.hub.hub_server import Repository

COMMIT = "c" * 40


def test_an_existing_folder_has_precedence(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert paths.resolve_model_path(str(tmp_path)) == tmp_path
    assert paths.resolve_model_path("org/name") == Path("org/name")
    assert paths.resolve_model_path("~/org/name") == tmp_path / "org" / "name"


def test_a_missing_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-1b").mkdir()
    with pytest.raises(
        ValueError,
        match=r"'nowhere' does not exist\. Expected a folder .*\(org/name\), a GGUF file, or an embedded model",
    ):
        paths.resolve_model_path("nowhere")
    with pytest.raises(ValueError, match=r"does not exist\. Did you mean 'llama-1b'\?"):
        paths.resolve_model_path("lama-1b")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; expected the folder"):
        paths.resolve_model_path(tmp_path / "model.safetensors")


def test_a_run_directory_means_its_newest_checkpoint(tmp_path):
    for step in (2, 10):
        (tmp_path / "run" / f"step_{step:08}").mkdir(parents=True)
    assert paths.resolve_model_path(tmp_path / "run") == tmp_path / "run/step_00000010"
    with pytest.raises(ValueError, match=r"has no adapter: .* It is a run directory: .* such as .*step_00000010\.$"):
        read_adapter(tmp_path / "run")
    (tmp_path / "run" / "config.json").touch()
    assert paths.resolve_model_path(tmp_path / "run") == tmp_path / "run"


def test_a_repository_is_a_folder_in_the_cache(hub_server, tmp_path):
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
    hub_server.repositories["org/name"] = Repository({COMMIT: files}, {"main": COMMIT, "v1": COMMIT})
    folder = paths.resolve_model_path("org/name", weights=False)
    assert folder.is_relative_to(tmp_path)
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert paths.resolve_model_path("org/name@v1") == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert paths.path_at_commit("org/name@v1") == f"org/name@{COMMIT}"


def test_a_missing_repository_suggests_the_nearest_folder(hub_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    for resolve in (paths.resolve_model_path, paths.path_at_commit):
        with pytest.raises(
            ValueError, match=r"'models/tinny' is not a folder here\. Did you mean 'models/tiny'\?.*Hub has no"
        ):
            resolve("models/tinny")


@pytest.mark.parametrize("folder", ["runs", "my_runs"])
def test_a_missing_run_is_not_looked_up_on_the_hub(hub_server, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder / "tiny").mkdir(parents=True)
    (tmp_path / folder / "tiny" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=rf"'{folder}/tinny' does not exist\. Did you mean '{folder}/tiny'\?"):
        paths.resolve_model_path(f"{folder}/tinny")
    assert hub_server.requests == []


@pytest.mark.parametrize("path", ["tiny", "runs/tiny", f"org/name@{COMMIT}", "no such thing"])
def test_paths_that_need_no_commit(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert paths.path_at_commit(path) == path
