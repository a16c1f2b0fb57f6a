"""Exported files against those of llama.cpp's converter for the same folder: architecture, metadata, tensors and values.

By default the converter's side comes from converter_facts.json. With LLAMA_CPP set to llama.cpp's sources, it runs.
"""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lean_ft.export import export_gguf
from lean_ft.models import load_model
from tests.gguf.cases import FAMILIES
from tests.gguf.converter import (
    DIFFERENT,
    FACTS,
    JUDGED,
    NOT_CONVERTED,
    ONLY_OURS,
    convert,
    differences,
    facts_of,
    unexplained,
    write_folder,
)

QUICK = ("llama", "qwen3_5_text", "gemma3", "glm4v", "mistral3/mistral", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
MARKED = [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in JUDGED]
IDS = torch.arange(60).view(2, 30)
# Tensors of a file whose numbers differ: llama.cpp ignores them, or the converter is wrong.
_OTHER_VALUES = {
    "bamba": (
        "attn_k.weight",
        "attn_q.weight",
    ),  # it reorders rows of heads that rotate in part as if they rotated as a whole
    "gemma3n_text": ("attn_k", "attn_v", "per_layer_token_embd"),  # of layers that share keys; rows without a token
}
# Files of the converter that are not read as the folder.
_NOT_READ = {
    "bamba": "rows of heads that rotate in part are in a wrong order",
    "gemma4": "the table of per-layer inputs has rows without a token, and the embedding has not",
    "gemma4_text": "the table of per-layer inputs has rows without a token, and the embedding has not",
    "glm": "another epsilon",
    "gpt2/inner": "another feed_forward_length",
    "granitemoehybrid/rope": "no positions",
}


@pytest.mark.parametrize("case", MARKED)
def test_a_file_equals_the_converters(case, tmp_path):
    """Every difference has a reason."""
    source = write_folder(case, tmp_path / "model")
    export_gguf(source, tmp_path / "model.gguf", "f32")
    assert unexplained(case, differences(facts_of(tmp_path / "model.gguf"), json.loads(FACTS.read_text())[case])) == []


def test_every_case_and_every_reason_is_used():
    facts = json.loads(FACTS.read_text())
    assert facts.keys() == {*JUDGED}
    assert not NOT_CONVERTED.keys() - FAMILIES.keys()
    assert {case.partition("/")[0] for case in DIFFERENT} <= {case.partition("/")[0] for case in JUDGED}
    assert ONLY_OURS.keys() - {key for of_case in facts.values() for key in of_case["metadata"]} <= {
        "attention.recurrent_layers", "interleave_moe_layer_step", "rope.dimension_count_swa", "rope.scaling.attn_factor",
        "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eot_token_id",
    }  # fmt: skip


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The folder and the converter's file of each case."""
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP is not set to a folder of llama.cpp's sources")
    place = tmp_path_factory.mktemp("converted")
    jobs = {case: (write_folder(case, place / f"{i}"), place / f"{i}.gguf") for i, case in enumerate(JUDGED)}
    assert convert(jobs, place / "errors.json") == {}
    return jobs


@pytest.mark.long
@pytest.mark.parametrize("case", JUDGED)
@torch.no_grad()
def test_files_of_llama_cpps_converter(case, converted, tmp_path):
    """The facts of its files are those in converter_facts.json. They have an export's numbers, and are read as the folder."""
    source, file = converted[case]
    assert facts_of(file) == json.loads(FACTS.read_text())[case]
    export_gguf(source, tmp_path / "model.gguf", "f32")
    own, theirs = (
        {one.name: one.data for one in gguf.GGUFReader(one).tensors} for one in (tmp_path / "model.gguf", file)
    )
    others = _OTHER_VALUES.get(case, ("token_embd",) if "gemma" in case else ())
    for name in theirs:
        if not any(part in name for part in others):
            np.testing.assert_allclose(
                own[name].reshape(-1), theirs[name].reshape(-1), rtol=1e-4, atol=1e-6, err_msg=name
            )
    if case not in _NOT_READ:
        found, expected = load_model(file)(IDS), load_model(source)(IDS)
        torch.testing.assert_close(found, expected[..., : found.shape[-1]], atol=1e-4, rtol=1e-4)
