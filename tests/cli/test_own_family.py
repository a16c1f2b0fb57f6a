"""A user's row of a model family, from the first run to the export, as commands in folders of the user."""

import json
import shutil

import pytest
import torch

from lean_ft import load_model
from lean_ft.generation import open_model
from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings import ModelConfig
from lean_ft.system.user_functions import OWN_FAMILIES
from tests.models.conftest import reference_model

ROW = """
from lean_ft.models.families import Family
from lean_ft.models.families.family import UNGATED_ACTIVATION_NAMES
my_arcee = Family({facts}activations=UNGATED_ACTIVATION_NAMES)
"""
RIGHT, WRONG = ROW.replace("{facts}", "facts={'gated': False}, "), ROW.replace("{facts}", "")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a model of an own type, and the working directory beside it; no row is left for other tests."""
    model = reference_model("arcee", {"vocab_size": 768, "head_dim": 16})
    model.save_pretrained(tmp_path / "mine")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_path("tiny") / name, tmp_path / "mine")
    file = tmp_path / "mine" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_type": "my-arcee", "architectures": ["MyArceeForCausalLM"]}))
    monkeypatch.chdir(tmp_path)
    OWN_FAMILIES.clear()
    yield model
    OWN_FAMILIES.clear()


@pytest.mark.long
def test_a_users_family_runs_resumes_generates_and_is_exported_from_another_folder(leanft, mine, tmp_path, monkeypatch):
    row, moved = tmp_path / "row.py", tmp_path / "moved" / "row.py"
    row.write_text(WRONG)
    run = "run finetune model.path=mine model.dtype=float32 device=cpu batch_size=2 data.source=tiny/train.jsonl"
    run = [*run.split(), "data.max_length=32", "output_dir=run", "optimizer.lr=0"]
    family = "model.family=row.py:my_arcee"
    assert "gate_proj" in (answer := leanft(*run, family, "max_steps=1")).err and answer.code == 2
    row.write_text(RIGHT)  # the same process uses the edited row
    assert (answer := leanft(*run, family, "max_steps=1")).code == 0, answer.err
    assert f"leanft chat run {family}" in answer.out  # the command that tries the model
    moved.parent.mkdir()
    row.rename(moved)
    assert (answer := leanft(*run, "model.family=moved/row.py:my_arcee", "max_steps=2")).code == 0, answer.err
    assert '"row.py:my_arcee" then, "moved/row.py:my_arcee" now' in answer.out + answer.err

    monkeypatch.chdir(moved.parent)
    asked = ["run", "generate", tmp_path / "run", "prompt=River", "max_new_tokens=2", "device=cpu", "chat=false"]
    answer = leanft(*asked)
    assert answer.code == 2 and "if you trust this file, set model.family=moved/row.py:my_arcee" in answer.err
    assert leanft(*asked, family).code == 0
    answer = leanft("export", tmp_path / "run", "out")
    assert answer.code == 2 and "or --family moved/row.py:my_arcee" in answer.err
    assert leanft("export", tmp_path / "run", "out", "--family", "row.py:my_arcee").code == 0
    ids = torch.arange(40)[None]
    # With a learning rate of 0, the weights are the model's.
    torch.testing.assert_close(load_model("out")(ids), mine(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
def test_a_row_without_effect_and_a_presets_row_are_refused(leanft, mine, tmp_path):
    (tmp_path / "row.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{RIGHT}")
    (tmp_path / "preset.yaml").write_text("recipe: finetune\nmodel: {path: mine, family: row.py:my_arcee}\n")
    for command in ("plan", "validate"):
        answer = leanft(command, "--config", "preset.yaml", "data.source=tiny/train.jsonl")
        assert answer.code == 2 and "a file whose code this command would run" in answer.err
    assert not (tmp_path / "ran").exists()
    for command in (
        "export tiny out --family row.py:my_arcee",
        "run generate tiny prompt=River device=cpu model.family=row.py:my_arcee",
        "run finetune model.path=tiny device=cpu data.source=tiny/train.jsonl output_dir=run "
        "model.family=row.py:my_arcee",
    ):
        answer = leanft(*command.split())
        assert answer.code == 2 and "no model here has the model_type my_arcee" in answer.err, answer.err
    # In Python, settings that were made for another model refuse none.
    ModelConfig(path="mine", family="row.py:my_arcee")
    assert len(open_model("tiny")[0].layers) == 4
    OWN_FAMILIES.clear()
