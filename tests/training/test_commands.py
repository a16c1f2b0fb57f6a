"""The commands that a run prints."""

import sys
from pathlib import Path

import pytest

from lean_ft.settings.run import DEFAULT_OUTPUT_DIR
from lean_ft.training.commands import command_to_continue


@pytest.mark.parametrize(
    ("started", "resume", "command"),
    [
        (["/usr/local/bin/leanft", "run", "x", "output_dir=/tmp/a b"], "auto", "leanft run x 'output_dir=/tmp/a b'"),
        (["/checkout/lean_ft/__main__.py", "run", "x"], "auto", "leanft run x"),
        (["/home/me/lean_ft/my_recipe.py", "a=1"], "auto", "python /home/me/lean_ft/my_recipe.py a=1"),
        (["/home/me/my recipes/lean_ft.py"], "auto", "python '/home/me/my recipes/lean_ft.py'"),
        (["leanft", "run", "x", "resume=never"], "never", "leanft run x resume=auto"),
        (["", "-f", "kernel.json"], "auto", "the same call again"),
        (["/site-packages/ipykernel_launcher.py", "-f"], "never", "the same call again, with resume='auto'"),
    ],
)
def test_a_run_resumes_with_the_program_that_started_it(started, resume, command, monkeypatch, config):
    monkeypatch.setattr(sys, "argv", started)
    cfg = config(DEFAULT_OUTPUT_DIR, resume=resume)
    assert command_to_continue(cfg) == command
    later = cfg.model_copy(update={"output_dir": Path(f"{cfg.output_dir}_2")})  # chosen after another run
    assert f"output_dir={later.output_dir}" in command_to_continue(later).replace("'", "")
