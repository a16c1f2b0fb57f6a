"""Settings as text: reading, errors and writing.

Independent references: configs constructed with pydantic, and PyYAML for dumped YAML.
"""

import json
import re
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, PositiveInt, model_validator

from lean_ft.settings import (
    DataSource,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    Reward,
    ScheduleConfig,
    Settings,
    SFTDataConfig,
    ToolsConfig,
)
from lean_ft.settings.describing import commented_yaml, config_schema, describe, one_line_each
from lean_ft.settings.text import (
    dump,
    load_config,
    preset_fits,
    preset_values,
)
from lean_ft.system.catalog import recipes
from tests.settings.cases import load_recipe, settings_of


class Config(RecipeConfig):
    model: ModelConfig
    data: SFTDataConfig
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-4, weight_decay=0.5)
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()


class Extra(Settings):
    """An optional group."""

    rank: PositiveInt = Field(8, description="Rank.")
    names: list[str] = Field(default_factory=list, description="Names.")


class Odd(Settings):
    """Types of settings that no shipped recipe has."""

    extra: Extra | None = None
    count_or_name: int | str = Field(1, description="A number, or a name.")
    limit: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="A share.")
    weights: dict[str, float] = Field({"a": 1.0}, description="Weights.")
    pair: tuple[int, str] = Field((1, "x"), description="A number and a name.")
    note: str | None = Field(None, description="Any text.")

    @model_validator(mode="after")
    def _limit_needs_extra(self) -> "Odd":
        if self.limit is not None and self.extra is None:
            raise ValueError("limit has a meaning only with extra.rank; set it, or leave limit out.")
        return self


REQUIRED = ["model.path=m", "data.source=d.jsonl", "output_dir=out"]


def load(*overrides: str, preset: Path | None = None) -> Config:
    return load_config(Config, preset, [*REQUIRED, *overrides])


def refusal(*overrides: str, preset: Path | None = None, config_class: type = Config) -> str:
    required = REQUIRED if config_class is Config else []
    with pytest.raises(ValueError) as refused:
        load_config(config_class, preset, [*required, *overrides])
    return str(refused.value)


