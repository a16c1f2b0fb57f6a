"""Incomplete and damaged checkpoints are not used."""

import hashlib
import json
import random
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

from lean_ft.system.random_state import capture_random_state, restore_random_state
from lean_ft.system.run_directory import check_whole, manifest_digest
from lean_ft.system.shards import part_of
from lean_ft.training.bad_steps import TrainingFailed
from lean_ft.training.checkpoint import restore_optimizer, restore_weights
from tests.training.toy_runs import digests


def flip_a_byte(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_manifest_names_every_file_with_its_sha256(run):
    folder = run / "step_00000004"
    listed = subprocess.run(
        "find . -type f ! -name manifest.json -exec sha256sum {} +",
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {line.split("  ./")[1]: line.split("  ./")[0] for line in listed.stdout.splitlines()}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == expected
    assert {"model.safetensors", "config.json", "training_state/optimizer.safetensors"} < expected.keys()


def test_manifest_is_written_last(run):
    folder = run / "step_00000004"
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert max(written, key=lambda path: written[path]) == folder / "manifest.json"


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "training_state/optimizer.safetensors",
        "training_state/training_state.json",
        "training_state/random_state.json",
        "config.json",
        "manifest.json",
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(name, run, train, tmp_path, capsys):
    flip_a_byte(run / "step_00000004" / name, position=-20)
    capsys.readouterr()
    train(run, max_steps=6)
    said = capsys.readouterr().out
    what = "does not describe this checkpoint" if name == "manifest.json" else "does not match its checksum"
    assert said.count(f"step_00000004/{name} {what}") == 1
    assert "step_00000002, after step 2 of 6" in said
    assert digests(run / "step_00000006") == digests(train(tmp_path / "whole", max_steps=6) / "step_00000006")


def test_missing_and_shortened_files_are_named(run):
    folder = run / "step_00000004"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(ValueError, match=r"model.safetensors has \d+ bytes where manifest.json has"):
        check_whole(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        check_whole(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json cannot be read"):
        check_whole(folder)


def test_damaged_checkpoints_named_by_path_or_the_last_are_refused(run, train, tmp_path):
    flip_a_byte(run / "step_00000002/model.safetensors")
    with pytest.raises(ValueError, match=r"step_00000002/model.safetensors does not match"):
        train(tmp_path / "branch", resume=run / "step_00000002")
    flip_a_byte(run / "step_00000004/model.safetensors")
    with pytest.raises(ValueError, match=r"No whole checkpoint is left .*does not match"):
        train(run, max_steps=6)  # instead of a new run
    assert (run / "step_00000004").exists()


def test_half_written_checkpoints_are_never_picked_and_removed_with_a_word(run, train, capsys):
    half = run / ".step_00000005.tmp-12345"
    (half / "training_state").mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"...")
    capsys.readouterr()
    train(run, max_steps=6)
    said = capsys.readouterr().out
    assert ".step_00000005.tmp-12345, an incomplete checkpoint" in said
    assert "step_00000004, after step 4 of 6" in said
    assert not half.exists()


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(run, train, recipe, monkeypatch):
    def fail(self, path):
        (path / "tokenizer.json").write_text("{")
        raise OSError("No space left on device")

    before = sorted(p.name for p in run.iterdir())
    monkeypatch.setattr(recipe.Tokenizer, "save", fail)
    with pytest.raises(TrainingFailed, match="No space left"):
        train(run, max_steps=6)
    assert sorted(p.name for p in run.iterdir()) == before


def test_weights_of_another_model_are_refused(run, recipe, model_folder):
    model = recipe.load_model(model_folder, random_init=True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch.float32 in .* and .* torch.bfloat16 in the model"):
        restore_weights(run / "step_00000004", model)
    with pytest.raises(ValueError, match="not a checkpoint of this model: only"):
        restore_weights(run / "step_00000004", nn.Linear(2, 2))


def test_a_manifest_that_leads_elsewhere_is_refused(run):
    """The digest detects accidental damage; these manifests are forged."""
    folder = run / "step_00000004"
    manifest = json.loads((folder / "manifest.json").read_text())
    (run / "other").write_text("x")
    entry = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    for name in ("../other", str(run / "other"), "a/../../other"):
        files = {**manifest["files"], name: entry}
        forged = {**manifest, "files": files, "sha256": manifest_digest(4, files)}
        (folder / "manifest.json").write_text(json.dumps(forged))
        with pytest.raises(ValueError, match=r"manifest.json does not describe this checkpoint"):
            check_whole(folder)
    files = {name: manifest["files"][name] for name in manifest["files"] if name != "training_state/random_state.json"}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files, "sha256": manifest_digest(4, files)}))
    with pytest.raises(ValueError, match=r"manifest.json does not describe this checkpoint"):
        check_whole(folder)


def test_optimizer_state_of_another_shape_is_refused_before_it_takes_memory(run):
    class Stored:
        def state_parts(self):
            return {"model.norm.weight.exp_avg": part_of(torch.zeros(3))}

        def load_state_dict(self, tensors):
            pytest.fail("nothing is read")

    with pytest.raises(ValueError, match=r"model.norm.weight.exp_avg is F32 of shape \[16\], but the optimizer has"):
        restore_optimizer(run / "step_00000004", Stored())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draws(device):
    # gauss and randn of one number leave the second number of a pair in the generator's state.
    return (
        [random.random(), random.gauss(0, 1)],
        [np.random.rand(), np.random.randn()],
        torch.randn(5).tolist(),
        torch.randn(5, device=device).tolist(),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_draws_repeat_after_a_trip_through_json(device):
    device = torch.device(device)
    draws(device)
    state = json.loads(json.dumps(capture_random_state(device)))
    first = draws(device)
    assert draws(device) != first
    restore_random_state(state, device)
    assert draws(device) == first
