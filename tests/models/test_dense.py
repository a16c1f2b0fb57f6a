"""Layers after pooling, against sentence-transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from lean_ft.models import REWARD_LABELS, VECTORS, load_model, save_model, stored_labels
from lean_ft.training.checkpoint import restore_weights
from tests.embedding import theirs as st
from tests.models.test_parity import token_ids

pytestmark = pytest.mark.long  # imports sentence-transformers

LAYERS = [(48, 70, False, nn.Identity()), (70, 30, True, nn.Tanh())]
LENGTHS = [20, 7, 1]


def make_folder(folder: Path, transformer: Path, *further: nn.Module) -> Any:
    """A folder of sentence-transformers on a transformer's folder."""
    words = {f"w{i}": i for i in range(101)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w3").save_pretrained(transformer)
    torch.manual_seed(0)
    dense = [
        st.modules.Dense(size, out, bias=bias, activation_function=activation) for size, out, bias, activation in LAYERS
    ]
    modules = [st.modules.Transformer(str(transformer)), st.modules.Pooling(48, "mean"), *dense, *further]
    model = st.library.SentenceTransformer(modules=modules, device="cpu")
    model.save(str(folder), create_model_card=False)
    return model


@pytest.fixture(params=["gemma3_text_both_sides", "qwen3"])
def folders(request, make_checkpoint, tmp_path) -> tuple[Path, Any]:
    transformer, _ = make_checkpoint(request.param)
    return tmp_path / "st", make_folder(tmp_path / "st", transformer, st.modules.Normalize())


def vectors(model, ids, is_token):
    hidden = model(ids, is_token=is_token, return_hidden=True).masked_fill(~is_token[..., None], 0)
    return nn.functional.normalize(model.through_dense(hidden.sum(1) / is_token.sum(1, keepdim=True)), dim=-1)


def test_vectors_and_gradients_equal_sentence_transformers(folders, tmp_path):
    folder, reference = folders
    ids, is_token = token_ids(3, 20), torch.arange(20) < torch.tensor(LENGTHS)[:, None]
    model = load_model(folder, scores=VECTORS)
    assert [tuple(layer.linear.weight.shape) for layer in model.dense] == [(70, 48), (30, 70)]
    assert model.config.vector_size == 30
    expected = reference({"input_ids": ids, "attention_mask": is_token.long()})["sentence_embedding"]
    own = vectors(model, ids, is_token)
    torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    (own * weights).sum().backward()
    (expected * weights).sum().backward()
    for layer, module in zip(model.dense, list(reference)[2:4], strict=True):
        for name, parameter in layer.named_parameters():
            theirs = module.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, theirs, atol=1e-6 * theirs.abs().max().item(), rtol=1e-5)


def test_a_trained_folder_opens_in_sentence_transformers(folders, tmp_path):
    folder, _ = folders
    ids, is_token = token_ids(3, 20), torch.arange(20) < torch.tensor(LENGTHS)[:, None]
    model = load_model(folder, scores=stored_labels(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    save_model(model, tmp_path / "saved")
    for file in folder.rglob("tokenizer*"):  # saved by the caller
        (tmp_path / "saved" / file.name).write_bytes(file.read_bytes())
    reopened = st.library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    found = reopened({"input_ids": ids, "attention_mask": is_token.long()})["sentence_embedding"]
    torch.testing.assert_close(found, vectors(model, ids, is_token), atol=1e-6, rtol=1e-5)
    places = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    saved = {str(f.relative_to(tmp_path / "saved")) for f in (tmp_path / "saved").rglob("*") if f.is_file()}
    assert places - saved <= {"README.md", "special_tokens_map.json"}
    for name in (place for place in places if (place.endswith(".json") and "/" in place) or place == "modules.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((folder / name).read_text())


def test_a_folder_is_written_as_it_was_and_restored(folders, tmp_path):
    folder, _ = folders
    model = load_model(folder, scores=VECTORS)
    save_model(model, tmp_path / "saved")
    for file in folder.rglob("model.safetensors"):
        assert (tmp_path / "saved" / file.relative_to(folder)).read_bytes() == file.read_bytes()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    restore_weights(tmp_path / "saved", model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_labels_of_a_folder_with_modules_are_those_of_what_they_give(folders):
    """The modules of a reranker list no pooling."""
    folder, _ = folders
    assert stored_labels(folder) is VECTORS
    modules = json.loads((folder / "modules.json").read_text())
    of_class = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    reranker = [modules[0], {"idx": 1, "name": "1", "path": "1_LogitScore", "type": of_class}]
    (folder / "modules.json").write_text(json.dumps(reranker))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    assert stored_labels(folder) is (VECTORS if config.get("use_bidirectional_attention") else None)


def test_scores_need_no_layers_after_pooling(folders):
    model = load_model(folders[0], scores=REWARD_LABELS)
    assert model.dense is None and model.config.num_scores == 1


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ("modules.json", lambda m: [*m[:2], {**m[2], "type": "pylate.models.Dense"}], "code of another library"),
        ("modules.json", lambda m: [{**m[0], "type": "sentence_transformers.models.LSTM"}], "first module is LSTM"),
        ("modules.json", lambda m: [m[0], m[2], m[1]], "the modules are Transformer, Dense, Pooling; expected"),
        ("modules.json", lambda m: [{**m[0], "path": "0_T"}, *m[1:]], "weights in the folder 0_T. Set model.path to"),
        ("modules.json", lambda m: [*m[:2], {**m[2], "path": "../2_Dense"}], "expected a name in this folder"),
        ("modules.json", lambda m: {"0": m}, "expected a list of 1 to 16 modules, found an object"),
        ("modules.json", lambda m: [*m[:2], {**m[2], "path": "9_Dense"}], "describes a layer after pooling"),
        ("2_Dense/config.json", lambda c: c | {"in_features": 9}, "in_features is 9; expected 48"),
        ("2_Dense/config.json", lambda c: c | {"use_residual": True}, "use_residual is True"),
        ("2_Dense/config.json", lambda c: c | {"activation_function": "os.system"}, "is 'os.system'; expected one of"),
        ("2_Dense/config.json", lambda c: c | {"bias": True}, "weights lack 2_Dense/linear.bias"),
        ("3_Dense/config.json", lambda c: c | {"out_features": 9}, "3_Dense/linear.bias has the shape"),
    ],
)  # fmt: skip
def test_what_lean_ft_does_not_compute_is_refused_by_name(place, change, message, make_checkpoint, tmp_path):
    make_folder(tmp_path / "st", make_checkpoint("qwen3")[0])
    file = tmp_path / "st" / place
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(tmp_path / "st", scores=VECTORS)
