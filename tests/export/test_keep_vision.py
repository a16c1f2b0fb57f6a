"""--keep-vision writes the trained weights and keeps all other tensors bit for bit."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lean_ft.export import export_folder
from lean_ft.models import load_model, save_model
from lean_ft.models.source import tensors_on_disk
from tests.export.test_folder import stored
from tests.models.conftest import OTHER_WHOLES, WHOLES, whole_model
from tests.models.tiny_wholes import RENAMED_LAYERS
from tests.peft.test_multimodal import with_older_names

# Kinds of folders of multimodal models that differ in their names; text-only folders are in
# tests/models/test_parity.py.
KINDS = ("Gemma3", "Mistral3", "Qwen3_5", "Gemma4", "Llama4")
IDS = torch.arange(3, 43).view(2, 20)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_is_loaded_and_saved_whole_is_the_same(name, tmp_path):
    whole_model(name).save_pretrained(tmp_path / "new")
    for original in (tmp_path / "new", with_older_names(tmp_path / "new", tmp_path / "old")):
        save_model(load_model(original), saved := original.with_suffix(".saved"), whole=True)
        before, after = stored(original), stored(saved)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert (saved / "config.json").read_bytes() == (original / "config.json").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("name", [*WHOLES, *(one for one in OTHER_WHOLES if one.values[0] not in RENAMED_LAYERS)])
def test_trained_tensors_are_replaced_and_the_others_kept(name, tmp_path):
    original = tmp_path / "original"
    whole_model(name).save_pretrained(original, max_shard_size="40KB")
    (original / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    index = json.loads((original / "model.safetensors.index.json").read_text())
    first = original / min(index["weight_map"].values())
    save_file({**load_file(first), "mtp.norm.weight": torch.ones(48)}, first, {"format": "pt"})
    index["weight_map"]["mtp.norm.weight"] = first.name
    (original / "model.safetensors.index.json").write_text(json.dumps(index))

    model = load_model(original)
    with torch.no_grad():
        for tensor in tensors_on_disk(model).values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    save_model(model, tmp_path / "trained")
    destination = tmp_path / "whole"
    exported = export_folder(tmp_path / "trained", destination, keep_vision=True, base=original)

    before, after = stored(original), stored(destination)
    assert before.keys() == after.keys()
    kept = {key for key in before if torch.equal(before[key], after[key])}
    of_text = ("language_model", "lm_head", "model.layers.", "model.embed_tokens.", "model.norm.")
    is_text = {key: any(part in key for part in of_text) and "vision_model." not in key for key in before}
    assert kept == {key for key in before if not is_text[key]}
    assert f"{len(kept)} unchanged tensors of" in str(exported) and "mtp.norm.weight" in kept
    for file in ("config.json", "preprocessor_config.json"):
        assert (destination / file).read_bytes() == (original / file).read_bytes()
    reopened, report = transformers.AutoModelForImageTextToText.from_pretrained(destination, output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        torch.testing.assert_close(reopened(input_ids=IDS).logits, model(IDS), atol=1e-4, rtol=1e-4)


def test_a_folder_that_reads_no_images_is_refused(qwen_folder, tmp_path):
    with pytest.raises(ValueError, match="is not a model that reads images"):
        export_folder(qwen_folder, tmp_path / "out", keep_vision=True, base=qwen_folder)
    with pytest.raises(ValueError, match="does not name the model that it was taken from"):
        export_folder(qwen_folder, tmp_path / "out", keep_vision=True)
