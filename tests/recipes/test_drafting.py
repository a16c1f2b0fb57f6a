"""Runs that train drafting layers: resumed, with other techniques, planned and saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_ft.export import export_folder
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model
from lean_ft.settings import ModelConfig
from tests.models.drafting_checkpoints import checkpoint_with_drafting
from tests.parallel.processes import on_ranks
from tests.recipes.conftest import Train, config_of, run_recipe
from tests.recipes.conftest import planned as planned_run

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

RECIPE = "finetune"
SIZES = {"vocab_size": 768, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
RUN = ("model.dtype=float32", "model.mtp=train", "device=cpu", "plan=false", "data.source=tiny/validation.jsonl")
RUN += ("data.max_length=64", "data.packing=bfd", "batch_size=2", "optimizer.lr=1e-3", "max_steps=4")
JOINT = "model.mtp_trunk=train"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a drafting layer and the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("drafting")
    checkpoint_with_drafting(folder, "glm4_moe", 1, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((resolve_model_path("tiny") / name).read_bytes())
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(folder: Path, base: Path) -> set[str]:
    before, after = tensors(base), tensors(folder)
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_a_frozen_trunk_stays_and_a_resumed_run_has_the_same_bits(train: Train, folder: Path, tmp_path: Path) -> None:
    given = (*RUN, f"model.path={folder}", "save_every=2", "keep_last=9", "data.validation_fraction=0.05")
    whole = train(*given, output="whole")
    steps = [line for line in whole if "loss" in line]
    assert len(steps) == 4 and all(line["loss"] == line["mtp_loss"] for line in steps)
    evaluation = next(line for line in whole if "eval_loss" in line)
    assert evaluation.keys() >= {"eval_mtp_loss", "eval_mtp_accuracy", "eval_mtp_accepted", "eval_trunk_loss"}
    place = f"model.layers.{json.loads((folder / 'config.json').read_text())['num_hidden_layers']}."
    trained = changed(tmp_path / "whole/step_00000004", folder)
    assert trained and all(name.startswith(place) for name in trained)
    assert json.loads((tmp_path / "whole/step_00000004/config.json").read_text())["num_nextn_predict_layers"] == 1
    state = load_file(tmp_path / "whole/step_00000004/training_state/optimizer.safetensors")
    assert all(place in name for name in state.keys() - {"step", "skipped_steps"}) and len(state) > 2
    train(*given, f"resume={tmp_path / 'whole/step_00000002'}", output="resumed")
    one, other = (tensors(tmp_path / name / "step_00000004") for name in ("whole", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        (("optimizer.in_backward=true",), True),
        (("memory.activation_checkpointing=full",), True),
        (("memory.activation_checkpointing=selective", JOINT), True),
        pytest.param(("compile=true",), False, marks=pytest.mark.long),
        (("data.packing=padding_free",), None),
    ],
)
def test_techniques_compute_the_same_run(train: Train, folder: Path, settings: tuple[str, ...], exact) -> None:
    given = (*RUN, f"model.path={folder}", *(one for one in settings if one == JOINT))
    plain, other = train(*given, output="plain"), train(*given, *settings, output="other")
    pairs = [(a["loss"], b["loss"]) for a, b in zip(plain, other, strict=False) if "loss" in a]
    if exact is None:  # rows hold other documents; a run is a run
        assert all(number > 0 for pair in pairs for number in pair)
    else:
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], rel=0 if exact else 1e-5)


def test_a_training_trunk_changes_with_its_embedding(train: Train, folder: Path, tmp_path: Path) -> None:
    lines = train(*RUN, f"model.path={folder}", JOINT, "model.mtp_weight=0.5")
    assert all(line["loss"] != line["mtp_loss"] for line in lines if "loss" in line)
    trained = changed(tmp_path / "run/step_00000004", folder)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"} <= trained


def test_new_layers_start_at_random_and_are_promised(train: Train, folder: Path, tmp_path: Path, capsys) -> None:
    run_recipe(RECIPE, tmp_path / "trunk", *RUN, f"model.path={folder}", "model.mtp=drop", "max_steps=1")
    dropped = tmp_path / "trunk/step_00000001"
    config = json.loads((dropped / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert not any(name.startswith(f"model.layers.{config['num_hidden_layers']}.") for name in tensors(dropped))
    train(*RUN, f"model.path={dropped}")
    assert "with 1 drafting layer, new and random, because the folder has none" in capsys.readouterr().out
    saved = tmp_path / "run/step_00000004"
    assert json.loads((saved / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert tensors(saved).keys() == tensors(folder).keys()
    exported = tmp_path / "exported"
    export_folder(saved, exported)
    assert not changed(exported, saved)
    again = load_model(ModelConfig(path=str(exported), dtype="float32", mtp="train"))
    assert again.config.num_drafting == 1


@pytest.mark.long
def test_a_plan_counts_the_layers(folder: Path) -> None:
    given = (*RUN, f"model.path={folder}", "optimizer.name=adamw")
    alone = planned_run(RECIPE, *given, device=None).peak.bytes_by_label
    joint = planned_run(RECIPE, *given, JOINT, device=None).peak.bytes_by_label
    model = load_model(config_of(RECIPE, *given).model)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert alone["weights"] == joint["weights"] == whole + sum(buffer.nbytes for buffer in model.buffers())
    for parts, expected in ((alone, 2 * trained), (joint, 2 * whole)):  # two moments
        assert 0 <= parts["optimizer state"] - expected < 2**14


def on_a_rank(folder: Path, top: Path) -> None:
    for name, more in RANKS.items():
        run_recipe(RECIPE, top / name, *RUN, f"model.path={folder}", "gradient_accumulation_steps=2", *more)


RANKS = {"frozen": (), "joint": (JOINT,), "frozen, cut": ("parallel.vocabulary=cut",)}


@pytest.mark.long
def test_two_processes_equal_one(folder: Path, tmp_path: Path) -> None:
    on_ranks(2, on_a_rank, folder, tmp_path / "two")
    for name, more in RANKS.items():
        given = [one for one in more if "parallel" not in one]
        one = run_recipe(
            RECIPE, tmp_path / "one" / name, *RUN, f"model.path={folder}", "gradient_accumulation_steps=2", *given
        )
        other = [json.loads(line) for line in (tmp_path / "two" / name / "metrics.jsonl").read_text().splitlines()]
        for a, b in zip(one, other, strict=True):
            for key in {"loss", "mtp_loss", "mtp_accuracy", "grad_norm", "eval_loss"} & a.keys():
                assert b[key] == pytest.approx(a[key], rel=1e-5), (name, key)
        first, second = (tensors(tmp_path / run / name / "step_00000004") for run in ("one", "two"))
        assert all(torch.allclose(first[key], second[key], rtol=1e-3, atol=1e-4) for key in first)
