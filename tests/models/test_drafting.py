"""Drafting layers (multi-token prediction): a saved folder has their tensors, or its config.json promises none."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lean_ft.export import export_folder
from lean_ft.models import load_model, save_model
from lean_ft.training.checkpoint import checkpoint_bytes, restore_weights
from lean_ft.training.summary import describe_model
from tests.models.conftest import whole_model
from tests.models.test_dequantized import BLOCK, edit, in_8_bits

SIZE = {"shortest_edge": 64, "longest_edge": 4096}
# The fields of the published config.json, and a name as the published folders have it; N is the number of layers.
PUBLISHED = {
    "deepseek_v3": ({"num_nextn_predict_layers": 1}, "model.layers.N.eh_proj.weight"),
    "glm4_moe": ({"num_nextn_predict_layers": 1}, "model.layers.N.enorm.weight"),
    "hy_v3": ({"num_nextn_predict_layers": 1}, "model.layers.N.eh_proj.weight"),
    "minimax_m2": ({"num_mtp_modules": 3, "use_mtp": True}, "model.layers.N.eh_proj.weight"),
    "ernie4_5_moe": ({"num_nextn_predict_layers": 1}, "model.mtp_block.0.mlp.up_proj.weight"),
    "exaone_moe": ({"num_nextn_predict_layers": 1}, "mtp.layers.0.mlp.up_proj.weight"),
    "mellum": ({"num_nextn_predict_layers": 1}, "mtp.fc.weight"),
    "mimo_v2_flash": ({}, "model.mtp.layers.0.eh_proj.weight"),
    "nemotron_h": ({"num_nextn_predict_layers": 1}, "mtp.layers.0.eh_proj.weight"),
    "qwen3_next": ({}, "mtp.layers.0.mlp.gate.weight"),
    "qwen3_5_text": ({"mtp_num_hidden_layers": 1}, "mtp.norm.weight"),
    "Qwen3_5": ({"mtp_num_hidden_layers": 1}, "mtp.norm.weight"),  # its language model alone
}


@pytest.fixture
def make_folder(make_checkpoint, tmp_path_factory):
    """A function that saves a case as a new folder."""

    def make(case: str) -> Path:
        if case != "Qwen3_5":
            return make_checkpoint(case)[0]
        folder = tmp_path_factory.mktemp(case)
        whole_model(case).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["deepstack_visual_indexes"] = []
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 4, "size": SIZE}))
        return folder

    return make


def with_drafting(folder: Path, case: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Add a family's fields and tensors to a folder, and return the tensors."""
    fields, name = PUBLISHED[case]
    config = json.loads((folder / "config.json").read_text())
    place = config["text_config"] if case == "Qwen3_5" else config
    place |= fields
    (folder / "config.json").write_text(json.dumps(config))
    name = name.replace("N", str(place.get("num_hidden_layers")))
    beside = {f"{name.rpartition('.')[0]}.{key}": tensor for key, tensor in tensors.items()}
    added = {name: torch.randn(3, 5), f"{name}_bias": torch.tensor(2.0), f"{name}_empty": torch.ones(0, 2), **beside}
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **added}, folder / "model.safetensors", {"format": "pt"})
    return added


@pytest.mark.first(1)
@pytest.mark.parametrize("case", PUBLISHED)
def test_their_tensors_are_copied_as_they_are(case, make_folder, tmp_path):
    folder = make_folder(case)
    added, ids = (
        with_drafting(folder, case, half=torch.randn(40, 7).half(), counts=torch.arange(9)),
        torch.arange(3, 23)[None],
    )
    model = load_model(folder)
    if case != "Qwen3_5":
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
    assert f"its {len(added)} tensors of drafting layers are copied, not trained" in describe_model(model)
    for number in (1, 2):  # the saved folder is read and saved in turn, in several files
        save_model(model, tmp_path / str(number), max_shard_bytes=10_000)
        saved = {k: v for file in (tmp_path / str(number)).glob("*.safetensors") for k, v in load_file(file).items()}
        for name, tensor in added.items():
            assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor), name
        config = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert PUBLISHED[case][0].items() <= config.items()
        again = load_model(tmp_path / str(number))
        assert torch.equal(again(ids), model(ids))
        model = again
    restore_weights(tmp_path / "2", model)
    sizes = sum(tensor.nbytes for tensor in added.values())
    model.source.drafting, with_them = {}, checkpoint_bytes(model, 0, None)
    assert with_them - checkpoint_bytes(model, 0, None) == sizes


