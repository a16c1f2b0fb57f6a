"""The real recipe, with the real data, decoder and optimizers: a resumed run is the uninterrupted one, bit for bit."""

import pytest

from tests.training.toy_runs import digests, metrics

RULES = ("adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd")


@pytest.mark.parametrize(
    "settings",
    [
        *(
            [f"optimizer.name={rule}", f"optimizer.in_backward={in_backward}", f"data.packing={packing}"]
            for rule in RULES
            for in_backward in ("false", "true")
            for packing in ("none", "bfd")
        ),
        ["optimizer.name=adamw", "clip_grad_norm=0.5"],
        ["optimizer.name=adamw_8bit", "model.dtype=bfloat16", "optimizer.update_clipping=true"],
        ["optimizer.name=adamw", "model.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
        ["optimizer.name=adamw", "model.dtype=float16"],
        ["optimizer.name=adamw", "save_async=true", "save_every=1", "keep_last=2"],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "memory.activation_checkpointing=full"],
    ],
    ids=" ".join,
)
def test_resumed_equals_uninterrupted(settings, train_real, tmp_path):
    whole = train_real(tmp_path / "whole", *settings)
    last = max(p.name for p in whole.glob("step_*"))
    train_real(tmp_path / "run", *settings, "max_steps=2")
    train_real(tmp_path / "run", *settings, "max_steps=5")
    train_real(tmp_path / "run", *settings)
    assert digests(tmp_path / "run" / last) == digests(whole / last)
    assert metrics(tmp_path / "run", timed=False) == metrics(whole, timed=False)
    losses = [row["loss"] for row in metrics(whole)]
    assert losses[-1] < losses[0]


def test_data_is_known_by_its_content(train_real, inputs, tmp_path):
    train_real(tmp_path / "run", "max_steps=2")
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((inputs / "rows.jsonl").read_bytes())
    train_real(tmp_path / "run", "max_steps=4", f"data.source={moved}")
    assert (tmp_path / "run/step_00000004").exists()

    moved.write_text(moved.read_text().replace("5 times 5", "6 times 5"))
    refusal = r"other data, and.*\n  data\.source: .*rows.jsonl.* then, .*moved.jsonl.* now\n  data fingerprint: "
    with pytest.raises(ValueError, match=refusal):
        train_real(tmp_path / "run2", f"resume={tmp_path / 'run/step_00000002'}", f"data.source={moved}")
    with pytest.raises(ValueError, match=r"\n  data\.max_length: 48 then, 40 now"):
        train_real(tmp_path / "run", "data.max_length=40")
