"""Exported files against those of llama.cpp's converter for the same folder: architecture, metadata, tensors and
values.

By default the converter's side comes from converter_facts.json. With LLAMA_CPP set to llama.cpp's sources, it runs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lean_ft.export import export_gguf
from lean_ft.gguf.open import gguf_folder
from lean_ft.gguf.wholes import _ARCHITECTURES
from lean_ft.models import load_model
from lean_ft.system.run_directory import TRAINING_STATE_FILE
from tests.export.conftest import SIZES, qwen_tokenizer, write_tokenizer
from tests.gguf.cases import CASES, FAMILIES
from tests.gguf.converter import (
    DIFFERENT,
    FACTS,
    JUDGED,
    NOT_CONVERTED,
    ONLY_OURS,
    convert,
    differences,
    edit_json,
    facts_of,
    unexplained,
    write_folder,
)
from tests.gguf.llama_server import LlamaServer
from tests.models.tiny_wholes import tiny_whole

QUICK = ("llama", "qwen3_5_text", "gemma3", "qwen2_5_vl")
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
        "attention.recurrent_layers", "interleave_moe_layer_step", "rope.dimension_count_swa",
        "rope.scaling.attn_factor",
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
    """The facts of its files are those in converter_facts.json. They have an export's numbers, and are read as the
    folder."""
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


_PROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": 12544, "shortest_edge": 784}}


@pytest.mark.long
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP is not set to a folder of llama.cpp's sources")
@pytest.mark.parametrize("case", ["glm4v", "glm4v_moe", "glm_ocr", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_the_converters_file_of_the_tower_fits(case, tmp_path):
    """llama.cpp opens both files together."""
    source = write_folder(case, tmp_path / "model")
    (source / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    assert f"convert_hf_to_gguf.py {source} --mmproj" in str(export_gguf(source, tmp_path / "model.gguf", "f32"))
    script = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py"
    arguments = [source, "--mmproj", "--outfile", tmp_path / "tower.gguf", "--outtype", "f32"]
    subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True)
    LlamaServer(tmp_path / "model.gguf", mmproj=tmp_path / "tower.gguf")


@pytest.mark.first(1)
@pytest.mark.parametrize("case", ["glm4v", "qwen3_vl"])
@torch.no_grad()
def test_a_file_of_a_model_that_reads_images_comes_back_unchanged(case, tmp_path):
    source, file = write_folder(case, tmp_path / "model"), tmp_path / "model.gguf"
    export_gguf(source, file, "f32")
    torch.testing.assert_close(load_model(file)(IDS), load_model(source)(IDS), atol=1e-4, rtol=1e-4)
    export_gguf(gguf_folder(file), tmp_path / "again.gguf", "f32")
    assert facts_of(tmp_path / "again.gguf") == facts_of(file)


@pytest.mark.parametrize(
    ("model_type", "remark"),
    [
        ("got_ocr2",
            "The language model is that of got_ocr2, for text alone: llama.cpp's converter writes no file of this family's vision tower"),  # noqa: E501
        ("qwen3", "The run trained the language model of qwen3_vl alone, and the file is for text alone."),
    ],
)  # fmt: skip
def test_what_does_not_fit_an_mmproj_file_is_reported(model_type, remark, tmp_path):
    if model_type == "qwen3":
        settings = {"model.path": str(write_folder("qwen3_vl", tmp_path / "whole"))}
        source = write_folder("qwen3", tmp_path / "model")
        (source / TRAINING_STATE_FILE).parent.mkdir()
        (source / TRAINING_STATE_FILE).write_text(json.dumps({"settings": settings}))
    else:
        tiny_whole(model_type, text={**SIZES, **CASES["qwen2"][1]}).save_pretrained(source := tmp_path / "model")
        write_tokenizer(source, qwen_tokenizer())
    assert remark in str(export_gguf(source, tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [(None, "config.json has no mrope_section in its rotary settings"),
        ([1, 2, "x"], r"mrope_section is \[1, 2, 'x'\]; expected")],
)  # fmt: skip
def test_sections_that_llama_cpp_needs(sections, message, tmp_path):
    source = write_folder("qwen2_5_vl", tmp_path / "model")
    rope = {"rope_type": "default", "rope_theta": 100.0} | ({} if sections is None else {"mrope_section": sections})
    edit_json(
        source / "config.json",
        lambda config: config | {"text_config": config["text_config"] | {"rope_parameters": rope}},
    )
    with pytest.raises(ValueError, match=message):
        export_gguf(source, tmp_path / "model.gguf")


def test_special_tokens_that_only_config_json_names(tmp_path):
    """llama.cpp takes token 11 for those that a file does not name."""
    source = write_folder("hunyuan_v1_moe", tmp_path / "model")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ids = {"eos": 7, "bos": 5, "pad": 9, "sep": 4, "cls": 900, "mask": "x"}
    edit_json(source / "config.json", lambda config: config | {f"{kind}_token_id": n for kind, n in ids.items()})
    (source / "generation_config.json").unlink()
    export_gguf(source, tmp_path / "model.gguf")
    stored = facts_of(tmp_path / "model.gguf")["metadata"]
    found = {key: n for key, n in stored.items() if key.endswith("_token_id")}
    names = {"eos": 7, "bos": 5, "padding": 9, "seperator": 4}
    assert found == {f"tokenizer.ggml.{name}_token_id": n for name, n in names.items()}


def test_the_documentation_has_the_architectures_in_models_that_read_images():
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    for (model, _), architecture in _ARCHITECTURES.items():
        assert re.search(rf"^\| .*`{model}`.* \| `{architecture}` \|$", page, re.MULTILINE), model
