"""`leanft validate`: check settings and files without a run."""

import json
import re
import shutil

import pytest
import yaml

from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings.describing import describe
from lean_ft.settings.text import dump_chosen, load_config, preset_recipe, preset_values
from lean_ft.system import catalog
from tests.parallel.processes import needs_parts

SET = ["lora.dora=true", "data.columns.prompt=prompt", "optimizer.betas=[0.8,0.9]"]


@pytest.mark.first(1)
@pytest.mark.parametrize("option", [[], ["--all"]])
@pytest.mark.parametrize("overrides", [SET, []], ids=["set", "defaults"])
def test_what_is_valid_is_printed_as_a_preset_that_gives_the_same(leanft, tmp_path, option, overrides):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    given = [
        "model.path=tiny",
        f"data.source=[{tmp_path}/rows.jsonl]",
        "data.max_length=8",
        f"output_dir={tmp_path}/run",
        *overrides,
    ]
    answer = leanft.quiet("validate", "finetune", *given, *option)
    lines = answer.out.splitlines()
    assert lines[-1].startswith("# ok") and (len(lines) > 90 if option else len(lines) < 30)
    preset = tmp_path / "printed.yaml"
    preset.write_text(answer.out)
    config = catalog.load_recipe(catalog.find_recipe("finetune")).Config
    assert load_config(config, preset, []) == load_config(config, None, given)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", [name for name in catalog.presets() if name.startswith("tiny/")])
def test_the_chosen_settings_of_every_recipe_give_the_same_run(tmp_path, name):
    preset = catalog.presets()[name]
    module = catalog.load_recipe(catalog.find_recipe(preset_recipe(preset) or ""))
    required = [s.key for s in describe(module.Config) if s.required and s.key not in preset_values(preset)]
    cfg = load_config(module.Config, preset, [f"{key}=x" for key in required])
    text = dump_chosen(cfg)
    (tmp_path / "chosen.yaml").write_text(text)
    assert load_config(module.Config, tmp_path / "chosen.yaml") == cfg
    assert len(text.splitlines()) < 50 < len(describe(module.Config))


ROWS = {
    "good.jsonl": [{"prompt": "q", "completion": "a"}] * 20,
    "unmapped.jsonl": [{"question": "q", "reply": "a"}],
    "mixed.jsonl": [{"prompt": "q", "completion": "a"}] * 9 + [{"text": "t"}],
    "number.jsonl": [{"prompt": "q", "completion": "a"}] * 9 + [{"prompt": "q", "completion": 3}],
}


@pytest.fixture
def arguments(tmp_path):
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")

    def arguments(*overrides: str) -> list[str]:
        given = ["data.source=DIR/good.jsonl", "output_dir=DIR/run", *overrides]
        return ["--config", "tiny/lora", *(one.replace("DIR", str(tmp_path)) for one in given)]

    return arguments


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.source=DIR/unmapped.jsonl",
            "unmapped.jsonl, line 1: cannot detect the format from the fields question, reply"),
        ("output_dir=DIR", "holds files that do not belong to a run"),
        ("lora.targets=[q_prj]", "'q_prj' matches no layer of this model. Did you mean 'q_proj'"),
        ("data.columns.prompt=promt", "data.columns.prompt=promt: .*no column `promt`.*Did you mean 'prompt'"),
        ("data.chat_template=DIR/none.jinja", "chat template .*none.jinja cannot be read"),
        ("model.path=DIR/adapter", "has no config.json: it is an adapter. .*adapter="),
        ("data.source=DIR/mixed.jsonl", "text: {}/mixed.jsonl, line 10"),
        ("data.source=DIR/number.jsonl", "line 10: the field `completion` is a number"),
        ("data.validation_source=DIR/unmapped.jsonl", "data.validation_source: .*unmapped.jsonl, line 1"),
        ("device=mps", "device=mps needs a mps device"),
        ("model.dtype=int8", "expected bfloat16 | float32 | float16, found 'int8'"),
        ("model.path=DIR", "has no config.json"),
        ("output_dir=DIR/good.jsonl", "output_dir=.*good.jsonl is a file"),
        ("output_dir=DIR/good.jsonl/run", "cannot be written"),
        ("output_dir=/proc/run", "cannot be written"),  # even by root
        ("freeze=[model.layrs.*]", "model.layrs.*"),
    ],
)  # fmt: skip
def test_what_would_stop_a_run_at_once_is_told(leanft, arguments, tmp_path, override, message):
    refusal = leanft.refused("validate", *arguments(override))
    assert re.search(message.replace("{}", str(tmp_path)), refusal), refusal