@pytest.fixture
def write(tmp_path: Path):
    def write_preset(text: str, name: str = "preset.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_preset


# Reading ---------------------------------------------------------------------


def test_defaults_are_those_of_the_settings():
    expected = Config(model=ModelConfig(path="m"), data=SFTDataConfig(source="d.jsonl"), output_dir=Path("out"))
    assert load() == expected


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optimizer.lr=1e-5", lambda c: c.optimizer.lr, 1e-5),
        ("optimizer.lr=1", lambda c: c.optimizer.lr, 1.0),
        ("optimizer.name=sgd", lambda c: c.optimizer.weight_decay, 0.5),  # the recipe's default, not the group's
        ("optimizer.betas=[0.8, 0.9]", lambda c: c.optimizer.betas, (0.8, 0.9)),
        ("batch_size=1_000", lambda c: c.batch_size, 1000),
        ("clip_grad_norm=null", lambda c: c.clip_grad_norm, None),
        ("clip_grad_norm=1", lambda c: c.clip_grad_norm, 1.0),
        ("compile=true", lambda c: c.compile, True),
        *((f"model.path={x}", lambda c: c.model.path, x) for x in ("1e5", "007", "no", "true", "2024-01-01", "[x]")),
        ("model.path='null'", lambda c: c.model.path, "null"),
        ("model.path=a=b #c: [d", lambda c: c.model.path, "a=b #c: [d"),
        ("output_dir=1.5", lambda c: c.output_dir, Path("1.5")),
        ("data.source=[a.jsonl, 007, no]", lambda c: c.data.source, ["a.jsonl", "007", "no"]),
        ("data.source=a.jsonl,b.jsonl", lambda c: c.data.source, "a.jsonl,b.jsonl"),
        ("data.validation_source=null", lambda c: c.data.validation_source, None),
        ("freeze=mlp", lambda c: c.freeze, ["mlp"]),
        ("freeze=*norm", lambda c: c.freeze, ["*norm"]),
        ("freeze=model.layers.[0-3].*", lambda c: c.freeze, ["model.layers.[0-3].*"]),
        ("freeze='a, b'", lambda c: c.freeze, ["a, b"]),
        ("freeze=007", lambda c: c.freeze, ["007"]),
        ("freeze=mlp,007,no", lambda c: c.freeze, ["mlp", "007", "no"]),
        ("freeze=model.layers.[0,1].*,*norm,&a:", lambda c: c.freeze, ["model.layers.[0,1].*", "*norm", "&a:"]),
        ("freeze='a, b',it's,\"c,d\"", lambda c: c.freeze, ["a, b", "it's", "c,d"]),
        ("log.to=csv,jsonl", lambda c: c.log.to, ["csv", "jsonl"]),
        ("optimizer.betas=0.8,0.9", lambda c: c.optimizer.betas, (0.8, 0.9)),
        ("log.to=csv", lambda c: c.log.to, ["csv"]),
        ("model.dtype=bf16", lambda c: c.model.dtype, "bfloat16"),
        ("model.dtype=torch.float32", lambda c: c.model.dtype, "float32"),
        ("device=gpu", lambda c: c.device, "cuda"),
        ("data.columns.prompt=question", lambda c: c.data.columns, {"prompt": "question"}),
        ("data.columns.prompt=3", lambda c: c.data.columns, {"prompt": "3"}),
        ("data.columns={prompt: 3, completion: no}", lambda c: c.data.columns, {"prompt": "3", "completion": "no"}),
        ("data.source=[a[0].jsonl, *.jsonl]", lambda c: c.data.source, ["a[0].jsonl", "*.jsonl"]),
        (
            "data.source=[a.[0,1].*,b.[0-3].[a-c], 'c, d[0]']",
            lambda c: c.data.source,
            ["a.[0,1].*", "b.[0-3].[a-c]", "c, d[0]"],
        ),
        ('data.source=[it\'s, a[0] , "b, *c"]', lambda c: c.data.source, ["it's", "a[0]", "b, *c"]),
        ("data.source=[{path: 007, weight: 2}]", lambda c: c.data.source, [DataSource(path="007", weight=2.0)]),
        ("optimizer={name: muon, betas: [0.5, 0.6], lr: 1}", lambda c: c.optimizer.betas, (0.5, 0.6)),
        ("optimizer={name: sgd, lr: 1}", lambda c: (c.optimizer.name, c.optimizer.lr), ("sgd", 1.0)),
    ],
)
def test_overrides(override, read, value):
    result = read(load(override))
    assert result == value
    assert type(result) is type(value)


def test_overrides_win_over_the_preset_and_the_last_of_two_wins(write):
    preset = write("batch_size: 4\noptimizer:\n  lr: 1e-3\n  name: sgd\nmodel: {path: 007}\n")
    config = load_config(Config, preset, ["data.source=d", "output_dir=o", "optimizer.lr=1", "optimizer.lr=2"])
    assert (config.batch_size, config.optimizer.name, config.optimizer.lr, config.model.path) == (4, "sgd", 2.0, "007")


def test_a_preset_may_write_a_key_with_dots(write):
    assert (
        load(preset=write("optimizer.name: sgd\noptimizer: {lr: 1}")).optimizer
        == load("optimizer.name=sgd", "optimizer.lr=1").optimizer
    )
    assert "'optimizer.lr' is set twice (first in line 1)" in refusal(
        preset=write("optimizer: {lr: 1}\noptimizer.lr: 2")
    )


def test_a_mapping_is_extended_by_its_entries_and_replaced_as_a_whole(write):
    preset = write("data: {columns: {prompt: question, completion: answer}}")
    assert load("data.columns.prompt=q", preset=preset).data.columns == {"prompt": "q", "completion": "answer"}
    assert load("data.columns={prompt: q}", preset=preset).data.columns == {"prompt": "q"}
    assert load_config(Odd, None, ["weights.b=2"]).weights == {"a": 1.0, "b": 2.0}


