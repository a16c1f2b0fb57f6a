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
        (run / "run.json").write_text(json.dumps({"starts": [{"settings": settings}]}))
        rows = []
        for step, loss in enumerate(losses, start=1):
            rows.append(
                {"step": step, "loss": loss, "tokens": 100, "step_seconds": 0.5, "peak_memory_bytes": 2**30 * step}
            )
            rows.append({"step": step, "eval_loss": loss + step})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\0\0")
    (tmp_path / "runs/a/step_00000002").mkdir()
    return tmp_path / "runs"


def test_runs_are_listed_with_what_differs(folder, leanft):
    """A setting that other recipes lack, `loss.beta`, does not differ. A group that is null elsewhere, `lora`, does."""
    answer = leanft("runs")
    assert answer.code == 0, answer.err
    assert [line.split() for line in answer.out.splitlines()] == [
        ["run", "steps", "loss", "held-out", "lowest", "tokens/s", "peak", "settings"],
        ["a", "2", "2", "4", "4", "200", "2.00", "GiB", "lora=null", "optimizer.lr=0.0001"],
        ["sweep/b", "2", "1.5", "3.5", "3.5", "200", "2.00", "GiB", "optimizer.lr=0.001"],
        ["sweep/new", "0", "-", "-", "-", "-", "-", "optimizer.lr=0.001"],
    ]
    listed = json.loads(leanft("runs", "runs", "--json").out)
    assert [(run["run"], run["settings"], run["loss"]) for run in listed] == [
        ("a", {"lora": None, "optimizer.lr": 1e-4}, 2.0),
        ("sweep/b", {"optimizer.lr": 1e-3}, 1.5),
        ("sweep/new", {"optimizer.lr": 1e-3}, None),
    ]
    assert [run["run"] for run in json.loads(leanft("runs", "runs/a", "--json").out)] == ["a"]


def test_a_folder_without_runs_says_so(folder, leanft):
    (folder / "none").mkdir()
    assert leanft("runs", "runs/none").out == "no runs in runs/none\n"