STRANGERS = {
    "finetune": "data: {source: rows.jsonl, format: evil.py:convert}",
    "dpo": "data: {source: [{path: rows.jsonl, format: evil.py:convert}]}\nloss: {name: evil.py:of_pairs}",
    "grpo": "data: {source: rows.jsonl}\nrewards: [evil.py:reward]\nloss: {name: evil.py:of_tokens}\n"
    "generation: {num_answers: 2}",
    "online_dpo": "data: {source: rows.jsonl}\nrewards: [{function: evil.py:reward}]\nloss: {name: evil.py:of_pairs}\n"
    "generation: {num_answers: 2}",
}


FIRST = [("validate", "grpo"), ("validate", "evil.py"), ("validate", "online_dpo"), ("plan", "finetune")]
VERBS = [(verb, recipe) for verb in ("validate", "plan") for recipe in (*STRANGERS, "evil.py")]


@pytest.mark.first
@pytest.mark.parametrize(("verb", "recipe"), dict.fromkeys([*FIRST, *VERBS]))
def test_no_code_that_a_preset_names_runs_before_a_run(leanft, tmp_path, monkeypatch, verb, recipe):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(
        "open('ran', 'w')\nfrom recipes.finetune import Config, main\n\ndef convert(row): return row\n\ndef "
        "reward(**_): return [1.0]\n\ndef of_pairs(pairs, beta): return -pairs.margin\n\ndef of_tokens(answers): "
        "return -answers.log_ratio\n"
    )
    row = {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = STRANGERS.get(recipe, "data: {source: rows.jsonl}")
    (tmp_path / "preset.yaml").write_text(f"recipe: {recipe}\nmodel: {{path: tiny}}\noutput_dir: run\n{settings}\n")
    answer = leanft(verb, "--config", "preset.yaml", "device=cpu")
    assert not (tmp_path / "ran").exists()
    if recipe == "evil.py":
        assert answer.code == 2
        assert "names the recipe evil.py, whose code this command would run" in answer.err
        assert "evil.py:1" not in answer.err
        leanft(verb, "evil.py", "--config", "preset.yaml", "device=cpu")  # the user names it
        assert (tmp_path / "ran").exists()
        return
    assert answer.code == 0, answer.err
    for name in ("reward", "convert", "of_pairs", "of_tokens"):  # a function that is missing is found without running
        (tmp_path / "evil.py").write_text((tmp_path / "evil.py").read_text().replace(f"def {name}", f"def no_{name}"))
    if verb == "validate":
        assert "evil.py has no function" in leanft(verb, "--config", "preset.yaml", "device=cpu").err
    assert not (tmp_path / "ran").exists()


def test_all_missing_files_are_named(leanft, arguments, tmp_path):
    missing = [
        "model.path=DIR/no-model",
        "data.source=[DIR/good.jsonl, DIR/b.jsonl]",
        "data.validation_source=DIR/c.jsonl",
    ]
    refusal = leanft.refused("validate", *arguments(*missing))
    for name in ("no-model", "b.jsonl", "c.jsonl"):
        assert f"{tmp_path}/{name}" in refusal
    assert "good.jsonl" not in refusal


@pytest.mark.long
def test_a_reference_is_told_or_refused(leanft, tmp_path):
    given = ("validate", "dpo", "--config", "tiny/dpo", "device=cpu", f"output_dir={tmp_path / 'run'}")
    assert "# reference: cached, " in leanft(*given).out
    refusal = leanft.refused(*given, "reference.kind=adapter_off")
    assert "lora is null" in refusal


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        (
            "dpo",
            "data.shared_prompt=true",
            "data.shared_prompt=true, but the model's rotary frequencies (dynamic) change",
        ),
        ("reward", "eval_answers=3", "eval_answers=3 asks the model for answers, but this model gives scores"),
        ("dpo", "memory.tied_gradient=host", "memory.tied_gradient=host"),
        pytest.param(
            "dpo",
            "parallel.tensor=3 data.max_length=96 data.packing=bfd",
            "does not divide this model's 4 query heads",
            marks=needs_parts,
        ),
    ],
)
def test_what_the_run_would_find_of_the_model_is_refused(leanft, tmp_path, recipe, override, message):
    """The model's rotary frequencies change with the text length beyond 16 tokens."""
    given = ("validate", recipe, "--config", f"tiny/{recipe}", *with_dynamic_frequencies(tmp_path))
    assert message in leanft.refused(*given, *override.split())


