"""A folder of PyTorch's distributed checkpoints is read by PyTorch itself, into transformers' model."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from lean_ft.export import export_dcp, export_folder

IDS = torch.arange(20)[None]


@pytest.mark.first
@pytest.mark.parametrize("tied", [False, True])
def test_pytorch_loads_it_into_a_transformers_model(make_model_folder, tmp_path, tied):
    source = make_model_folder(tie_word_embeddings=tied)
    folder = export_dcp(source, tmp_path / "model").destination
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    state = model.state_dict()
    assert dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == state.keys()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state)
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_a_run_is_exported_with_its_tokenizer_and_only_an_export_is_replaced(run_directory, tmp_path):
    destination = tmp_path / "exports" / "model"
    export_folder(run_directory, destination)
    export_dcp(run_directory, destination, "float32", force=True)
    assert transformers.AutoTokenizer.from_pretrained(destination).encode("Hello")
    found = {"model.norm.weight": torch.zeros(64)}
    dcp.load(found, checkpoint_id=destination, no_dist=True)
    assert (found["model.norm.weight"] == 2).all()
    assert not list(destination.glob("*.safetensors"))
    export_folder(run_directory, destination, force=True)
    assert not list(destination.glob("*.distcp"))
    (destination / "thesis.tex").write_text("my work")
    with pytest.raises(ValueError, match="has files that no export writes"):
        export_dcp(run_directory, destination, force=True)
