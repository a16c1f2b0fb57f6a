"""`leanft merge`: weights in every spelling, what it prints, and one message for what is wrong."""

import json
import shutil
from pathlib import Path

import pytest

from tests.export.conftest import write_model_folder

pytestmark = pytest.mark.long  # one case of each runs in continuous integration


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    write_model_folder(place / "a", "Qwen2", hidden_size=64)
    shutil.copytree(place / "a", place / "b")
    return place / "a", place / "b"


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "weights",
    [["--weights", "0.7,0.3"], ["--weights", "0.7", "0.3"], ["-w", "0.7", "-w", "0.3"], ["--weights=0.7, 0.3"]],
)
def test_weights_in_every_spelling(leanft, models, weights, tmp_path):
    answer = leanft.quiet("merge", *models, *weights, "-o", tmp_path / "out")
    assert f"merged {models[0]} (0.7) + {models[1]} (0.3) by weighted average, normalized." in answer.out
    assert f"wrote {tmp_path / 'out'}: " in answer.out and "NO tokenizer, since no model has one" in answer.out
    facts = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert [model["weight"] for model in facts["models"]] == [0.7, 0.3]


def test_a_folder_named_by_a_number_is_a_model(leanft, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models[1], tmp_path / "2")
    answer = leanft.quiet("merge", models[0], "2", "--weights", "0.7,0.3", "-o", "out")
    assert "+ 2 (0.3)" in answer.out


def test_options_reach_the_method(leanft, models, tmp_path):
    options = ["--method", "dare_ties", "--base", models[1], "--density", "0.5", "--seed", "3", "--rescale", "none"]
    answer = leanft.quiet("merge", *models, *options, "--normalize", "--dtype", "bfloat16", "-o", tmp_path / "out")
    assert "by DARE with TIES, base" in answer.out
    assert "normalized, density 0.5, seed 3, rescale none." in answer.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_wrong_input_is_one_message(leanft, models, adapter, tmp_path):
    one, other = models
    out = ["-o", tmp_path / "out"]
    for arguments, message in [
        ([one, *out], f"merge needs at least two models; found {one} alone"),
        ([one, other], "missing option '--output'"),
        ([one, other, "--weights", "0.7,x", *out], "--weights: 'x' is not a number"),
        ([one, other, "--weights", "0.7", *out], "--weights is 0.7: 1 for 2 models"),
        ([one, other, "--weights", "nan", "1", *out], "--weights is nan 1; expected finite numbers"),
        ([one, other, "--weights", "1,-1", *out], "the sum is 0"),
        ([one, other, "--method", "tie", *out], "Did you mean 'ties'?"),
        ([one, other, "--method", "ties", "--density", "0.2", *out], "--method ties needs --base"),
        ([one, other, "--base", one, *out], "--base is not used with --method linear"),
        ([one, other, "--rank", "4", *out], "--rank is only used for adapters"),
        ([one, other, "--chat-template", one, *out], "no model has a tokenizer"),
        ([one, one, *out], f"a model is given twice: {one}"),
        ([one, f"{one}/../a", *out], "are the same folder"),
        ([one, adapter, *out], f"{adapter} is an adapter, and {one} is a whole model.*leanft export {adapter} NEW"),
        ([one, "tiny", *out], 'config.json has model_type="qwen2"'),
        ([one, tmp_path / "none", *out], "does not exist"),
    ]:
        refusal = leanft.refused("merge", *arguments)
        assert message.partition(".*")[0] in refusal and message.rpartition(".*")[2] in refusal
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_refused(leanft, models, tmp_path):
    leanft.ok("export", "tiny", tmp_path / "tiny.gguf", "--gguf", "f32")
    refusal = leanft.refused("merge", "tiny", tmp_path / "tiny.gguf", "-o", tmp_path / "out")
    assert "tiny.gguf is a GGUF file" in refusal and "leanft export FILE.gguf FOLDER" in refusal
