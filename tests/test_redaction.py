"""Tokens and homes stay out of what a run writes; a home written `~` is found again."""

import json
import os

import pytest

from lean_ft.redaction import redact
from lean_ft.settings_text import load_config
from tests.training import toy_recipe
from tests.training.toy_runs import QWEN

TOKEN = "hf_" + "aB3" * 11


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home" / "jane"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_tokens_are_blotted_out_and_homes_shortened(home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-another-make")
    assert redact(f"Bearer {TOKEN}.") == "Bearer [token]."
    assert redact("x=a-token-of-another-make") == "x=[token]"
    assert redact("https://jane:secret@hub.example/x") == "https://[token]@hub.example/x"
    assert redact(f"{home}/runs '{home}/a' {home}") == "~/runs '~/a' ~"
    assert redact(f"{home}2/runs /mnt{home}/x hf_model") == f"{home}2/runs /mnt{home}/x hf_model"


def test_a_run_under_the_home_writes_no_home_and_goes_on(home, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (home / "model").mkdir()
    (home / "model/config.json").write_text(json.dumps(QWEN))

    def train(*arguments):
        given = [f"model.path={home}/model", "model.random_init=true", "device=cpu", *arguments]
        toy_recipe.main(load_config(toy_recipe.Config, None, given))

    train(f"output_dir={home}/run", "max_steps=2")
    train("output_dir=~/run", "max_steps=3", "model.path=~/model")
    run = home / "run"
    toy_recipe.main(load_config(toy_recipe.Config, run / "config.yaml", ["max_steps=4"]))
    train("output_dir=~/branch", "max_steps=4", "resume=~/run/step_00000003")
    assert (run / "step_00000004").is_dir()
    assert (home / "branch/step_00000004").is_dir()
    written = [run / "config.yaml", run / "run.json", *run.rglob("training_state.json"), *run.rglob("*.jsonl")]
    for text in (capsys.readouterr().out, *(path.read_text() for path in written)):
        assert str(home) not in text
        assert TOKEN not in text
    assert "~/run" in (run / "config.yaml").read_text()
    assert os.environ["HF_TOKEN"] == TOKEN
