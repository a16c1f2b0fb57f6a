"""`leanft score --top-k`: store a teacher's predictions on disk for `leanft run distill`."""

import json

import pytest


def test_what_is_kept_teaches_a_run_of_the_same_settings(leanft, tmp_path):
    data = ("data.max_length=48", "data.validation_source=tiny/validation.jsonl")
    kept = tmp_path / "kept"
    answer = leanft(
        "score", "tiny", "tiny/validation.jsonl", kept, "--top-k", "8", "--temperature", "2", "--dtype", "float32",
        "--device", "cpu", *data,
    )  # fmt: skip
    assert (answer.code, answer.err) == (0, "")
    assert "8 tokens for each of" in answer.out
    about = json.loads((kept / "about.json").read_text())
    assert (about["top_k"], about["temperature"], about["dtype"]) == (8, 2.0, "float32")
    run = ["distill", "--config", "tiny/distill", "data.source=tiny/validation.jsonl", "data.train_on=assistant", *data]
    run += ["distill.teacher=null", f"distill.cached={kept}", "distill.temperature=2", f"output_dir={tmp_path / 'run'}"]
    run += ["device=cpu"]
    answer = leanft("validate", *run)
    assert answer.code == 0, answer.err
    assert "# teacher: what tiny said of its rows" in answer.out
    answer = leanft("run", *run, "max_steps=1", "plan=false")
    assert answer.code == 0, answer.err
    assert "its 8 likeliest tokens each" in answer.out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("distill.teacher=DIR/none", "DIR/none"),
        ("distill.teacher=tiny distill.on_policy=0.5 data.packing=bfd", "samples completions of unknown length"),
        ("distill.teacher=null distill.cached=DIR", "is no folder of a teacher's likeliest tokens"),
        ("distill.teacher=null", "found neither"),
    ],
)
def test_a_teacher_that_cannot_teach_is_told_before_a_run(leanft, tmp_path, override, message):
    own = ["validate", "distill", "--config", "tiny/distill", "device=cpu", f"output_dir={tmp_path / 'run'}"]
    assert leanft(*own).code == 0
    answer = leanft(*own, *override.replace("DIR", str(tmp_path)).split())
    assert (answer.code, answer.out) == (2, "")
    assert message.replace("DIR", str(tmp_path)) in answer.err
