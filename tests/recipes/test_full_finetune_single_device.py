"""The recipe on the embedded model: a copy trains alike, and a complete run evaluates its trained weights."""

import json
import shutil

import pytest

from lean_ft.system.catalog import recipes

RECIPE = "full_finetune_single_device"


def numbers(lines):
    return [(line["loss"], line["grad_norm"], line["tokens"], line["target_tokens"]) for line in lines]


@pytest.mark.long
def test_a_copy_equals_the_recipe(train, tmp_path):
    copy = shutil.copy(recipes()[RECIPE], tmp_path / "mine.py")
    assert numbers(train("max_steps=3", name=str(copy), output="copy")) == numbers(train("max_steps=3"))


def test_lr_0_leaves_the_weights_bitwise_equal(train, tmp_path):
    from safetensors.torch import load_file

    from lean_ft import load_model

    before = dict(load_model("tiny").named_parameters())
    train("optimizer.lr=0", "optimizer.in_backward=true", "optimizer.weight_decay=0.1", "max_steps=2")
    after = load_file(tmp_path / "run/step_00000002/model.safetensors")
    assert all((before[name] == tensor).all() for name, tensor in after.items())


@pytest.mark.long
def test_held_out_loss_falls_and_completions_are_compared_by_pattern(train, capsys):
    lines = train("data.validation_fraction=0.2", "eval_every=3", "eval_answers=3", "eval_pattern=(.)")
    first, last = (line["eval_loss"] for line in lines if "eval_loss" in line)
    assert last < first
    assert capsys.readouterr().out.count("exact match of the text that (.) finds last") == 2


@pytest.mark.long
def test_a_complete_run_answers_with_its_trained_weights(train, capsys, tmp_path):
    settings = ("data.validation_fraction=0.2", "eval_answers=3", "optimizer.lr=5e-3")
    train(*settings)
    learned = next(line for line in capsys.readouterr().out.splitlines() if "at step 6: " in line)
    lines = tmp_path / "run/metrics.jsonl"
    before, after = (line for line in map(json.loads, lines.read_text().splitlines()) if "eval_questions" in line)
    assert (before["step"], after["step"]) == (0, 6) and before["eval_questions"] == after["eval_questions"] == 3
    assert f"({after['eval_exact_match']:.1%})" in learned
    whole = lines.read_text()
    lines.write_text(whole[:-30])  # killed while the last line, of answers, was written
    train(*settings)
    assert lines.read_text() == whole
    capsys.readouterr()
    train(*settings)
    assert lines.read_text() == whole
    asked_again = capsys.readouterr().out
    assert asked_again.count("at step 6: ") == 1
    assert learned in asked_again.splitlines()
    train(*(setting for setting in settings if not setting.startswith("eval_answers")), "eval_answers=1")
    assert "at step 6: " in capsys.readouterr().out
