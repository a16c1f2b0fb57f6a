"""Curves of runs: reading metrics, panels and results."""

import json
import math
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


def test_a_metric_has_a_panel_or_a_line_and_runs_are_compared(tmp_path):
    runs = [
        write_run(tmp_path / "slow", 3, {"optimizer.lr": 1e-5, "seed": 0, "output_dir": "slow"}),
        write_run(tmp_path / "fast", 60, {"optimizer.lr": 1e-4, "seed": 0, "output_dir": "fast"}, grad_norm=1.0),
    ]
    draw_curves(runs, picture := tmp_path / "curves.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    figure = figure_of(runs)
    panels = [axes.get_title(loc="left") for axes in figure.axes]
    assert panels == ["loss"]  # the other metrics are constant, or have one value per run
    text = figure.get_supxlabel().splitlines()
    assert {
        "held-out entropy: 1.5 at step 3 in slow, 1.5 at step 60 in fast",
        "gradient norm: 1 throughout in fast",
    } < set(text)
    assert "memory at the peak, GiB: 2 throughout in slow, 2 throughout in fast" in text
    curves = read_curves(runs)
    assert [list(run.results_as_text().values()) for run in curves] == [
        ["unfinished at 3", "3", "loss 3.97", "-", "3.25", "3.25", "2.00 GiB", "200"],
        ["unfinished at 60", "60", "loss 3.4", "-", "3.25", "3.25", "2.00 GiB", "200"],
    ]
    assert differing_settings(curves) == ["optimizer.lr"]


def test_what_is_no_run_is_refused_with_the_nearest(tmp_path):
    write_run(tmp_path / "lora_8", 1)
    with pytest.raises(ValueError, match=r"lora8 has no metrics.jsonl.* Did you mean 'lora_8'\?"):
        read_curves([tmp_path / "lora8"])
    (tmp_path / "lora_8" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no line yet"):
        read_curves([tmp_path / "lora_8"])


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def write_rows(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_bold_curve_is_in_the_middle_of_the_pale_one(tmp_path):
    """A loss that falls like a training's, with noise of both signs, a gap, and lines of every 10th step later."""
    steps = [*range(1, 200), *range(260, 401), *range(410, 801, 10)]
    trend = {step: 3.5 * math.exp(-step / 60) + 0.5 for step in steps}
    noise = {step: 0.1 * (-1) ** i for i, step in enumerate(steps)}
    rows = [{"step": step, "loss": trend[step] + noise[step], "lr": 1e-4 * step} for step in steps]
    figure = figure_of([write_rows(tmp_path / "long", rows), write_rows(tmp_path / "short", rows[:50])])
    assert "mean of the 41 steps around each" in figure.legends[0].get_title().get_text()
    lines = panel(figure, "loss").lines
    for pale, bold in (lines[0:2], lines[3:5]):  # a held-out curve is the third
        assert pale.get_alpha() and bold.get_alpha() is None
        drawn = dict(zip(bold.get_xdata(), bold.get_ydata(), strict=True))
        apart = [(value - trend[step]) / trend[step] for step, value in drawn.items()]
        assert max(map(abs, apart)) < 0.05
        assert set(drawn) <= set(steps) and len(drawn) > 0.5 * len(pale.get_xdata())
    assert len(panel(figure, "learning rate, logarithmic").lines) == 2 * 2  # exact, and no held-out values


def test_panels_begin_with_the_objective_and_hold_its_evaluations(tmp_path):
    online = {"reward": 0.5, "reward_std": 0.1, "completion_length": 9.0, "kl": 0.1, "entropy": 1.0, "clip_share": 0.0}
    rows = [{"step": 0, "eval_reward": 0.25, "eval_completion_length": 10.0, "eval_loss": None}]
    rows += [{"step": n, "loss": n / 9, "clip_share": 0.0} | {k: v * n for k, v in online.items()} for n in range(1, 6)]
    rows += [{"step": 5, "eval_reward": 0.75, "eval_completion_length": 8.0, "eval_loss": None, "eval_macro_f1": 0.5}]
    figure = figure_of([write_rows(tmp_path / "grpo", rows)])
    titles = [axes.get_title(loc="left").partition(" ")[0] for axes in figure.axes]
    assert titles == ["reward", "reward", "length", "kl", "loss", "entropy"]
    held_out = panel(figure, "reward").lines[-1]
    assert [list(held_out.get_xdata()), list(held_out.get_ydata())] == [[0, 5], [0.25, 0.75]]  # before training too
    assert figure.get_supxlabel() == "clip share: 0 throughout\nheld-out macro f1: 0.5 at step 5"
    pairs = [
        {"step": n, "loss": 1 / n, "nll": 2 / n, "rewards/accuracies": n / 9, "rewards/margins": n} for n in (1, 2, 3)
    ]
    figure = figure_of([write_rows(tmp_path / "dpo", pairs)])
    assert [axes.get_title(loc="left").split()[0] for axes in figure.axes] == ["right", "margin", "loss", "nll"]


def test_a_run_of_one_step_is_lines_of_text(tmp_path):
    figure = figure_of([write_rows(tmp_path / "run", [{"step": 1, "loss": 2.5}])])
    assert not figure.axes and figure.get_supxlabel() == "loss: 2.5 at step 1"
    figure._repr_png_()


def test_the_share_of_right_answers_has_a_panel(tmp_path):
    rows = [{"step": 0, "eval_exact_match": 0.0, "eval_questions": 8}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1}]
    rows += [{"step": 2, "eval_exact_match": 0.75, "eval_questions": 8}]
    figure = figure_of([write_rows(tmp_path / "run", rows)])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "held-out questions right"]
    assert [list(line) for line in figure.axes[1].lines[0].get_data()] == [[0, 2], [0.0, 0.75]]
