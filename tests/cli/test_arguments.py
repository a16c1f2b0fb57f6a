"""gradient_accumulation_steps with several processes: one batch per process, unless the user sets the number."""

import pytest

from lean_ft.cli.arguments import load_run

NOTE = "note: gradient_accumulation_steps=4 instead of 1, so that each of {} processes has a batch."


@pytest.fixture
def launched(leanft, monkeypatch, tmp_path):
    """Return the arguments that `leanft run` would launch processes with, and its output."""
    calls = []
    monkeypatch.setattr("lean_ft.cli.run.launch", lambda plan, arguments, minutes: calls.append(arguments))

    def call(*arguments):
        answer = leanft("run", *arguments, f"output_dir={tmp_path / 'run'}")
        return (calls.pop() if calls else None), answer

    return call


def test_a_preset_made_for_one_process_runs_on_many(launched, leanft, tmp_path):
    for processes, *settings in ([4], [8, "parallel.context=2"]):  # two processes that share a batch need only one
        arguments, answer = launched("--nproc-per-node", processes, "finetune", "--config", "tiny/full", *settings)
        assert arguments[-1] == "gradient_accumulation_steps=4"
        assert NOTE.format(processes) in answer.err


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ([], None),  # 8 completions of one prompt
        (["generation.num_answers=6"], 3),  # 24 completions of 4 prompts
        (["batch_size=2", "generation.steps_per_round=2"], 2),
        (["generation.num_answers=16"], 2),
        (["batch_size=2"], 4),
        (["batch_size=2", "gradient_accumulation_steps=3"], None),  # refused when the run starts
    ],
)
def test_a_round_of_completions_has_whole_groups(settings, number, capsys):
    needed = ["model.path=tiny", "data.source=tiny/problems_train.jsonl", "rewards=exact_answer"]
    _, cfg = load_run("grpo", None, [*needed, *settings])
    assert (number is None) == (capsys.readouterr().err == "")
    assert number is None or cfg.gradient_accumulation_steps == number


@pytest.mark.long
def test_a_preset_made_for_one_process_is_planned_for_many(leanft):
    leanft.ok("plan", "finetune", "--config", "tiny/full", "--gpus", 4)


def test_what_the_user_chose_is_kept(launched, leanft, tmp_path):
    arguments, answer = launched(
        "--nproc-per-node", 4, "finetune", "--config", "tiny/full", "gradient_accumulation_steps=1"
    )
    assert arguments[-2:] == ["gradient_accumulation_steps=1", f"output_dir={tmp_path / 'run'}"]
    own = tmp_path / "own.yaml"
    own.write_text(
        "recipe: finetune\nmodel: {path: tiny}\ndata: {source: tiny/train.jsonl}\ngradient_accumulation_steps: 1\n"
    )
    arguments, also = launched("--nproc-per-node", 4, "--config", own)
    assert arguments[-1] == "gradient_accumulation_steps=1"
    assert "note" not in answer.err + also.err
