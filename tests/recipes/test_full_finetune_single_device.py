"""The recipe on the embedded model: copies, batch layouts and dtypes train alike."""

import shutil

import pytest

from lean_ft.system.catalog import recipes

RECIPE = "full_finetune_single_device"
SETTINGS = (
    "model.path=tiny",
    "data.source=tiny/validation.jsonl",
    "data.max_length=64",
    "optimizer.lr=1e-3",
    "batch_size=8",
    "max_steps=8",
    "device=cpu",
    "plan=false",
)


def numbers(lines):
    return [(line["loss"], line["grad_norm"], line["tokens"], line["target_tokens"]) for line in lines]


def test_a_copy_equals_the_recipe(train, tmp_path):
    copy = shutil.copy(recipes()[RECIPE], tmp_path / "mine.py")
    assert numbers(train("model.dtype=float32", name=str(copy), output="copy")) == numbers(train("model.dtype=float32"))


@pytest.mark.parametrize(("dtype", "packing"), [("bfloat16", "none"), ("float16", "bfd")])
def test_every_precision_follows_float32(train, dtype, packing):
    reference = train("model.dtype=float32", f"data.packing={packing}")
    lines = train(f"model.dtype={dtype}", f"data.packing={packing}", output=dtype)
    for line, expected in zip(lines, reference, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=0.06)


def test_micro_batches_add_up_to_the_whole_batch(train):
    whole = train("model.dtype=float32", "batch_size=8")
    parts = train("model.dtype=float32", "batch_size=2", "gradient_accumulation_steps=4", output="parts")
    for line, expected in zip(parts, whole, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert line["target_tokens"] == expected["target_tokens"]


def test_memory_settings_change_no_number(train):
    plain = train("model.dtype=float32", "optimizer.in_backward=false")
    lean = train(
        "model.dtype=float32",
        "optimizer.in_backward=true",
        "memory.activation_checkpointing=full",
        "memory.loss_chunk_tokens=16",
        output="lean",
    )
    for line, expected in zip(lean, plain, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_lr_0_leaves_the_weights_bitwise_equal(train, tmp_path):
    from safetensors.torch import load_file

    from lean_ft import load_model

    before = dict(load_model("tiny").named_parameters())
    train("model.dtype=float32", "optimizer.lr=0", "optimizer.in_backward=true", "optimizer.weight_decay=0.1")
    after = load_file(tmp_path / "run/step_00000008/model.safetensors")
    assert all((before[name] == tensor).all() for name, tensor in after.items())


def test_evaluation_is_weighted_by_tokens_and_samples_completions(train, capsys):
    lines = train(
        "data.validation_fraction=0.2", "eval_every=4", "eval_answers=5", "model.dtype=float32", "eval_pattern=(.)"
    )
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(evaluations) == 2
    assert evaluations[1] < evaluations[0]
    out = capsys.readouterr().out
    assert "at step 0: " in out
    assert "at step 8: " in out
    assert out.count("exact match of the text that (.) finds last") == 2


def test_a_complete_run_answers_with_its_trained_weights(train, capsys):
    settings = ("data.validation_fraction=0.2", "eval_answers=5", "model.dtype=float32", "optimizer.lr=5e-3")
    train(*settings)
    learned = capsys.readouterr().out.rpartition("at step 8: ")[2]
    train(*settings)
    asked_again = capsys.readouterr().out
    assert asked_again.count("at step 8: ") == 1
    assert asked_again.rpartition("at step 8: ")[2] == learned
    train(*(setting for setting in settings if not setting.startswith("eval_answers")), "eval_answers=2")
    assert "at step 8: " in capsys.readouterr().out
