"""llama.cpp's embeddings of an exported file equal ours."""

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors

from lean_ft.embedding.encode import open_embedder
from lean_ft.embedding.folder import VectorsOf
from lean_ft.export import export_folder, export_gguf
from lean_ft.models.beside import write_beside
from lean_ft.models.config import DenseConfig
from tests.embedding.conftest import Save
from tests.export.conftest import qwen_tokenizer, write_model_folder
from tests.gguf.llama_server import LlamaServer

TEXTS = ["Hello, world! Don't stop.", "It's 12345 o'clock " * 4, "x"]


def _qwen_folder(folder: Path, how: VectorsOf, template: str) -> Path:
    """A folder as of Qwen3-Embedding, whose texts end with another token than its eos."""
    tokenizer = HFTokenizer.from_str(qwen_tokenizer().to_str())
    named = ("<|endoftext|>", "<|im_start|>")
    tokens = [(token, tokenizer.token_to_id(token)) for token in named]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=tokens)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_model_folder(folder, "Qwen3", tokenizer=tokenizer, tokenizer_config=config, head_dim=16)
    write_beside(how.files(64), folder)
    return folder


def _assert_equal(folder: Path, file: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")
    server, ours = LlamaServer(file, embeds=True), open_embedder(folder, "cpu", "float32")
    for used_as, prompt in (("query", ours.how.query_prompt), ("passage", ours.how.passage_prompt)):
        body = json.dumps({"input": [prompt + text for text in TEXTS]}).encode()
        asked = urllib.request.Request(
            f"{server.listening_address}/v1/embeddings", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found = np.array([one["embedding"] for one in json.load(answer)["data"]])
        expected = ours.encode(TEXTS, used_as).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
        assert np.abs(expected[0] - expected[1]).max() > 0.02


@pytest.mark.long
@pytest.mark.parametrize("how", [VectorsOf("last", True, "Find: "), VectorsOf("mean")], ids=["last", "mean"])
@pytest.mark.parametrize("template", ["$A <|endoftext|>", "<|im_start|> $A <|endoftext|>"])
def test_llama_cpp_computes_the_same_vectors(how: VectorsOf, template: str, tmp_path: Path):
    folder = _qwen_folder(tmp_path / "model", how, template)
    exported = export_gguf(folder, tmp_path / "model.gguf", "f32")
    assert f"{how.pooling} pooling" in str(exported) and "Try: llama-embedding" in str(exported)
    assert ("Put 'Find: ' before each query" in str(exported)) == bool(how.query_prompt)
    _assert_equal(folder, tmp_path / "model.gguf")


@pytest.mark.long
def test_a_merged_adapter(save_folder: Save, tmp_path: Path):
    how = VectorsOf("mean", True, "Query: ", "", 120)  # longer than the texts, which llama.cpp does not cut
    export_gguf(save_folder(how, "adapter"), tmp_path / "model.gguf", "f32", merge=True)
    export_folder(save_folder(how, "adapter"), tmp_path / "merged", merge=True)  # rounded to bfloat16 too
    _assert_equal(tmp_path / "merged", tmp_path / "model.gguf")


def test_what_the_file_cannot_hold_is_refused(tmp_path: Path):
    folder = _qwen_folder(tmp_path / "dense", VectorsOf(dense=(DenseConfig("2_Dense", 64, 8, True, "Tanh"),)), "$A")
    save_file({"linear.weight": torch.ones(8, 64), "linear.bias": torch.ones(8)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(ValueError, match="layers after pooling.* Export it as a folder"):
        export_gguf(folder, tmp_path / "model.gguf", "f32")
    folder = _qwen_folder(tmp_path / "around", VectorsOf(), "$A <|endoftext|> <|im_start|>")
    with pytest.raises(ValueError, match="writes 0 tokens before and 2 after a text, and llama.cpp at most one"):
        export_gguf(folder, tmp_path / "model.gguf", "f32")
    assert not (tmp_path / "model.gguf").exists()