def test_an_empty_preset_changes_nothing_and_a_single_value_is_a_list_of_one(write):
    assert load(preset=write("")) == load(preset=write("# nothing\n")) == load(preset=write("optimizer:\n")) == load()
    assert load(preset=write("freeze: mlp\nlog: {to: csv}\n")) == load("freeze=[mlp]", "log.to=[csv]")


class Judged(Settings):
    """A list of mappings or text, as of rewards."""

    rewards: list[Reward | str] = Field(default_factory=list, description="Rewards.")


@pytest.mark.parametrize(
    ("overrides", "rewards"),
    [
        (["rewards=a,length"], ["a", "length"]),
        (["rewards={function: length, weight: 2}"], [Reward(function="length", weight=2.0)]),
        (["rewards={function: format, pattern: 'a{1,2}'},a"], [Reward(function="format", pattern="a{1,2}"), "a"]),
        (["rewards.function=length", "rewards.weight=2"], [Reward(function="length", weight=2.0)]),
        (["rewards=[{function: length}]", "rewards.weight=2"], [Reward(function="length", weight=2.0)]),
    ],
)
def test_one_mapping_is_a_list_and_its_parts_are_settings(write, overrides, rewards):
    assert load_config(Judged, None, overrides).rewards == rewards
    assert load_config(Judged, write("rewards: {function: length}"), []).rewards == [Reward(function="length")]


class Called(RecipeConfig):
    tools: ToolsConfig = ToolsConfig.model_validate({})


def test_a_list_of_tools_stands_for_their_group(write, tmp_path):
    (tmp_path / "my_tools.py").write_text("def search(): ...")
    name = f"{tmp_path}/my_tools.py:search"
    expected = ToolsConfig.model_validate({"functions": [name], "seconds": 2.0})
    assert load_config(Called, write(f"tools: [{name}]"), ["tools.seconds=2"]).tools == expected
    both = ToolsConfig.model_validate({"functions": [name, "calculator"], "seconds": 2.0})
    assert load_config(Called, None, [f"tools={name},calculator", "tools.seconds=2"]).tools == both
    for text in (name, f"[{name}]", f"{{functions: [{name}]}}"):
        assert load_config(Called, None, [f"tools={text}", "tools.seconds=2"]).tools == expected
    assert ToolsConfig.model_validate([name]).functions == [name]
    for text, message in (
        ("3", "expected list of calculator or FILE.py:FUNCTION"),
        (name.replace("sea", "se"), "Did you mean 'search'"),
    ):
        with pytest.raises(ValueError, match=rf"^tools.functions \(command line\): .*{message}"):
            load_config(Called, None, [f"tools={text}"])


def test_a_group_that_may_be_absent():
    assert load_config(Odd, None, []).extra is None
    assert load_config(Odd, None, ["extra.rank=2"]).extra == Extra(rank=2)
    assert load_config(Odd, None, ["extra={}"]).extra == Extra()
    assert load_config(Odd, None, ["extra.rank=2", "extra=null"]).extra is None
    assert load_config(Odd, None, ["extra.rank=2", "extra=null", "extra.rank=3"]).extra == Extra(rank=3)
    assert load_config(Odd, None, ["extra.rank=2", "extra={names: [a]}"]).extra == Extra(rank=2, names=["a"])


def test_a_setting_that_takes_text_and_numbers_takes_each_as_written():
    assert load_config(Odd, None, ["count_or_name=3"]).count_or_name == 3
    assert load_config(Odd, None, ["count_or_name='3'"]).count_or_name == "3"
    assert load_config(Odd, None, ["pair=[3, 4]"]).pair == (3, "4")
    assert load_config(Odd, None, ["note=null"]).note is None
    assert load_config(Odd, None, ["note='null'"]).note == "null"


# Errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizr.lr=1", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("batchsize=1", "batch_size"),
        ("max_seq_len=1", "data.max_length"),
        ("optimizer.lr.x=1", "optimizer.lr"),
        ("data.columns.a.b", "data.columns"),
    ],
)
def test_an_unknown_key_names_a_valid_one(override, nearest):
    message = refusal(override)
    assert override.partition("=")[0] in message
    assert f"Did you mean '{nearest}'?" in message


@pytest.mark.parametrize(
    ("override", "expected", "came"),
    [
        ("batch_size=two", "whole number > 0", "'two'"),
        ("batch_size=0", "whole number > 0", "0"),
        ("batch_size='2'", "whole number > 0", "'2'"),
        ("batch_size=true", "whole number > 0", "true"),
        ("batch_size=null", "whole number > 0", "null"),
        ("compile=yes", "true or false", "'yes'"),
        ("compile=1", "true or false", "1"),
        ("optimizer.lr=fast", "number >= 0 or null", "'fast'"),
        ("optimizer.lr=-1", "number >= 0 or null", "-1"),
        ("optimizer.lr=.nan", "number >= 0 or null", "NaN"),
        ("optimizer.lr=1e999", "number >= 0 or null", "Infinity"),
        ("optimizer.betas=[0.9]", "list of 2, each number >= 0 and < 1", "[0.9]"),
        ("optimizer.betas=[0.9, 1]", "list of 2, each number >= 0 and < 1", "[0.9, 1]"),
        ("clip_grad_norm=0", "number > 0 or null", "0"),
        ("model.path=null", "text", "null"),
        (
            "data.source={a: b}",
            "text or list of text or {path, format, columns, weight, share, subset, split, name}",
            '{"a": "b"}',
        ),
        ("data.columns=prompt", "mapping of text to text", "'prompt'"),
        ("freeze=null", "list of text", "null"),
        ("log.to=wandbb", "list of jsonl | csv | tensorboard | wandb | mlflow | trackio | swanlab", '["wandbb"]'),
        (
            "schedule.name=cosin",
            "constant | linear | cosine | wsd or FILE.py:FUNCTION",
            "'cosin'. Did you mean 'cosine'?",
        ),
    ],
)
def test_a_wrong_value_says_what_was_expected_what_came_and_what_it_means(override, expected, came):
    key = override.partition("=")[0]
    description = next(setting.description for setting in describe(Config) if setting.key == key)
    message = refusal(override)
    assert message.startswith(f"{key} (command line): expected {expected}, found {came}")
    assert message.endswith(description)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{path: b, weight: -1}", "Entry 2: weight is -1. Input should be greater than 0."),
        ("{path: b, wieght: 2}", "Entry 2: unknown field wieght."),
        ("{paht: b}", "Entry 2: unknown field paht. Entry 2: missing field path."),
    ],
)
def test_a_wrong_entry_of_a_list_is_named_with_its_field(entry: str, problem: str):
    assert f"]. {problem}\n" in refusal(f"data.source=[a, {entry}]")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((text, "expected key=value") for text in ("batch_size", "=3", "--batch_size", "a..b=1", "")),
        (
            "freeze=mlp, norm",
            "freeze=mlp, norm (command line): a comma without an item on each side, or with a space after it",
        ),
        ("freeze=,", "one text with a comma as 'freeze=\",\"'."),
        ("freeze=[mlp,", "A shell divides words at spaces. Quote the setting, such as 'freeze=[mlp, ...]'."),
        ("optimizer.betas=[0.9", "optimizer.betas=[0.9 (command line): not valid YAML"),
        ("optimizer=adamw", "optimizer (command line): expected its settings one by one, such as optimizer.name,"),
        ("zzzzz=1", "zzzzz (command line): no such setting. `leanft cat RECIPE` lists them."),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_name(override, message):
    assert message in refusal(override)


