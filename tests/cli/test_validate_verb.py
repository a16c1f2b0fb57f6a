"""`leanft validate`: settings and files, without a run."""

import json

import pytest

from lean_ft.settings import ModelConfig, Settings, SFTDataConfig
from lean_ft.settings_text import load_config

RECIPE = '''"""Validated, never run."""

from lean_ft.settings import ModelConfig, Settings, SFTDataConfig


class Config(Settings):
    model: ModelConfig
    data: SFTDataConfig


def main(cfg):
    raise AssertionError("validate ran the recipe")
'''


class Config(Settings):
    model: ModelConfig
    data: SFTDataConfig


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "validated.py"
    path.write_text(RECIPE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return path


def test_what_is_valid_is_printed_as_a_preset_that_gives_the_same(leanft, recipe, tmp_path):
    overrides = [f"model.path={tmp_path}/model", f"data.source=[{tmp_path}/rows.jsonl]", "data.max_length=8"]
    answer = leanft("validate", recipe, *overrides)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[-1].startswith("# ok")
    preset = tmp_path / "printed.yaml"
    preset.write_text(answer.out)
    assert load_config(Config, preset, []) == load_config(Config, None, overrides)


def test_all_missing_files_are_named(leanft, recipe, tmp_path):
    answer = leanft(
        "validate", recipe, f"model.path={tmp_path}/no-model", f"data.source=[{tmp_path}/rows.jsonl, {tmp_path}/b.jsonl]",
        f"data.validation_source={tmp_path}/c.jsonl",
    )  # fmt: skip
    assert answer.code == 2
    assert answer.out == ""
    for name in ("no-model", "b.jsonl", "c.jsonl"):
        assert f"{tmp_path}/{name}" in answer.err
    assert "rows.jsonl" not in answer.err


def test_a_folder_that_is_no_model(leanft, recipe, tmp_path):
    answer = leanft("validate", recipe, f"model.path={tmp_path}", f"data.source={tmp_path}/rows.jsonl")
    assert answer.code == 2
    assert "config.json" in answer.err


def test_wrong_settings(leanft, recipe):
    answer = leanft("validate", recipe, "model.dtype=int8")
    assert answer.code == 2
    assert "expected bfloat16 | float32 | float16, came 'int8'" in answer.err
