"""`leanft`: help, version, typos and imports."""

import os
import subprocess
import sys

import pytest

import lean_ft
from lean_ft.system.before_torch import CUDA_ALLOCATOR_VARIABLES

VERBS = ["run", "ls", "cp", "cat", "validate", "env"]


def test_help_names_every_verb_and_each_has_help(leanft):
    for arguments in [[], ["--help"], ["-h"]]:
        answer = leanft.quiet(*arguments)
        assert all(verb in answer.out for verb in VERBS)
    for verb in VERBS:
        answer = leanft(verb, "--help")
        assert (answer.code, "--debug" in answer.out) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "toy_single_device", "m", "batch_size=3"],
        ["toy_single_device", "m", "batch_size=3"],
        ["toy_single_device", "batch_size=3", "m"],
        ["toy_single_device", "model.path", "=", "m", "batch_size=", "3"],
        ["run", "toy_single_device", "--config", "tiny/toy", "batch_size", "=3", "m"],
        ["--debug", "run", "toy_single_device", "m", "batch_size=3"],
        ["--debug", "--config", "tiny/toy", "toy_single_device", "m", "batch_size=3"],
    ],
)
def test_a_recipe_that_asks_a_model_takes_it_first_and_its_name_is_a_command(leanft, shipped, arguments):
    answer = leanft(*arguments)
    assert (answer.code, answer.out) == (0, "ran with m 3\n")


def test_debug_before_the_verb_prints_the_traceback(leanft, shipped):
    for words in (["cat", "none"], ["nothing"]):
        assert "Traceback" in leanft("--debug", *words).err
        assert leanft("--debug", *words).err.endswith(leanft(*words).err)


def test_help_of_a_recipe_lists_its_settings(leanft, shipped):
    for words in (["run", "toy_single_device", "--help"], ["toy_single_device", "-h"], ["help", "toy_single_device"]):
        answer = leanft.ok(*words)
        assert "\n  model.path=...   " in answer.out
        assert "\n  batch_size=2   " in answer.out
    assert leanft("help").out == leanft("--help").out == leanft().out
    assert leanft("help", "cp").out == leanft("cp", "--help").out


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("leanft pl", ["plan", "plot"]),
        ("leanft run full_", ["full_finetune_single_device", "full_finetune_distributed", "full_dpo_distributed"]),
        (
            "leanft run --config tiny/",
            [
                f"tiny/{name}"
                for name in [
                    "classify",
                    "distill",
                    "dpo",
                    "embed",
                    "full",
                    "grpo",
                    "images",
                    "kto",
                    "lora",
                    "online_dpo",
                    "ppo",
                    "rerank",
                    "reward",
                    "self_distill",
                    "tag",
                    "tools",
                ]
            ],
        ),
        ("leanft cat tiny/f", ["tiny/full"]),
    ],
)
def test_a_shell_is_told_what_could_come_next(leanft, monkeypatch, words, answers):
    variables = {"_LEANFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": f"{words.count(' ')}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = leanft()
    assert (answer.code, answer.out.split()) == (0, answers)


def test_the_version(leanft):
    assert leanft.quiet("--version").out == f"{lean_ft.__version__}\n"


def test_what_needs_no_recipe_imports_no_torch():
    script = (
        "import sys\n"
        "from lean_ft.cli.main import run_command_line\n"
        "for command in ('--help', 'run --help', 'run nonesuch', 'ls'):\n"
        "    try:\n"
        "        run_command_line(command.split())\n"
        "    except SystemExit:\n"
        "        heavy = {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "        assert not heavy, (command, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_run_that_compiles_nothing_imports_no_compiler():
    """The compiler takes a second of every start."""
    script = "import sys, lean_ft.training.run, lean_ft.memory\nprint({'torch._dynamo', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.long
def test_a_reader_that_stops_reading_is_no_error(toy_recipe):
    """`leanft cat RECIPE | head -1` with more output than a pipe's buffer."""
    script = f"{sys.executable} -m lean_ft cat {toy_recipe.with_suffix('.yaml')} | head -n 1; echo ${{PIPESTATUS[0]}}"
    toy_recipe.with_suffix(".yaml").write_text("# a comment\n" * 20_000)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("# a comment\n0\n", "")


GONE = "error: RuntimeError: the run stopped, because the program that read its output"


def test_a_run_whose_reader_is_gone_has_failed(leanft, toy_recipe, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        answer = leanft("run", toy_recipe, "model.path=m", "act=flood")
    assert answer.code == 1 and answer.err.startswith(GONE) and "Traceback" not in answer.err


@pytest.mark.long
def test_a_process_whose_reader_is_gone_has_failed(toy_recipe, monkeypatch):
    """Its first line shows that the allocator is set before the recipe is imported."""
    for name in CUDA_ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    toy_recipe.write_text("import os\nprint(os.environ.get('PYTORCH_ALLOC_CONF'))\n" + toy_recipe.read_text())
    command = f"{sys.executable} -m lean_ft run {toy_recipe} model.path=m act=flood"
    script = f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "expandable_segments:True\n1\n"
    assert done.stderr.startswith(GONE)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
