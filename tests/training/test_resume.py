"""The real recipe with real data, decoder and optimizers: a resumed run is bitwise equal to an uninterrupted run."""

import json
import re

import pytest

from lean_ft.system.run_directory import write_manifest
from lean_ft.training.checkpoints import Checkpoints
from tests.training.toy_runs import digests, metrics

RULES = ("adamw", "adamw_8bit", "adafactor", "sgd")


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.name=adamw_8bit", "optimizer.in_backward=true", "data.packing=bfd"],
        ["optimizer.name=adamw", "model.dtype=bfloat16", "optimizer.stochastic_rounding=true"],
        *(
            [f"optimizer.name={rule}", f"optimizer.in_backward={in_backward}", f"data.packing={packing}"]
            for i, rule in enumerate(RULES)
            for in_backward, packing in zip(
                ("false", "true"), ("none", "bfd") if i % 2 else ("bfd", "none"), strict=True
            )
            if (rule, in_backward) != ("adamw_8bit", "true")
        ),
        ["optimizer.name=adamw", "clip_grad_norm=0.5"],
        ["optimizer.name=adamw_8bit", "model.dtype=bfloat16", "optimizer.update_clipping=true", "optimizer.ema=0.9"],
        ["optimizer.name=adamw", "model.dtype=float16"],
        ["optimizer.name=adamw", "save_async=true", "save_every=1", "keep_last=2", "optimizer.ema=0.9"],
        ["optimizer.name=sgd", "optimizer.momentum=0.9", "memory.activation_checkpointing=full"],
        ["optimizer.name=adamw", "neftune_alpha=5", "freeze=[embed_tokens]"],
    ],
    ids=" ".join,
)
def test_resumed_equals_uninterrupted(settings, train_real, tmp_path):
    settings = [*settings, "max_steps=8"]
    whole = train_real(tmp_path / "whole", *settings)
    last = max(p.name for p in whole.glob("step_*"))
    train_real(tmp_path / "run", *settings, "max_steps=2")
    train_real(tmp_path / "run", *settings, "max_steps=5")
    train_real(tmp_path / "run", *settings)
    assert digests(tmp_path / "run" / last) == digests(whole / last)
    assert metrics(tmp_path / "run", timed=False) == metrics(whole, timed=False)
    losses = [row["loss"] for row in metrics(whole)]
    assert losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 4, 6])  # during an epoch, at its end, in the next epoch
@pytest.mark.parametrize(("batch_size", "accumulation", "packing"), [(1, 4, "none"), (4, 1, "bfd")])
def test_the_same_rows_a_step_in_other_batches_go_on(
    batch_size, accumulation, steps, packing, train_real, tmp_path, capsys
):
    """As after running out of memory. Each step has the same rows."""
    settings = [f"data.packing={packing}", "batch_size=2", "optimizer.name=sgd", "epochs=9"]
    whole = metrics(train_real(tmp_path / "whole", *settings, "max_steps=8"))
    train_real(tmp_path / "run", *settings, f"max_steps={steps}")
    other = [f"batch_size={batch_size}", f"gradient_accumulation_steps={accumulation}", "max_steps=8"]
    run = metrics(train_real(tmp_path / "run", *settings, *other))
    assert f"changed     batch_size: 2 then, {batch_size} now" in capsys.readouterr().out
    assert [row["target_tokens"] for row in run] == [row["target_tokens"] for row in whole]
    assert [row["loss"] for row in run] == pytest.approx([row["loss"] for row in whole], rel=1e-4)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch_size=4"], "With batch_size=4, set gradient_accumulation_steps=1 to keep 4 rows per step."),
        (["batch_size=3"], "batch_size and gradient_accumulation_steps may change if a step keeps its 4 rows."),
        (["gradient_accumulation_steps=4"], "With batch_size=2, set gradient_accumulation_steps=2"),
        (["batch_size=4", "gradient_accumulation_steps=1", "seed=3"], "seed: 0 then, 3 now"),
    ],
)
def test_other_batches_are_refused_with_the_way_out(settings, message, train_real, tmp_path):
    train_real(tmp_path / "run", "max_steps=2")
    with pytest.raises(ValueError, match="written with other settings") as refusal:
        train_real(tmp_path / "run", *settings)
    assert message in str(refusal.value)


def test_batches_that_are_not_cut_from_one_order_of_rows_keep_their_size(train_real, tmp_path):
    train_real(tmp_path / "run", "max_steps=2", "data.packing=padding_free")
    with pytest.raises(ValueError, match="the batch_size changed since the checkpoint"):
        train_real(tmp_path / "run", "data.packing=padding_free", "batch_size=4", "gradient_accumulation_steps=1")


