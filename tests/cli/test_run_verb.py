"""`leanft run`: settings reach the recipe, and every outcome has its exit code and message."""

import importlib
from unittest import mock

import pytest

from lean_ft.plan import beforehand
from lean_ft.plan.beforehand import Outlook
from lean_ft.system.before_torch import CUDA_ALLOCATOR_VARIABLES

TRAINING_RECIPE = '''"""A recipe of one line."""
from lean_ft.settings import ModelConfig, RecipeConfig, SFTDataConfig

class Config(RecipeConfig):
    model: ModelConfig
    data: SFTDataConfig

def main(cfg):
    print("ran")
'''


def test_a_recipe_runs_with_preset_and_overrides(leanft, shipped, toy_recipe):
    for recipe in ["toy_single_device", toy_recipe]:
        for preset in ["tiny/toy", shipped / "configs" / "tiny" / "toy.yaml"]:
            answer = leanft("run", recipe, "--config", preset, "batch_size=3")
            assert (answer.code, answer.out, answer.err) == (0, "ran with tiny 3\n", "")
    assert leanft("run", "-c", "tiny/toy", "toy_single_device").out == "ran with tiny 2\n"
    assert leanft("run", toy_recipe, "model.path=m", "--config=tiny/toy").out == "ran with m 2\n"


def test_a_preset_that_names_its_recipe_is_enough(leanft, shipped):
    (shipped / "configs/tiny/named.yaml").write_text("recipe: toy_single_device\nmodel: {path: tiny}\n")
    for preset in ("tiny/named", shipped / "configs/tiny/named.yaml"):
        assert leanft("run", preset, "batch_size=3").out == "ran with tiny 3\n"
    toy = shipped / "configs/tiny/toy.yaml"
    (unnamed := toy.with_name("unnamed.yaml")).write_text("model: {path: tiny}\n")
    refusal = leanft.refused("run", unnamed)
    assert f"{unnamed} does not name one (`recipe: NAME`). Name it: leanft run RECIPE --config {unnamed}." in refusal


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("model:\n  _component_: torchtune.models.qwen2_5.qwen2_5_0_5b\nepochs: 1\n", "torchtune"),
        ("base_model: Qwen/Qwen2.5-0.5B\nadapter: lora\n", "axolotl"),
        ("model_name_or_path: Qwen/Qwen2.5-0.5B\nstage: sft\n", "LLaMA-Factory"),
    ],
)
def test_a_configuration_of_another_tool_names_the_command_that_converts_it(leanft, tmp_path, text, tool):
    (file := tmp_path / "theirs.yaml").write_text(text)
    for arguments in ([file], ["finetune", "--config", file]):
        refusal = leanft.refused("run", *arguments)
        assert f"theirs.yaml is a configuration of {tool}. Convert it: leanft convert-config {file} " in refusal


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        ("refuse", 2, "error: batch_size must be even; it is odd. Set batch_size=4.{place}"),
        ("fail", 1, "error: RuntimeError: the loss is not finite{place}{debug}"),
        ("fail silently", 1, "error: RuntimeError{place}{debug}"),
        ("fail inside a library", 1, "error: StatisticsError: n must be at least 1{place}{debug}"),
        ("open", 2, "error: No such file or directory: /no/such/file.jsonl{place}"),
        ("interrupt", 130, "error: interrupted.\n"),
        ("exit", 143, ""),
    ],
)
def test_how_a_run_ends(leanft, toy_recipe, shipped, act, code, message):
    """Errors name the line in the user's own recipe, but not in a shipped recipe."""
    raising = {"refuse": "raise ValueError(", "fail": "raise RuntimeError(", "fail silently": "raise RuntimeError"}
    raising |= {"fail inside a library": "statistics.quantiles(", "open": "open("}
    answer = leanft("run", toy_recipe, "model.path=m", f"act={act}")
    lines = [line.strip() for line in toy_recipe.read_text().splitlines()]
    place = ""
    if act in raising:
        number = lines.index(f'elif cfg.act == "{act}":') + 1
        while not lines[number].startswith(raising[act]):
            number += 1
        place = f"\nIn {toy_recipe}, line {number + 1}: {lines[number]}"
    debug = "\nUse --debug to print the whole traceback."
    assert (answer.code, answer.err.rstrip("\n")) == (code, message.format(place=place, debug=debug).rstrip("\n"))
    answer = leanft("run", "toy_single_device", "model.path=m", f"act={act}")
    assert (answer.code, answer.err.rstrip("\n")) == (code, message.format(place="", debug=debug).rstrip("\n"))