@pytest.mark.first(2)
@pytest.mark.parametrize("case", ["glm4_moe", "minimax_m2", "qwen3_5_text", "Qwen3_5"])
def test_a_folder_without_them_promises_none(case, make_folder, tmp_path):
    folder = make_folder(case)
    stored = load_file(folder / "model.safetensors")
    with_drafting(folder, case)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fields = PUBLISHED[case][0]
    for images in ("none", "frozen") if case == "Qwen3_5" else ("none",):
        model = load_model(folder, images=images)
        assert (
            f"without the drafting layers that config.json promises ({next(iter(fields))} is saved as 0"
            in describe_model(model)
        )
        save_model(model, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config |= config.get("text_config", {})
        assert {name: config[name] for name in fields} == {name: type(value)(0) for name, value in fields.items()}
    save_model(load_model(folder, random_init=True), tmp_path)
    assert not any(json.loads((tmp_path / "config.json").read_text())[name] for name in fields)


def test_a_layer_behind_the_last_that_is_not_promised_is_refused(make_folder):
    folder = make_folder("deepseek_v3")
    with_drafting(folder, "deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match="unexpected tensors: model.layers.3.eh_proj.weight"):
        load_model(folder)


def test_those_that_cannot_be_copied_are_left_out_with_a_line(make_checkpoint, tmp_path, capsys):
    """The folder is gone; the vocabulary grows, and they have its rows; a dtype that is not known."""
    folder, _ = make_checkpoint("glm4_moe")
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    with_drafting(folder, "glm4_moe", **{"embed_tokens.weight": torch.randn(rows, 4)})
    assert load_model(folder).source.drafting
    assert not load_model(folder, new_ids=[rows]).source.drafting
    model = load_model(folder)
    shutil.move(folder, tmp_path / "away")
    save_model(model, tmp_path / "saved")
    assert f"saved without drafting layers: {folder} no longer has them" in capsys.readouterr().out
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not any("enorm" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))
    with_drafting(tmp_path / "saved", "glm4_moe", odd=torch.zeros(3, dtype=torch.complex64))
    assert not load_model(tmp_path / "saved").source.drafting


def test_they_are_found_after_a_change_of_the_current_folder(make_folder, tmp_path, monkeypatch):
    """User code may change it after a model was read from a relative path."""
    folder = make_folder("glm4_moe")
    with_drafting(folder, "glm4_moe")
    monkeypatch.chdir(folder.parent)
    model = load_model(folder.name)
    monkeypatch.chdir(tmp_path)
    save_model(model, tmp_path / "saved")
    assert any("enorm" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_fp8_ones_are_dequantized_and_exports_have_them(make_checkpoint, tmp_path):
    folder, _ = make_checkpoint("glm4_moe", dtype=torch.bfloat16, head_dim=16)
    with_drafting(folder, "glm4_moe", **{"self_attn.o_proj.weight": torch.randn(48, 80)})
    expected = edit(folder, in_8_bits(BLOCK), {"quant_method": "fp8", "weight_block_size": BLOCK})
    exported = export_folder(folder, tmp_path / "exported")
    assert "tensors of drafting layers are copied" in str(exported)
    saved = load_file(tmp_path / "exported" / "model.safetensors")
    (name,) = [name for name in expected if "enorm" in name]
    assert torch.equal(saved[name], expected[name])
