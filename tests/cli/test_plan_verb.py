"""`leanft plan`: progress, results and picture."""

import re

from lean_ft.plan import picture, search
from lean_ft.plan.rehearsal import Rehearsal
from lean_ft.plan.trace import Moment
from lean_ft.system.units import GIB


def test_progress_is_printed_and_a_budget_that_nothing_fits(leanft):
    answer = leanft(
        *("plan", "--config", "tiny/full", "device=cpu", "data.max_length=64", "batch_size=2", "--budget", "1MiB")
    )
    assert answer.code == 0
    assert "885,888 parameters, 128 tokens a step, planned for cpu in " in answer.out
    assert "no settings fit 1.0 MiB" in answer.out
    first, *others = answer.err.splitlines()  # without a terminal, one line per message
    assert first == "simulating a step on shapes"
    assert any("optimizer.name=adamw_8bit" in line for line in others)
    assert all(
        re.match(r"peak [\d.]+ MiB with the given settings; simulating [a-z_.]+=[a-z0-9_]+", line) for line in others
    )


def test_of_a_gpu_it_tells_what_the_allocator_reserves_and_what_the_driver_takes(leanft):
    answer = leanft("plan", "--config", "tiny/full", "data.max_length=64", "--device-name", "RTX 4090")
    assert answer.code == 0
    reserved = re.search(r"reserved by the allocator: ([\d.]+ [MG]iB), plus the driver's context", answer.out)
    assert "\nsettings that fit 23.50 GiB (0.50 GiB kept for the driver), fastest first:\n" in answer.out
    first = next(line for line in answer.out.splitlines() if line.startswith("  *"))
    assert reserved is not None and reserved[1] in first
    assert re.search(r"\n +peak +reserved +speed  overrides\n", answer.out)


def test_a_line_that_needs_values_is_named(leanft, tmp_path):
    assert leanft("cp", "full_finetune_single_device", f"{tmp_path}/mine.py").code == 0
    text, line = (tmp_path / "mine.py").read_text(), "picked = batch.labels[batch.labels != -100]"
    before, loss, after = text.partition("            loss = cross_entropy")
    (tmp_path / "mine.py").write_text(f"{before}            {line}\n{loss}{after}")
    number = before.count("\n") + 1
    answer = leanft("plan", f"{tmp_path}/mine.py", "--config", "tiny/full", "device=cpu")
    assert answer.code == 2
    assert f"mine.py, line {number}: `{line}` cannot be simulated (DynamicOutputShapeException" in answer.err
    assert "torch.where" in answer.err and "Traceback" not in answer.err
    (tmp_path / "own.py").write_text("def fn(pairs, beta):\n    return pairs.margin[pairs.margin > 0]\n")
    answer = leanft("plan", "dpo", "--config", "tiny/dpo", "device=cpu", f"loss.name={tmp_path}/own.py:fn")
    assert answer.code == 2 and "own.py, line 2: `return pairs.margin[pairs.margin > 0]` cannot be" in answer.err


def test_the_picture_is_drawn(tmp_path):
    timeline = [(0.0, {"weights": GIB}), (1.0, {"weights": GIB, "loss": GIB, "batch": 10}), (2.0, {"weights": GIB})]
    rehearsal = Rehearsal(Moment("loss", timeline[1][1]), 2.0, 8, 4, timeline)
    for budget_bytes in (None, 3 * GIB):
        picture.draw_timeline(rehearsal, tmp_path / "step.png", "tiny on T4", budget_bytes)
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "step.png").unlink()


def test_many_gpus_are_planned_with_what_they_send(leanft, monkeypatch):
    monkeypatch.setattr(search, "search", lambda *arguments, **named: None)  # the search has its own tests
    tiny = ("--config", "tiny/full", "data.max_length=64", "--device-name", "H100")
    answer = leanft("plan", "finetune", *tiny, "gradient_accumulation_steps=4", "--gpus", "2", "--nodes", "2")
    assert answer.code == 0, answer.err
    assert "planned for 4 x H100 on 2 machines in " in answer.out
    assert re.search(r"peak [\d.]+ GiB on each", answer.out)
    assert re.search(r"each GPU sends 0 B within its machine and [\d.]+ MiB to other machines per step", answer.out)