def test_missing_settings_are_listed_together_with_how_to_give_them():
    with pytest.raises(ValueError) as refused:
        load_config(Config, None, [])
    message = str(refused.value)
    for key in ("model.path", "data.source"):
        description = next(s.description for s in describe(Config) if s.key == key)
        assert key in message
        assert description in message
    assert "model.path=... data.source=..." in message


def test_all_problems_come_in_one_message_with_where_they_come_from(write):
    preset = write("batch_size: 0\nmodel:\n  path: m\n  dtyp: float32\nseed: -1\n")
    with pytest.raises(ValueError) as refused:
        load_config(Config, preset, ["optimizer.lr=x", "lr=1", "nonsense", "seed=3"])
    message = str(refused.value)
    assert message.startswith("6 problems in the settings:")
    assert f"batch_size ({preset}, line 1)" in message
    assert f"model.dtyp ({preset}, line 4): no such setting. Did you mean 'model.dtype'?" in message
    assert "optimizer.lr (command line): expected number >= 0" in message
    assert "lr (command line): no such setting" in message
    assert "'nonsense': expected key=value" in message
    assert "data.source" in message
    assert "seed" not in message  # the override corrected it


def test_a_recipes_own_validator_speaks_for_itself():
    assert (
        refusal("limit=0.5", config_class=Odd)
        == "limit has a meaning only with extra.rank; set it, or leave limit out."
    )
    assert load_config(Odd, None, ["limit=0.5", "extra.rank=1"]).limit == 0.5


def test_a_long_value_is_cut_in_the_message():
    assert len(refusal(f"batch_size={'x' * 10_000}")) < 300


@pytest.mark.parametrize(
    ("text", "reason"),
    [("- a\n- b\n", "expected settings as `key: value`, found a list"), ("hello\n", "found 'hello'")],
)
def test_a_preset_that_is_no_mapping_is_refused(write, text, reason):
    preset = write(text)
    message = refusal(preset=preset)
    assert message.startswith(str(preset))
    assert reason in message


def test_a_preset_that_is_not_there_raises_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_config(Config, tmp_path / "none.yaml", [])
    with pytest.raises(IsADirectoryError):
        load_config(Config, tmp_path, [])


# Writing ---------------------------------------------------------------------

# No surrogates and control characters, which a UTF-8 YAML file cannot contain unescaped.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20) | st.sampled_from(
    [
        "",
        "- a",
        "a: b",
        *["no", "null", "~", "007", "1e5", "0x1", "1:30", "true", "#", "'", '"', "[", "{", "*a", "&a", "!t"],
    ]
)


@pytest.mark.parametrize("number", [8, pytest.param(100, marks=pytest.mark.long)])
def test_what_is_dumped_is_read_back(tmp_path_factory, number: int):
    @settings(max_examples=number, deadline=None)
    @given(
        path=TEXT,
        source=TEXT | st.lists(TEXT, max_size=3),
        columns=st.dictionaries(TEXT, TEXT, max_size=3),
        lr=st.floats(0, 1e300),
        clip=st.none() | st.floats(1e-300, 1e300),
        seed=st.integers(0, 2**63),
    )
    def check(path, source, columns, lr, clip, seed):
        config = Config(
            model=ModelConfig(path=path),
            data=SFTDataConfig(source=source, columns=columns),
            optimizer=OptimizerConfig(lr=lr),
            clip_grad_norm=clip,
            seed=seed,
            output_dir=Path("out"),
        )
        file = tmp_path_factory.getbasetemp() / "dumped.yaml"
        file.write_text(dump(config), encoding="utf-8")
        assert load_config(Config, file, []) == config
        # Other YAML parsers read the same values.
        assert yaml.safe_load(dump(config)) == config.model_dump(mode="json")

    check()


