"""`leanft ls`: what there is, and what one recipe needs."""


def test_recipes_and_presets_are_listed(leanft, shipped):
    answer = leanft("ls")
    assert answer.code == 0
    lines = [line.split(maxsplit=1) for line in answer.out.splitlines() if line.startswith("  ")]
    assert dict(lines) == {
        "toy_single_device": "A toy recipe: does what `act` says.",
        "other": "Another one, in two lines.",
        "tiny/toy": "The toy.",
        "foreign": "lora.rank=8",
    }


def test_lines_in_a_pipe_are_whole(leanft, shipped, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    (shipped / "configs" / "long.yaml").write_text(f"data: {{source: {'x' * 500}}}\n")
    assert f"  long      data.source={'x' * 500}\n" in leanft("ls").out


def test_a_recipe_shows_its_presets_and_what_it_needs(leanft, shipped):
    answer = leanft("ls", "toy_single_device")
    assert answer.code == 0
    assert "A toy recipe" in answer.out
    assert "tiny/toy" in answer.out
    assert "foreign" not in answer.out
    assert "model.path" in answer.out
    assert "leanft cat toy_single_device" in answer.out


def test_an_empty_catalogue_says_so(leanft, shipped):
    for file in [*shipped.rglob("*.py"), *shipped.rglob("*.yaml")]:
        file.unlink()
    assert leanft("ls").out.count("none") == 2


def test_a_file_that_is_not_python_is_listed_as_such(leanft, shipped):
    (shipped / "recipes" / "broken.py").write_text("def main(:")
    assert "(not valid Python)" in leanft("ls").out


def test_markup_in_a_file_is_text(leanft, shipped):
    (shipped / "recipes" / "marked.py").write_text('"""Has [bold]brackets[/nothing] in it."""')
    assert "Has [bold]brackets[/nothing] in it." in leanft("ls").out


def test_a_broken_preset_hides_no_other(leanft, shipped):
    (shipped / "configs" / "broken.yaml").write_text("a: [1")
    answer = leanft("ls")
    assert answer.code == 0
    assert "not valid YAML" in answer.out
    assert "tiny/toy" in answer.out


def test_an_unknown_recipe(leanft, shipped):
    answer = leanft("ls", "othr")
    assert answer.code == 2
    assert "Did you mean 'other'?" in answer.err