def test_the_whole_traceback_is_in_the_run_directory(leanft, tmp_path):
    """Written for every failure, also in files beside the recipe, but not into a folder that is not a run directory."""
    recipe, output = tmp_path / "mine.py", tmp_path / "run"
    recipe.write_text(TRAINING_RECIPE + "    import my_loss_of_this_test\n    my_loss_of_this_test.compute(cfg.seed)\n")
    beside = tmp_path / "my_loss_of_this_test.py"
    beside.write_text("import json\n\ndef compute(seed):\n    json.loads('{' * seed)\n")
    arguments = ["run", recipe, "model.path=tiny", "data.source=x.jsonl", "seed=2"]
    for num_failures in (1, 2):
        answer = leanft(*arguments, f"output_dir={output}")
        assert answer.err.splitlines() == [
            "error: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            f"In {beside}, line 4: json.loads('{{' * seed)",
            f"The whole traceback is in {output / 'traceback.log'}.",
        ]
        assert (output / "traceback.log").read_text().count("Traceback (most recent call last)") == num_failures
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("...")
    assert "holds files that do not belong to a run (chapter.tex)" in leanft(*arguments, f"output_dir={thesis}").err
    assert [path.name for path in thesis.iterdir()] == ["chapter.tex"]


def test_debug_shows_the_traceback_and_keeps_the_code(leanft, toy_recipe):
    for act, code in [("refuse", 2), ("fail", 1)]:
        answer = leanft("run", toy_recipe, "model.path=m", f"act={act}", "--debug")
        assert answer.code == code
        assert f'File "{toy_recipe}", line ' in answer.err
        assert "error: " in answer.err


def test_out_of_memory_says_what_takes_less(leanft, toy_recipe, monkeypatch):
    answer = leanft("run", toy_recipe, "model.path=m", "act=exhaust")
    assert answer.code == 1
    assert "MemoryError" in answer.err
    assert "Out of memory. Lower batch_size" in answer.err


def test_a_training_run_tells_its_plan_and_warns_where_it_does_not_fit(leanft, tmp_path, monkeypatch):
    recipe = tmp_path / "mine.py"
    recipe.write_text(TRAINING_RECIPE)
    arguments = ["run", recipe, "model.path=tiny", "data.source=x.jsonl", f"output_dir={tmp_path / 'run'}"]
    assert leanft(*arguments).out == "ran\n", "a file of the user's own runs once"
    arguments += ["plan=true"]
    fitting = leanft(*arguments)
    assert (fitting.code, fitting.out.splitlines()[-1]) == (0, "ran")
    assert fitting.out.startswith("plan        peak memory below ")
    monkeypatch.setattr(beforehand, "foresee", lambda recipe, cfg: Outlook(2**40, "loss", 2**30, "cpu"))
    answer = leanft(*arguments)
    assert "peak memory 1024.00 GiB, reached in: loss; 1.00 GiB free on cpu" in answer.out
    assert "WARNING: not enough memory." in answer.out
    assert answer.out.endswith("ran\n")
    monkeypatch.setattr(beforehand, "foresee", mock.Mock(side_effect=RuntimeError("no such operator")))
    answer = leanft(*arguments)  # a rehearsal that fails does not stop the run
    assert answer.code == 0
    assert answer.out == "plan        no memory estimate: no such operator\nran\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef main(:\n    pass\n", "line 2: invalid syntax: def main(:"),
        (
            "import os\n\nimport no_such_module_at_all\n",
            "line 3: ModuleNotFoundError: No module named 'no_such_module_at_all'",
        ),
        ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
        ("x = 1\n", "is not a recipe: expected a class `Config(RecipeConfig)` and a function `main(cfg)`"),
        ("Config = dict\ndef main(cfg): pass\n", "is not a recipe"),
        (TRAINING_RECIPE.replace("data: ", "view: memoryview\n    data: "), "Unable to generate"),
    ],
)
def test_a_recipe_that_cannot_be_loaded_names_its_file_and_line(leanft, tmp_path, source, message):
    recipe = tmp_path / "broken.py"
    recipe.write_text(source)
    refusal = leanft.refused("run", recipe)
    assert str(recipe) in refusal
    assert message in refusal
    assert "Traceback" not in refusal


def test_a_recipe_may_import_what_lies_beside_it_and_have_the_name_of_a_module(leanft, toy_recipe):
    (toy_recipe.parent / "beside_the_toy.py").write_text("PATH = 'from beside'\n")
    recipe = toy_recipe.with_name("json.py")
    recipe.write_text(toy_recipe.read_text() + "\nfrom beside_the_toy import PATH\n")
    leanft.ok("run", recipe, "model.path=m")
    assert hasattr(importlib.import_module("json"), "dumps")


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ({}, ["expandable_segments:True", "allocator", "expandable_segments:True", "None"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ["None", "allocator", "None", "max_split_size_mb:64"]),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, ["backend:native", "allocator", "backend:native", "None"]),
    ],
)
def test_the_allocator_is_set_before_the_recipe_is_imported_unless_the_user_did(
    leanft, toy_recipe, monkeypatch, given, printed
):
    for name in CUDA_ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    toy_recipe.write_text("import os\nprint(os.environ.get('PYTORCH_ALLOC_CONF'))\n" + toy_recipe.read_text())
    assert leanft("run", toy_recipe, "model.path=m", "act=environment").out.split() == printed