def with_dynamic_frequencies(folder) -> list[str]:
    shutil.copytree(resolve_model_path("tiny"), folder / "model")
    file = folder / "model" / "config.json"
    config = json.loads(file.read_text())
    config |= {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    file.write_text(json.dumps(config))
    return [f"model.path={folder / 'model'}", f"output_dir={folder / 'run'}", "device=cpu"]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["dpo", "reward"])
def test_a_run_of_several_ranks_is_valid(leanft, tmp_path, recipe):
    given = ("validate", recipe, "--config", f"tiny/{recipe}", *with_dynamic_frequencies(tmp_path))
    leanft.ok(*given)
    leanft.ok(*given, "parallel.context=2")  # rehearsed with 2 ranks


def test_first_rows_are_told_and_the_hub_is_not_asked(leanft, arguments):
    answer = leanft.ok("validate", *arguments("model.path=org/none", "data.validation_source=org/rows"))
    for line in (
        "# org/none is not on this machine",
        "the first 16 rows are prompt_completion",
        "# data.validation_source: org/rows is a dataset of the Hub",
    ):
        assert line in answer.out
    assert "# data.source: of the first rows, 16 rows (prompt_completion" in leanft.ok("validate", *arguments()).out


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["data.source=DIR/good.jsonl"], ("null", 0)),
        (["data.source=DIR/good.jsonl", "data.validation_source=DIR/good.jsonl"], ("DIR/good.jsonl", 200)),
        (["data.source=DIR/good.jsonl", "data.validation_fraction=0.5"], ("null", 200)),
        (["data.source=DIR/good.jsonl", "eval_answers=3"], ("null", 3)),
        (["data.max_length=9"], ("tiny/validation.jsonl", 200)),
    ],
)
def test_another_source_takes_the_presets_held_out_rows_back(leanft, arguments, tmp_path, overrides, kept):
    own = [*arguments()[:2], f"output_dir={tmp_path}/run", *(one.replace("DIR", str(tmp_path)) for one in overrides)]
    answer = leanft.ok("validate", "--all", *own)
    settings = yaml.safe_load(answer.out)
    expected = None if kept[0] == "null" else kept[0].replace("DIR", str(tmp_path))
    assert (settings["data"]["validation_source"], settings["eval_answers"]) == (expected, kept[1])
    assert ("of the preset, because data.source is set" in answer.err) == (kept[0] == "null")
    assert ("eval_answers=200" in answer.err) == (kept[1] == 0)


def test_data_of_which_no_row_is_left_is_refused(leanft, tmp_path):
    row = {"messages": [{"role": "user", "content": "a " * 99}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    given = [
        f"data.source={tmp_path}/rows.jsonl",
        "model.path=tiny",
        "data.overflow=drop",
        f"output_dir={tmp_path}/run",
    ]
    leanft.ok("validate", "finetune", *given)
    refusal = leanft.refused("validate", "finetune", *given, "data.max_length=32")
    assert "is left to train on: 3 rows, 3 dropped (longer than max_length). Raise data.max_length (now 32)" in refusal
