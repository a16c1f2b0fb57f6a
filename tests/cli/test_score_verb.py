"""`leanft score --top-k`: store a teacher's predictions on disk for `leanft run distill`."""

import json


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
    answer = leanft.ok("validate", *run)
    assert "# teacher: stored tokens of tiny" in answer.out
    answer = leanft.ok("run", *run, "max_steps=1", "plan=false")
    assert "top 8 tokens each" in answer.out
