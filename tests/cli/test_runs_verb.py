"""`leanft runs`: the listed runs, their differing settings and their results."""

import json

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with 2 runs that differ in 2 settings, one of them in a subfolder, and a run without any step."""
    monkeypatch.chdir(tmp_path)
    for name, lr, losses in [("a", 1e-4, [3.0, 2.0]), ("sweep/b", 1e-3, [3.0, 1.5]), ("sweep/new", 1e-3, [])]:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        settings = {
            "seed": 0,
            **({"lora": None} if name == "a" else {"loss.beta": 0.1, "lora.rank": 8}),
            "optimizer.lr": lr,
            "data.source": ["x.jsonl"],
            "output_dir": name,
        }
        end = {"a": {"ended": "now"}, "sweep/b": {"failed": "now", "error": "KeyError: 'x'"}}.get(name, {})
        (run / "run.json").write_text(json.dumps({"starts": [{"settings": settings, "total_steps": 3, **end}]}))
        rows = [{"step": 0, "eval_exact_match": 0.125, "eval_questions": 8}] if name == "a" else []
        for step, loss in enumerate(losses, start=1):
            rows.append(
                {"step": step, "loss": loss, "tokens": 100, "step_seconds": 0.5, "peak_memory_bytes": 2**30 * step}
            )
            rows.append({"step": step, "eval_loss": loss + step})
        rows += [{"step": 2, "eval_exact_match": 0.75, "eval_questions": 8}] if name == "a" else []
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\0\0")
    (tmp_path / "runs/a/step_00000002").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_with_what_differs(folder, leanft):
    """A setting that other recipes lack, `loss.beta`, does not differ. A group that is null elsewhere, `lora`, does."""
    answer = leanft.ok("runs")
    assert [line.split() for line in answer.out.splitlines()] == [
        ["run", "lora", "optimizer.lr", "state", "steps", "result", "right", "held-out", "best"],
        ["a", "null", "0.0001", "done", "2", "loss", "2", "75.0%", "4", "4"],
        ["sweep/b", "-", "0.001", "failed", "at", "2", "of", "3:", "KeyError", "2", "loss", "1.5", "-", "3.5", "3.5"],
        ["sweep/new", "-", "0.001", "killed", "at", "0", "of", "3", "0", "-", "-", "-", "-"],
    ]
    listed = json.loads(leanft("runs", "runs", "--json").out)
    assert [(run["run"], run["settings"], run["loss"], run["state"], run["right"]) for run in listed] == [
        ("a", {"lora": None, "optimizer.lr": 1e-4}, 2.0, "done", 0.75),
        ("sweep/b", {"optimizer.lr": 1e-3}, 1.5, "failed", None),
        ("sweep/new", {"optimizer.lr": 1e-3}, None, "killed", None),
    ]
    assert [run["run"] for run in json.loads(leanft("runs", "runs/a", "--json").out)] == ["a"]
    assert "optimizer.lr" in leanft.ok("runs", "runs/a").out  # also where it is equal in all runs


def test_many_runs_with_many_settings_fit_100_columns(tmp_path, monkeypatch, leanft):
    """The settings with the most values are shown, and the others named."""
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        run = tmp_path / "runs" / f"a_sweep_with_a_long_name_in_2026/run_{number}"
        run.mkdir(parents=True)
        settings = {f"group.some_setting_{i}": "x" * 60 * (number % 2) for i in range(30)}
        settings |= {"optimizer.lr": number / 1000, "seed": number % 3}
        (run / "run.json").write_text(json.dumps({"starts": [{"recipe": "grpo", "settings": settings}]}))
        row = {"step": 1, "loss": 1e-9, "reward": number / 20, "tokens": 100, "step_seconds": 0.5}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"step": 1, "eval_reward": 0.5}) + "\n")
    answer = leanft("runs")
    head, *lines = answer.out.splitlines()
    assert answer.code == 0 and len(lines) == 20
    assert max(map(len, [head, *lines, *answer.err.splitlines()])) <= 100
    assert head.split() == ["run", "optimizer.lr", "state", "result", "held-out"]
    assert any("/run_5 " in line and "reward 0.25 " in line for line in lines)
    assert all(line.startswith(("a_", "…")) for line in lines)
    said = " ".join(answer.err.split())
    assert "group.some_setting_0" in said and "more. For all columns, run `leanft runs runs --json`" in said
    listed = json.loads(leanft("runs", "--json").out)
    assert len(listed[0]["settings"]) == 32 and listed[0]["highest_eval_reward"] == 0.5


def test_a_folder_without_runs_says_so(folder, leanft):
    (folder / "none").mkdir()
    assert leanft("runs", "runs/none").out == "no runs in runs/none\n"
