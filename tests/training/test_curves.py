"""Curves of runs: reading metrics, panels and results."""

import json
from pathlib import Path

import pytest

from lean_ft.system.units import GIB
from lean_ft.training.curves import differing_settings, draw_curves, figure_of, read_curves


def write_run(folder: Path, num_steps: int, settings: dict | None = None, **more: float) -> Path:
    """Write a run of `num_steps` steps with loss 4 - step/100, one evaluation at the end and an incomplete last
    line."""
    folder.mkdir(parents=True)
    step_row = {"tokens": 100, "target_tokens": 50, "step_seconds": 0.5, "tokens_per_second": 200.0, "lr": 1e-4}
    rows = [
        {"step": step, "epoch": step / 9, "loss": 4 - step / 100, "peak_memory_bytes": 2 * GIB, **step_row, **more}
        for step in range(1, num_steps + 1)
    ]
    rows[0] |= {"loss": None, "non_finite": {"loss": "nan"}}
    rows.append({"step": num_steps, "epoch": 1.0, "eval_loss": 3.25, "eval_entropy": 1.5})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + '{"step": 9', encoding="utf-8")
    if settings is not None:
        (folder / "run.json").write_text(json.dumps({"starts": [{"settings": {}}, {"settings": settings}]}))
    return folder


def test_each_metric_has_a_panel_and_runs_are_compared(tmp_path):
    runs = [
        write_run(tmp_path / "slow", 3, {"optimizer.lr": 1e-5, "seed": 0, "output_dir": "slow"}),
        write_run(tmp_path / "fast", 60, {"optimizer.lr": 1e-4, "seed": 0, "output_dir": "fast"}, grad_norm=1.0),
    ]
    draw_curves(runs, picture := tmp_path / "curves.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    panels = {axes.get_title(loc="left") for axes in figure_of(runs).axes}
    assert {"held-out loss", "held-out entropy", "gradient norm", "memory at the peak, GiB", "tokens a second"} < panels
    curves = read_curves(runs)
    assert [list(run.results_as_text().values()) for run in curves] == [
        ["3", "3.97", "3.25", "3.25", "300", "200", "2.00 GiB"],
        ["60", "3.4", "3.25", "3.25", "6,000", "200", "2.00 GiB"],
    ]
    assert differing_settings(curves) == ["optimizer.lr"]


def test_what_is_no_run_is_refused_with_the_nearest(tmp_path):
    write_run(tmp_path / "lora_8", 1)
    with pytest.raises(ValueError, match=r"lora8 has no metrics.jsonl.* Did you mean 'lora_8'\?"):
        read_curves([tmp_path / "lora8"])
    (tmp_path / "lora_8" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no line yet"):
        read_curves([tmp_path / "lora_8"])


def test_runs_of_any_length_are_smoothed_over_the_same_steps(tmp_path):
    runs = [write_run(tmp_path / str(num_steps), num_steps) for num_steps in (200, 30)]
    figure = figure_of(runs)
    loss = next(axes for axes in figure.axes if axes.get_title(loc="left") == "loss")
    long, short = (line.get_ydata() for line in loss.lines if line.get_alpha() is None)
    assert list(long[: len(short)]) == pytest.approx(list(short))
    assert "running mean over about 10 steps, the same for all runs" in figure.legends[0].get_title().get_text()
    assert read_curves(runs[1:])[0].points("loss")[0][0] == 2  # the loss of step 1 is not finite
