"""Saved folders open in sentence-transformers and give equal vectors and scores; strangers' files are read or
refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lean_ft.embedding.encode import Embedder, open_embedder, open_reranker
from lean_ft.embedding.folder import ScoresOf, VectorsOf, as_chat_template
from lean_ft.export import export_adapter, export_dcp, export_folder
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.models.beside import files_beside, is_beside
from lean_ft.models.config import DenseConfig
from lean_ft.models.modules_json import fields_of_dense
from lean_ft.system.shards import part_of
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.checkpoint import CheckpointState, write_checkpoint
from tests.embedding import theirs as st
from tests.embedding.conftest import Save, with_adapter

TEXTS = ["Which city is the capital of Zanemar?", "Tom has 48 apples. " * 12, "x", "<|user|> and <|end|>", " a  b "]
IN_FLOAT32 = {"dtype": "float32"}
WITH_PROMPTS = VectorsOf("last", True, "Instruct: find.\nQuery: ", "passage: ", 40)
TEMPLATE = "<|begin|>Judge {x} of {query}.\nQuery: {query}\nPassage: '{passage}'\nA \"word\":<|assistant|>"
PASSAGES = ["It is Qor.", "Tom has 48 apples. " * 40, "", "a {passage} {query} <|end|>"]


def _theirs(folder: Path) -> Any:
    return st.library.SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs=IN_FLOAT32)


def _assert_equal_vectors(folder: Path) -> None:
    ours, theirs = open_embedder(folder, "cpu", "float32"), _theirs(folder)
    for used_as, encode in (("query", theirs.encode_query), ("passage", theirs.encode_document), (None, theirs.encode)):
        expected = encode(TEXTS)
        lengths = np.linalg.norm(expected, axis=1, keepdims=True)  # 1 if the vectors are normalized
        np.testing.assert_allclose(ours.encode(TEXTS, used_as).numpy() / lengths, expected / lengths, rtol=0, atol=1e-6)


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", ["adapter", "full"])
@pytest.mark.parametrize("how", [
    WITH_PROMPTS,
    VectorsOf("mean", False, "", "", None, (), {"other": "Other: "}, "other", "dot"),
    VectorsOf("cls", True, "q: ", "", 24, default_prompt="query"),
], ids=lambda how: how.pooling)  # fmt: skip
@pytest.mark.long
def test_vectors_of_a_saved_folder_equal_sentence_transformers(save_folder: Save, how: VectorsOf, kind: str):
    folder = save_folder(how, kind)
    assert VectorsOf.read(folder) == (how if how.max_length else replace(how, max_length=512))
    _assert_equal_vectors(folder)


@pytest.mark.long
def test_a_tokenizer_without_a_chat_template(save_folder: Save):
    _assert_equal_vectors(save_folder(WITH_PROMPTS, chats=False))


@pytest.mark.long
def test_every_kind_of_export_keeps_the_files(save_folder: Save, tmp_path: Path):
    """Merged and copied folders give the adapter's vectors in sentence-transformers too."""
    adapter, full = save_folder(WITH_PROMPTS, "adapter"), save_folder(WITH_PROMPTS)
    files = files_beside(full)
    assert len(files) == 4
    export_folder(full, tmp_path / "copied")
    export_folder(adapter, tmp_path / "merged", merge=True, dtype="float32")
    export_adapter(adapter, tmp_path / "alone")
    export_dcp(full, tmp_path / "dcp")
    for name in ("copied", "merged", "alone", "dcp"):
        assert files_beside(tmp_path / name) == files, name
    expected = open_embedder(adapter, "cpu", "float32").encode(TEXTS, "query").numpy()
    for name in ("merged", "alone"):
        np.testing.assert_allclose(_theirs(tmp_path / name).encode_query(TEXTS), expected, rtol=0, atol=2e-6)
    export_folder(full, tmp_path / "copied", force=True)  # replaces an export, which has these files


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_checkpoints_of_a_run_have_the_files_with_checksums(tmp_path: Path, kind: str):
    model, tokenizer = load_model("tiny", dtype=torch.float32), load_tokenizer("tiny")
    model.source.beside = WITH_PROMPTS.files(128)
    model = with_adapter(model) if kind == "adapter" else model
    training = {"step": 3, "total_steps": 3, "recipe": "embed", "settings": {}, "data_fingerprint": "x"}
    training |= {"batches": {}, "scaler": {}}
    state = CheckpointState(training, random={}, optimizer={"exp_avg": part_of(torch.ones(3))})
    checkpoint = write_checkpoint(tmp_path, 3, model, tokenizer, state)
    assert json.loads((checkpoint / "manifest.json").read_text())["files"].keys() >= WITH_PROMPTS.files(128).keys()
    opened = open_embedder(tmp_path, "cpu", "float32")  # the run's folder
    assert opened.how == WITH_PROMPTS
    expected = Embedder(model, tokenizer, WITH_PROMPTS).encode(TEXTS, "query")
    torch.testing.assert_close(opened.encode(TEXTS, "query"), expected, rtol=0, atol=1e-6)
    file = checkpoint / "1_Pooling" / "config.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ValueError, match="no whole checkpoint|neither a config.json|1_Pooling"):
        open_embedder(checkpoint, "cpu")