def test_data_is_known_by_its_content(train_real, inputs, tmp_path):
    train_real(tmp_path / "run", "max_steps=2")
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((inputs / "rows.jsonl").read_bytes())
    train_real(tmp_path / "run", "max_steps=4", f"data.source={moved}")
    assert (tmp_path / "run/step_00000004").exists()

    moved.write_text(moved.read_text().replace("5 times 5", "6 times 5"))
    refusal = rf"other data:\n  removed: {inputs}/rows.jsonl\n  added: {moved}\nRestore what"
    with pytest.raises(ValueError, match=refusal):
        train_real(tmp_path / "run2", f"resume={tmp_path / 'run/step_00000002'}", f"data.source={moved}")
    with pytest.raises(ValueError, match=r"\n  data\.max_length: 48 then, 40 now"):
        train_real(tmp_path / "run", "data.max_length=40")


def test_each_cause_of_other_data_is_named_without_hashes(train_real, tmp_path):
    """Also by a checkpoint of a version that kept no record of files."""
    code, template, rows = tmp_path / "own.py", tmp_path / "t.jinja", tmp_path / "rows.jsonl"
    rows.write_text('{"q": "what is it", "a": "it"}\n' * 4)
    code.write_text(
        "def rows(row):\n    return dict(prompt=[dict(role='user', content=row['q'])], completion=row['a'])\n"
    )
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    settings = [f"data.source={rows}", f"data.format={code}:rows", f"data.chat_template={template}", "max_steps=2"]
    train_real(tmp_path / "run", *settings)

    def refusal() -> str:
        with pytest.raises(ValueError, match="was trained on other data") as refused:
            train_real(tmp_path / "run", *settings, "max_steps=4")
        assert not re.search(r"\b[0-9a-f]{16,}\b", str(refused.value))
        assert f"set model.path={tmp_path}/run/step_00000002 and a new output_dir" in str(refused.value)
        return str(refused.value)

    for file, line in (
        (rows, f"changed: {rows} (124 bytes then, 125 bytes now)"),
        (code, f"changed: {code} (data.format)"),
        (template, f"changed: {template} (data.chat_template) (52 bytes then, 53 bytes now)"),
    ):
        before = file.read_text()
        file.write_text(before + "\n")
        assert f"other data:\n  {line}\nRestore" in refusal()
        file.write_text(before)

    state_file = tmp_path / "run/step_00000002/training_state/training_state.json"
    state = json.loads(state_file.read_text())
    del state["data_contents"]
    state_file.write_text(json.dumps(state))
    (state_file.parents[1] / "manifest.json").unlink()
    write_manifest(state_file.parents[1], 2)
    rows.write_text(rows.read_text() + "\n")
    assert "the data changed since the checkpoint, which has no record of its files" in refusal()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.in_backward=true", "optimizer.name=adafactor"],
        ["data.packing=bfd", "model.dtype=bfloat16", "log.to=[csv]", "neftune_alpha=5"],
    ],
    ids=" ".join,
)
def test_an_evaluation_hit_by_a_kill_is_repeated(settings, train_real, tmp_path, capsys):
    settings = [*settings, "data.validation_fraction=0.3", "seed=3", "eval_every=2"]
    run = train_real(tmp_path / "run", *settings, "max_steps=3")
    saved, file = digests(run / "step_00000003"), run / "metrics.jsonl"
    whole, lines = metrics(run, timed=False), file.read_text().splitlines(keepends=True)
    for cut in ("", lines[-1][:12]):  # killed before or while the last line was written
        file.write_text("".join(lines[:-1]) + cut)
        capsys.readouterr()
        train_real(run, *settings, "max_steps=3")
        said = capsys.readouterr().out
        assert (
            f"after step 3: held-out loss {whole[-1]['eval_loss']:.4g}" in said and "complete    3 steps done" in said
        )
        assert metrics(run, timed=False) == whole and digests(run / "step_00000003") == saved
    train_real(run, *settings, "max_steps=3")
    assert metrics(run, timed=False) == whole  # and it is not repeated again

    part = train_real(tmp_path / "part", *settings, "max_steps=2")
    file = part / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    train_real(part, *settings, "max_steps=3")
    assert metrics(part, timed=False) == whole and digests(part / "step_00000003") == saved


@pytest.mark.long
@pytest.mark.parametrize(("lr", "diverges"), [("1e-3", False), ("10", True)])
def test_a_diverged_run_ends_with_a_warning(lr, diverges, train_real, tmp_path, capsys):
    train_real(tmp_path / "run", f"optimizer.lr={lr}", "max_steps=8")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("WARNING     the run diverged" if diverges else "loss ")


def test_the_disk_estimate_is_the_size_of_a_checkpoint(train_real, tmp_path, monkeypatch):
    estimates = []
    monkeypatch.setattr("lean_ft.training.checkpoints.free_bytes", lambda _: estimates.append(0) or 2**40)
    needed = Checkpoints.needed_bytes
    monkeypatch.setattr(Checkpoints, "needed_bytes", lambda self: estimates.append(needed(self)) or estimates[-1])
    run = train_real(tmp_path / "run", "max_steps=1")
    size = sum(file.stat().st_size for file in run.glob("step_*/**/*") if file.is_file())
    assert size <= max(estimates) <= size + 2 * 2**20
