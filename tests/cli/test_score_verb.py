"""`leanft score --top-k`: store a teacher's predictions on disk for `leanft run distill`."""

import json

import pytest

from lean_ft.hub.paths import resolve_data_path


@pytest.mark.long
def test_what_is_kept_teaches_a_run_of_the_same_settings(leanft, tmp_path):
    rows, kept = tmp_path / "rows.jsonl", tmp_path / "kept"
    rows.write_text("".join(resolve_data_path("tiny/validation.jsonl").read_text().splitlines(keepends=True)[:16]))
    data = ("data.max_length=48", f"data.validation_source={rows}")
    answer = leanft(
        "score", "tiny", rows, kept, "--top-k", "8", "--temperature", "2", "--dtype", "float32",
        "--device", "cpu", *data,
    )  # fmt: skip
    assert (answer.code, answer.err) == (0, "")
    assert "8 tokens for each of" in answer.out
    about = json.loads((kept / "about.json").read_text())
    assert (about["top_k"], about["temperature"], about["dtype"]) == (8, 2.0, "float32")
    run = ["distill", "--config", "tiny/distill", f"data.source={rows}", "data.train_on=assistant", *data]
    run += ["distill.teacher=null", f"distill.cached={kept}", "distill.temperature=2", f"output_dir={tmp_path / 'run'}"]
    run += ["device=cpu", "batch_size=2", "eval_answers=0"]
    answer = leanft.ok("validate", *run)
    assert "# teacher: stored tokens of tiny" in answer.out
    answer = leanft.ok("run", *run, "max_steps=1", "plan=false")
    assert "top 8 tokens each" in answer.out