def test_describe_lists_every_setting_with_its_default_and_meaning():
    rows = {setting.key: setting for setting in describe(Config)}
    reference = load().model_dump(mode="json")
    assert rows["output_dir"].default == "runs/<model>_<recipe>"
    for key, setting in rows.items():
        value = reference
        for name in key.split("."):
            value = value[name]
        assert setting.description, key
        if not setting.required and key != "output_dir":
            assert setting.default == value, key
    assert {key for key, setting in rows.items() if setting.required} == {"model.path", "data.source"}
    assert rows["optimizer.lr"].type == "number >= 0 or null"
    assert rows["clip_grad_norm"].type == "number > 0 or null"
    assert {s.key: s.type for s in describe(Odd)} == {
        "extra.rank": "whole number > 0",
        "extra.names": "list of text",
        "count_or_name": "whole number or text",
        "limit": "number > 0 and <= 1 or null",
        "weights": "mapping of text to number",
        "pair": "list of: whole number, text",
        "note": "text or null",
    }


def test_the_commented_yaml_is_a_preset_of_the_defaults(write):
    text = commented_yaml(Config, width=60)
    preset = write(text)
    assert load(preset=preset) == load()
    assert "lr: 0.0003  # number >= 0" in text
    assert "path:  # required: text" in text
    for setting in describe(Config):
        # Comments are wrapped, so compare words.
        words = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
        assert " ".join(setting.description.split()) in words
    assert max(len(line) for line in text.splitlines() if line.lstrip().startswith("#")) <= 60


@pytest.mark.parametrize("name", recipes())
def test_required_settings_come_first_then_common_ones_then_the_others(name):
    config_class, settings = load_recipe(name).Config, settings_of(name)
    helped = re.findall(r"^  ([\w.]+)=", one_line_each(config_class), re.MULTILINE)
    assert sorted(helped) == sorted(settings)
    kinds = [0 if settings[key].required else 1 if settings[key].is_common else 2 for key in helped]
    assert kinds == sorted(kinds) and kinds.count(1) <= 11
    groups = list(dict.fromkeys(key.rpartition(".")[0] for key, kind in zip(helped, kinds, strict=True) if kind == 2))
    assert groups[-1] == "" or "" not in groups  # settings without a group are last
    top = [line.partition(":")[0] for line in commented_yaml(config_class).splitlines() if re.match(r"\w+:", line)]
    needed = {key.partition(".")[0] for key in settings if settings[key].required} & {*top}  # others are commented out
    assert set(top[: len(needed)]) == needed


def test_the_schema_knows_every_key_and_requires_none():
    schema = config_schema(Config)
    json.dumps(schema)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert "required" not in json.dumps(schema)
    assert schema["additionalProperties"] is False


def test_preset_values_are_what_the_file_sets(write):
    preset = write(
        "model: {path: 007}\noptimizer:\n  lr: 1e-5\n  betas: [0.9, 0.95]\n"
        "data:\n  columns: {}\n  source:\n  - {path: no, weight: 2}\n  - 1e5[0]\n  - '*'\n"
    )
    values = preset_values(preset)
    assert list(values) == ["model.path", "optimizer.lr", "optimizer.betas", "data.columns", "data.source"]
    assert values["optimizer.betas"] == "[0.9, 0.95]"
    # The values work as overrides.
    overrides = [f"{key}={value}" for key, value in values.items()]
    rest = ["output_dir=o"]
    assert load_config(Config, None, [*overrides, *rest]) == load_config(Config, preset, rest)


def test_preset_fits_tells_another_recipes_preset(write):
    assert preset_fits(Config, write("optimizer: {lr: 1}"))  # required settings may be missing
    assert not preset_fits(Odd, write("optimizer: {lr: 1}"))
    assert not preset_fits(Config, write("optimizer: {lr: fast}"))
    assert not preset_fits(Config, write("- a list"))


@pytest.mark.parametrize("name", recipes())
def test_the_help_of_a_setting_is_whole_sentences(name):
    for setting in settings_of(name).values():
        assert setting.description.endswith("."), setting.key
        assert re.match("[A-Z`0-9]", setting.description) or setting.key in setting.description, setting.key
