"""A run keeps the commit of its model across restarts."""

import json
from pathlib import Path

import pytest

from lean_ft.cli.run import run_recipe
from lean_ft.settings.run import DEFAULT_OUTPUT_DIR
from lean_ft.training.starting import settled
from tests.hub.hub_server import Repository
from tests.training.toy_runs import QWEN, digests

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def repository(hub_server):
    """`org/toy`, which later moves to another commit with other weights."""

    def files(initializer_range: float) -> dict[str, bytes]:
        config = {**QWEN, "initializer_range": initializer_range}
        return {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}", "model.safetensors": b"weights"}

    repository = Repository({OLD: files(0.02), NEW: files(0.5)}, {"main": OLD, "v1": OLD})
    hub_server.repositories["org/toy"] = repository
    return repository


@pytest.fixture
def train(recipe, config):
    def run(output_dir, **settings):
        with settled(config(output_dir, **{"model__path": "org/toy", **settings})) as cfg:
            recipe.main(cfg)
        return output_dir

    return run


def test_the_commit_is_recorded(repository, train, tmp_path, capsys):
    run = train(tmp_path / "run", max_steps=1)
    assert f"path: org/toy@{OLD}" in (run / "config.yaml").read_text()
    assert f"hub         model org/toy@{OLD}\n" in capsys.readouterr().out
    state = json.loads((run / "step_00000001/training_state/training_state.json").read_text())
    assert state["settings"]["model.path"] == f"org/toy@{OLD}"


@pytest.mark.long
@pytest.mark.parametrize("saved", [True, False])
def test_a_resumed_run_stays_where_it_began(repository, train, tmp_path, capsys, recipe, monkeypatch, saved):
    whole = train(tmp_path / "whole", max_steps=4)
    part = tmp_path / "part"
    if saved:
        train(part, max_steps=2)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "FAILING_STEP", 1)
            with pytest.raises(KeyError):
                train(part, max_steps=2)
    repository.revisions["main"] = NEW
    capsys.readouterr()
    train(part, max_steps=4)
    assert f"model org/toy@{OLD}, the commit that this run began with" in capsys.readouterr().out
    assert f"path: org/toy@{OLD}" in (part / "config.yaml").read_text()
    assert digests(part / "step_00000004") == digests(whole / "step_00000004")


@pytest.mark.long
def test_a_run_without_output_dir_finds_its_own_run(repository, recipe, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cfg = config(DEFAULT_OUTPUT_DIR, model__path="org/toy", max_steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "FAILING_STEP", 2)
        with pytest.raises(KeyError):
            run_recipe(recipe, cfg)
    repository.revisions["main"] = NEW
    assert run_recipe(recipe, cfg) == Path("runs/toy_toy_recipe")
    assert f"model org/toy@{OLD}, the commit that this run began with" in capsys.readouterr().out
    assert run_recipe(recipe, cfg) == Path("runs/toy_toy_recipe_2")
    assert f"path: org/toy@{NEW}" in Path("runs/toy_toy_recipe_2/config.yaml").read_text()


@pytest.mark.long
def test_a_branch_from_a_checkpoint_stays_and_a_new_run_takes_the_newest(repository, train, tmp_path):
    run = train(tmp_path / "run", max_steps=2)
    repository.revisions["main"] = NEW
    branch = train(tmp_path / "branch", max_steps=4, resume=run / "step_00000002")
    assert f"path: org/toy@{OLD}" in (branch / "config.yaml").read_text()
    new = train(tmp_path / "new", max_steps=1, resume="never")
    assert f"path: org/toy@{NEW}" in (new / "config.yaml").read_text()


@pytest.mark.long
def test_a_named_branch_that_moved_is_another_model(repository, train, tmp_path):
    run = train(tmp_path / "run", max_steps=1, model__path="org/toy@main")
    train(run, max_steps=2, model__path="org/toy@v1")  # the same commit by another name
    repository.revisions["main"] = NEW
    with pytest.raises(ValueError, match=rf'model\.path: "org/toy@{OLD}" then, "org/toy@{NEW}" now'):
        train(run, max_steps=3, model__path="org/toy@main")
