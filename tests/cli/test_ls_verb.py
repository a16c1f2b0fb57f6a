"""`leanft ls`: the list of recipes and presets, and the settings that a recipe needs."""

import re

import pytest

from lean_ft.system import catalog


def test_recipes_and_presets_are_listed(leanft, shipped):
    answer = leanft.ok("ls")
    assert [line.split(maxsplit=5) for line in answer.out.splitlines() if line.startswith("  ")] == [
        ["other", "Another", "one,", "in", "two", "lines."],
        ["toy_single_device", "A", "toy", "recipe:", "does", "what `act` says."],
        ["preset", "recipe", "params", "card", "reserved"],
        ["foreign", "-", "-", "-", "-", "lora.rank=8"],
        ["tiny/toy", "-", "-", "-", "-", "The toy."],
    ]


@pytest.mark.long
def test_the_columns_of_presets_are_what_their_comments_say(leanft, monkeypatch):
    """Use the shipped presets, whose comments all have the same form."""
    lines = {line.split()[0]: line.split()[1:] for line in leanft("ls").out.splitlines() if line.startswith("  ")}
    for name, recipe in (("llama3_1_8b/qlora", "finetune"), ("qwen3_0_6b/full", "full_finetune_single_device")):
        text = catalog.presets()[name].read_text()
        said = re.search(r"(\S+) B parameters.* on a GPU with (\d+) GB: (\S+) GiB", text, re.DOTALL)
        assert said
        parameters, card, peak = said.groups()
        assert lines[name] == [recipe, parameters, "B", card, "GB", peak, "GiB"]
    assert lines["tiny/full"] == ["full_finetune_single_device", "0.89", "M", "-", "-"]
    gated = leanft("ls").out.splitlines()[-2]
    assert "llama3_1_8b/qlora" in gated
    assert "qwen3_0_6b" not in gated


def test_what_trains_nothing_has_a_heading_of_its_own_and_the_memory_is_named(leanft):
    out = leanft("ls").out
    training, _, others = out.partition("Presets")[0].partition("With a trained model\n")
    names = {line.split()[0] for line in others.splitlines() if line.strip()}
    assert names == {"chat", "evaluate", "generate", "quantize"}
    assert not names & {line.split()[0] for line in training.splitlines() if line.strip()}
    assert {recipe for recipe in catalog.recipes() if f"  {recipe} " in training} == set(catalog.recipes()) - names
    assert "reserved" in out


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("recipe", "has", "lacks"),
    [
        ("full_finetune_single_device", "tiny/full", "tiny/lora"),
        ("finetune", "tiny/lora", "tiny/full"),  # it accepts tiny/full too
        ("lora_finetune_single_device", "tiny/lora", "tiny/full"),
        ("generate", "none", "tiny/"),
    ],
)
def test_a_recipe_lists_the_presets_that_name_it(leanft, recipe, has, lacks):
    presets = leanft("ls", recipe).out.partition("Presets")[2].partition("Settings")[0]
    assert has in presets
    assert lacks not in presets


@pytest.mark.long
def test_a_users_own_recipe_lists_the_presets_that_fit(leanft, tmp_path):
    leanft("cp", "full_finetune_single_device", tmp_path / "mine.py")
    presets = leanft("ls", tmp_path / "mine.py").out.partition("Presets")[2].partition("Settings")[0]
    assert "tiny/full" in presets
    assert "tiny/lora" not in presets


def test_a_recipe_shows_its_presets_and_what_it_needs(leanft, shipped):
    answer = leanft.ok("ls", "toy_single_device")
    assert "A toy recipe" in answer.out
    assert "tiny/toy" in answer.out
    assert "foreign" not in answer.out
    assert "model.path" in answer.out
    assert "leanft cat toy_single_device" in answer.out


def test_broken_files_hide_no_others(leanft, shipped):
    (shipped / "recipes" / "broken.py").write_text("def main(:")
    (shipped / "recipes" / "marked.py").write_text('"""Has [bold]brackets[/nothing] in it."""')
    (shipped / "configs" / "broken.yaml").write_text("a: [1")
    answer = leanft.ok("ls")
    for shown in ("(not valid Python)", "Has [bold]brackets[/nothing] in it.", "not valid YAML", "tiny/toy"):
        assert shown in answer.out
