"""Every recipe runs with its required settings alone, from an empty folder, and its command can be repeated."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import lean_ft
from lean_ft.cli.arguments import load_run
from lean_ft.cli.run import run_recipe
from lean_ft.hub.paths import resolve_model_path
from lean_ft.system import catalog
from lean_ft.training import Run
from tests.recipes.cases import FORMATS, REQUIRED


def start(recipe: str, *settings: str) -> Any:
    """What `leanft run` does."""
    return run_recipe(*load_run(recipe, None, list(settings), runs=True))


@pytest.fixture(autouse=True)
def _from_an_empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def command_of(recipe: str, kind: str, model: str = "tiny") -> list[str]:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FORMATS[recipe][kind]))
    return [f"model.path={model}", "data.source=rows.jsonl", *REQUIRED.get(recipe, ())]


def stop_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Run.log

    def log_and_stop(run: Run, **values: Any) -> None:
        monkeypatch.setattr(Run, "log", log)
        log(run, **values)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "log", log_and_stop)


def test_every_recipe_is_tried() -> None:
    others = {"chat", "evaluate", "generate", "quantize"}
    assert FORMATS.keys() | others == {*catalog.recipes(), *catalog.aliases()}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("recipe", "kind"), [(recipe, kind) for recipe, formats in FORMATS.items() for kind in formats]
)
def test_the_same_command_resumes_and_then_takes_the_next_name(recipe, kind, monkeypatch, capsys) -> None:
    command = command_of(recipe, kind)
    first = Path("runs") / f"tiny_{catalog.without_alias(recipe)}"
    stop_after_a_step(monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        start(recipe, *command)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert f"output_dir  {first}: a new run\n" in capsys.readouterr().out
    assert start(recipe, *command) == first
    said = capsys.readouterr().out
    assert f"output_dir  {first}: resumes its unfinished run\n" in said
    assert "after step 1 of 2" in said
    assert start(recipe, *command) == first.with_name(f"{first.name}_2")
    assert f"_2: a new run; {first} holds a finished run\n" in capsys.readouterr().out
    for run in (first, first.with_name(f"{first.name}_2")):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert lean_ft.read_metrics(first)[-1]["loss"] == lean_ft.read_metrics(f"{first}_2")[-1]["loss"]


@pytest.fixture
def own_model() -> str:
    shutil.copytree(resolve_model_path("tiny"), "models/My Model")
    return "models/My Model"


@pytest.mark.first(1)
@pytest.mark.parametrize("recipe", [name for name in FORMATS if name not in catalog.aliases()])
def test_with_a_model_of_ones_own(recipe, own_model) -> None:
    command = command_of(recipe, next(iter(FORMATS[recipe])), own_model)
    command = [word.replace("teacher=tiny", f"teacher={own_model}") for word in command]
    assert start(recipe, *command) == Path(f"runs/My-Model_{recipe}")


def test_a_run_is_a_model(capsys) -> None:
    """As model.path and distill.teacher: its newest checkpoint, which config.yaml records."""
    first = start("full_finetune_single_device", *command_of("full_finetune_single_device", "messages"))
    newest = f"{first}/step_00000002"
    teacher = [f"model.path={first}", f"distill.teacher={first}", "data.source=rows.jsonl"]
    taught = start("distill", *teacher)
    assert taught == Path(f"{first}_distill")
    assert f"path: {newest}\n" in (text := (taught / "config.yaml").read_text())
    assert f"teacher: {newest}\n" in text
    assert f"run         teacher {newest}\n" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_is_a_value_model_a_reward_and_no_model_if_it_has_an_adapter() -> None:
    pairs = command_of("reward", "preference")
    judge = start("reward", *pairs)
    tuned = start("ppo", *command_of("ppo", "prompt")[:2], f"rewards={judge}", f"value.path={judge}")
    assert f"path: {judge}/step_00000002\n" in (tuned / "config.yaml").read_text()
    start("finetune", *command_of("finetune", "messages"), "lora.rank=4", "output_dir=runs/lora")
    with pytest.raises(ValueError, match=r"it is an adapter.*`leanft export runs/lora/step_00000002 merged --merge`"):
        start("finetune", "model.path=runs/lora", "data.source=rows.jsonl")


@pytest.mark.long
def test_a_run_resumes_with_the_checkpoint_of_the_run_that_it_began_with(monkeypatch, capsys) -> None:
    first = start("full_finetune_single_device", *command_of("full_finetune_single_device", "messages"))
    stop_after_a_step(monkeypatch)
    with pytest.raises(SystemExit):
        start("finetune", *command_of("finetune", "messages", str(first)))
    shutil.copytree(first / "step_00000002", first / "step_00000003")  # the model's run went on
    capsys.readouterr()
    command = command_of("finetune", "messages", str(first))
    assert start("finetune", *command) == Path(f"{first}_finetune")
    assert "step_00000002, the checkpoint that this run began with" in capsys.readouterr().out


@pytest.mark.long
def test_recipes_that_run_a_model_return_what_they_made(own_model) -> None:
    command_of("finetune", "messages")
    results = start("evaluate", own_model, "data.source=rows.jsonl")
    assert results["answers"].keys() == {"exact_match", "num_right", "num_questions"}
    assert results["answers"]["num_questions"] == len(FORMATS["finetune"]["messages"])
    assert start("quantize", own_model, "kind=int8", "output=small") == Path("small")
    (text,) = start("generate", "small", "prompt=What is 2 plus 3?", "max_new_tokens=8")
    Path("questions.txt").write_text("What is 2 plus 3?\nWhat is 2 plus 3?\n")
    assert start("generate", "small", "prompts_file=questions.txt", "max_new_tokens=8") == [text, text]
