"""Names of sources, and the one that a run watches."""

import re

import pytest

from lean_ft.settings import DataSource
from lean_ft.settings.source_names import held_out_names, source_names
from lean_ft.settings.text import load_config
from tests.settings.cases import load_recipe

COMMON = ("model.path=tiny", "data.source=tiny/train.jsonl", "output_dir=run", "eval_every=1", "stop_after_evals=1")
TWO = "data.validation_source=[tiny/validation.jsonl,{path: tiny/train.jsonl, name: seen}]"


def named(path: str, name: str) -> DataSource:
    return DataSource(path=path, name=name)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ("data/maths.jsonl.gz", ["maths"]),
        (["data/maths.jsonl", "chats/*.jsonl", "org/name"], ["maths", "chats", "name"]),
        (["train/a.jsonl", "valid/a.jsonl", "b.csv"], ["train-a", "valid-a", "b"]),
        (["a/x.jsonl", "b/x.jsonl", "b-x.jsonl"], ["a-x", "b-x", "b-x-2"]),
        (
            [DataSource(path="org/n", split="test"), DataSource(path="org/n", split="train[:5%]", subset="de")],
            ["n-test", "n-de-train-5"],
        ),
        (["a.jsonl", "a.jsonl"], ["a", "a-2"]),
        ([named("a.jsonl", "x"), named("b.jsonl", "x"), "x.csv"], ["x", "x", "x-2"]),  # only given names join
        (["rows/" + "0" * 32 + ".jsonl"] * 2, ["rows", "rows-2"]),  # passed from Python
        (["*", "日本.txt", "x" * 99], ["source", "日本", "x" * 40]),
    ],
)
def test_a_source_is_named_by_the_end_of_its_path(sources, names) -> None:
    assert source_names(sources) == names
    for name in names:  # what MLflow accepts, without the slash that separates a metric and its source
        assert re.fullmatch(r"[\w.\- :]{1,40}", name)
        assert named("a", name).name == name


@pytest.mark.parametrize("name", ["a/b", "", " a", "a ", "-", "a\n", "a" * 41, "$x$"])
def test_a_name_suits_all_loggers(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name of at most 40 letters"):
        named("a.jsonl", name)


def test_settings_without_names_are_recorded_as_before() -> None:
    assert "name" not in DataSource(path="a.jsonl").model_dump(mode="json")
    assert named("a.jsonl", "x").model_dump(exclude_defaults=True) == {"path": "a.jsonl", "name": "x"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((TWO, "watched_source=sen"), "no such source of held-out rows. Did you mean 'seen'?"),
        (("watched_source=chats",), "nothing is held out"),
        (("data.validation_fraction=0.1", "watched_source=train"), "there is only one, train"),
    ],
)
def test_a_run_watches_one_of_several_held_out_sources(settings: tuple[str, ...], message: str) -> None:
    config_class = load_recipe("finetune").Config
    cfg = load_config(config_class, None, [*COMMON, TWO, "watched_source=seen"])
    assert held_out_names(cfg.data) == ["validation", "seen"]
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(config_class, None, [*COMMON, *settings])