def test_a_model_of_one_kind_is_not_opened_as_the_other(save_folder: Save):
    vectors, layer, yes_no = (
        save_folder(how) for how in (WITH_PROMPTS, ScoresOf(TEMPLATE), ScoresOf(TEMPLATE, (3, 4)))
    )
    for folder in (layer, yes_no):
        with pytest.raises(ValueError, match="gives scores and no vectors"):
            open_embedder(folder, "cpu")
    with pytest.raises(ValueError, match="is not a reranker: no file says how a query and a passage are scored"):
        open_reranker(vectors, "cpu")


def test_a_folder_of_ones_own_is_not_taken_for_files_of_an_export(tmp_path: Path):
    for name, inside in (("1_Pooling", "config.json"), ("2_Dense", "model.safetensors"), ("1_own", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_text("{}")
    assert [is_beside(tmp_path / name) for name in ("1_Pooling", "2_Dense", "1_own")] == [True, True, False]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["cls", "mean", "lasttoken"])
def test_a_folder_that_sentence_transformers_saved_is_read(tmp_path: Path, mode: str):
    transformer = st.modules.Transformer(
        str(resolve_model_path("tiny")),
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
        processor_kwargs={"model_max_length": 100},
        model_kwargs=IN_FLOAT32,
    )
    dense = [st.modules.Dense(128, 64, bias=False, activation_function=nn.Identity()), st.modules.Dense(64, 32)]
    theirs = st.library.SentenceTransformer(
        modules=[transformer, st.modules.Pooling(128, mode), *dense, st.modules.Normalize()],
        prompts={"query": "search: ", "passage": "text: ", "sorting": "sort: "}, similarity_fn_name="dot",
    )  # fmt: skip
    theirs.save(str(tmp_path), create_model_card=False)
    pooling = {"cls": "cls", "mean": "mean", "lasttoken": "last"}[mode]
    layers = (DenseConfig("2_Dense", 128, 64, False, "Identity"), DenseConfig("3_Dense", 64, 32, True, "Tanh"))
    found = VectorsOf.read(tmp_path)
    assert found is not None
    assert (found.pooling, found.normalize, found.dense, found.similarity) == (pooling, True, layers, "dot")
    assert (found.query_prompt, found.other_prompts["sorting"], found.max_length) == ("search: ", "sort: ", 100)
    for layer in layers:
        theirs_of_layer = json.loads((tmp_path / layer.folder / "config.json").read_text())
        assert fields_of_dense(layer).items() <= theirs_of_layer.items()
    for name, value in found.files(128).items():
        (tmp_path / name).write_text(json.dumps(value))
    assert VectorsOf.read(tmp_path) == found
    texts = TEXTS[:2]
    again = _theirs(tmp_path)
    np.testing.assert_allclose(again.encode_query(texts), theirs.encode_query(texts), rtol=0, atol=1e-6)
    np.testing.assert_allclose(again.encode_document(texts), theirs.encode_document(texts), rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.first(1)
@pytest.mark.parametrize("how", [ScoresOf(TEMPLATE, (70, 71), 96), ScoresOf(TEMPLATE, None, 90)], ids=["yes", "layer"])
@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_scores_of_a_saved_folder_equal_those_of_cross_encoder(save_folder: Save, how: ScoresOf, kind: str):
    folder = save_folder(how, kind)
    ours = open_reranker(folder, "cpu", "float32")
    assert ours.how == how
    assert VectorsOf.read(folder) is None
    theirs = st.library.CrossEncoder(str(folder), device="cpu", local_files_only=True, model_kwargs=IN_FLOAT32)
    scores = ours.scores(TEXTS[0], PASSAGES)
    pairs = [(TEXTS[0], passage) for passage in PASSAGES]
    np.testing.assert_allclose(scores, theirs.predict(pairs, activation_fn=nn.Identity()), rtol=1e-5, atol=1e-5)
    # Logits of about 10 are rounded to 1e-6; their difference is at most four times as steep as its sigmoid.
    np.testing.assert_allclose(scores.sigmoid(), theirs.predict(pairs), rtol=0, atol=5e-6)
    with pytest.raises(ValueError, match="leaves no room for the passage within"):
        ours.scores(TEXTS[1] * 9, PASSAGES[1:2])


def test_a_template_keeps_its_text():
    from jinja2 import Template

    pairs = [{"role": "query", "content": "q'\n{{ x }}"}, {"role": "document", "content": "{query}"}]
    for template in (TEMPLATE, "{query}{passage}", "a{% b %}'\"\\{query}\n{passage}"):
        before, after = (one.replace("{query}", pairs[0]["content"]) for one in template.split("{passage}"))
        written = Template(as_chat_template(template), trim_blocks=True).render(messages=pairs)
        assert written == before + pairs[1]["content"] + after


MODULE = "sentence_transformers.models."
CASES: dict[str, tuple[str, Any, str]] = {
    "no list": ("modules.json", {"a": 1}, "expected a list of 1 to 16 modules, found 1 entries|found an object"),
    "another library": ("modules.json", [{"type": "os.system", "path": ""}], "the code of another library"),
    "outside": ("modules.json", [{"type": MODULE + "Transformer", "path": "../x"}], "expected a name in this folder"),
    "order": ("modules.json", [{"type": MODULE + one, "path": ""} for one in ("Transformer", "Normalize")],
              "the modules are Transformer, Normalize; expected"),
    "unknown": ("modules.json", [{"type": MODULE + one, "path": ""} for one in ("Transformer", "Poling")],
                "Poling is not supported.*Did you mean 'Pooling'"),
    "subfolder": ("modules.json", [{"type": MODULE + "Transformer", "path": "0_T"}], "weights in the folder 0_T"),
    "max": ("1_Pooling/config.json", {"pooling_mode": "max"}, "the pooling 'max' is not supported"),
    "two": ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "the pooling 'mean', 'cls' is not supported"),
    "weighted": ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens"),
    "flag": ("1_Pooling/config.json", {"pooling_mode_cls_token": 1}, "pooling_mode_cls_token is 1; expected true"),
    "prompt": ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is false"),
    "field": ("1_Pooling/config.json", {"pooling_mode": "mean", "depth": 3}, "the field 'depth' is not known"),
    "length": ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length is '9'; expected a positive"),
    "case": ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True; expected False, lower-case"),
    "chat": ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "texts are written as chats"),
    "opening": ("sentence_bert_config.json", {"tokenizer_args": {"model_max_length": 5}}, "tokenizer_args.model_max"),
    "prompts": ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "the prompt 'query' is a number"),
    "default": ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "expected the name of a prompt"),
    "cut": ("config_sentence_transformers.json", {"truncate_dim": 64}, "the field 'truncate_dim' is not known"),
    "sparse": ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "expected 'SentenceTransformer'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_would_change_vectors_is_refused_with_the_file(tmp_path: Path, case: str):
    for name, value in WITH_PROMPTS.files(128).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    assert VectorsOf.read(tmp_path) == WITH_PROMPTS
    file, value, message = CASES[case]
    (tmp_path / file).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=message) as error:
        VectorsOf.read(tmp_path)
    assert Path(file).name in str(error.value)


def test_dense_layers_and_folders_without_files(tmp_path: Path):
    assert VectorsOf.read(tmp_path) is None
    assert ScoresOf.read(tmp_path) is None
    how = VectorsOf(dense=(DenseConfig("2_Dense", 8, 4, True, "Tanh"),))
    for name, value in how.files(8).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    foreign = {"in_features": 8, "out_features": 4, "activation_function": "os.system"}
    for wrong, message in (
        (["x"], "expected a JSON object"),
        ({"in_features": 8}, "out_features is missing"),
        (foreign, "activation_function is 'os.system'; expected one of"),
    ):
        (tmp_path / "2_Dense/config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            VectorsOf.read(tmp_path)


def test_files_of_a_model_are_saved_as_they_were_read(save_folder: Save, tmp_path: Path):
    folder = save_folder(WITH_PROMPTS)
    (folder / "config_sentence_transformers.json").write_bytes(b"[ 1,  2]")  # not understood here, and not lost
    save_model(load_model(folder, dtype=torch.float32), tmp_path)
    assert files_beside(tmp_path) == files_beside(folder)
