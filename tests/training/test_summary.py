"""The command that a stopped run is told to go on with."""

import shlex
import sys

import pytest

from lean_ft.training.summary import command_to_continue


@pytest.mark.parametrize(
    ("program", "started"),
    [
        ("/usr/local/bin/leanft", ["leanft"]),
        ("/checkout/lean_ft/__main__.py", ["leanft"]),
        ("my_recipe.py", ["python", "my_recipe.py"]),
        ("/home/me/lean_ft/my_recipe.py", ["python", "/home/me/lean_ft/my_recipe.py"]),
        ("/home/me/my recipes/lean_ft.py", ["python", "/home/me/my recipes/lean_ft.py"]),
    ],
)
def test_a_run_goes_on_with_the_program_that_started_it(program, started, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "run", "full_finetune_single_device", "output_dir=/tmp/a b"])
    command = command_to_continue("auto")
    assert shlex.split(command) == [*started, "run", "full_finetune_single_device", "output_dir=/tmp/a b"]


def test_a_run_that_was_not_to_resume_resumes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["leanft", "run", "lora_single_device", "resume=never"])
    assert command_to_continue("never") == "leanft run lora_single_device resume=auto"


@pytest.mark.parametrize("program", ["", "-c", "/venv/lib/python3/site-packages/ipykernel_launcher.py"])
def test_where_there_is_no_command_the_call_is_meant(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "-f", "kernel.json"])
    assert command_to_continue("auto") == "the same call again"
    assert command_to_continue("never") == "the same call again, with resume='auto'"
