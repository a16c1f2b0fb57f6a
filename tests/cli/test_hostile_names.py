"""Names that others chose (paths, presets, rows, template texts) stay text in every file and line that lean_ft writes
for a program."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from lean_ft.export.model_card import model_card
from lean_ft.settings.text import load_config
from lean_ft.system import catalog
from lean_ft.training.curves import draw_curves

CONTROL = ["a\nb", "a\rb", "a\tb", "a\x1b[2Jb", "a\x00b", "a\x85b", "a\u2028b", "a\u202eb"]
ONLINE = ("grpo", ["model.path=tiny", "data.source=x", "rewards=[length]"])
TUNED = ("finetune", ["model.path=tiny", "data.source=x"])
PLACES = [
    *[(*TUNED, key) for key in ("output_dir", "resume", "model.path", "data.source", "data.validation_source")],
    *[(*TUNED, key) for key in ("data.chat_template", "data.cache_dir", "log.name", "log.project", "eval_tasks")],
    *[(*TUNED, key) for key in ("data.subset", "data.split", "data.format")],
    *[(*ONLINE, key) for key in ("rewards", "environment", "tools.functions", "generation.engine_url")],
    ("ppo", ONLINE[1], "value.path"),
    ("distill", TUNED[1], "distill.teacher"),
    ("distill", TUNED[1], "distill.cached"),
    *[("generate", ["prompt=x"], key) for key in ("model.path", "adapter", "image", "output", "prompts_file")],
    ("evaluate", ["model.path=tiny"], "tasks"),
    ("quantize", ["model.path=tiny", "kind=int8", "output=x"], "output"),
]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CONTROL, ids=ascii)
def test_no_path_or_name_has_control_characters(name: str) -> None:
    for recipe, settings, key in PLACES:
        config = catalog.load_recipe(catalog.find_recipe(recipe)).Config
        end = ".py:f" if key in ("data.format", "environment", "tools.functions") else ""
        with pytest.raises(ValueError, match="control characters, found") as raised:
            load_config(config, None, [*settings, f"{key}={json.dumps(name + end)}"])
        assert name not in str(raised.value)


@pytest.mark.parametrize("name", ["a b", "a$(touch pwned)", "it's"])
def test_printed_commands_are_quoted(leanft, tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.yaml").write_text("base_model: tiny\n")
    converts = leanft.refused("run", f"{name}.yaml")
    assert shlex.split(re.search("(leanft convert-config .*?) -o", converts)[1])[2:] == [f"{name}.yaml"]
    Path(f"{name}.yaml").write_text("recipe: grpo\ntools: [calculator]\n")
    names = leanft.refused("run", "finetune", "--config", f"{name}.yaml", "model.path=tiny", "data.source=x")
    assert shlex.split(re.search("`(leanft run .*?)`\\.", names)[1])[2:] == ["grpo", "--config", f"{name}.yaml"]


def test_a_model_card_shows_foreign_text(tmp_path: Path) -> None:
    run = tmp_path / "step_*x*"
    (run / "step_00000001").mkdir(parents=True)
    system = "Be nice.\n```\n<script>alert(1)</script>\n# Not a heading\n````"
    start = {"recipe": "fine`tune", "device": "cpu\n---\nlicense: mit", "settings": {"model.path": "a`b``c"}}
    start["settings"] |= {"data.system": system, "data.source": "`x` | [y](z)\n# Not a heading"}
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    row = {"step": 1, "tokens": 3, "peak_memory_bytes": 1, "loss": 1.0, "eval_a|b<img src=x>\n# Not a heading": 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run / "step_00000001" / "config.json").write_text("{}")
    card = model_card(run / "step_00000001", run, "me/mine", has_picture=False, license="mit\nbase_model: evil")
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "mit\nbase_model: evil" and "base_model" not in yaml.safe_load(head)
    before, rest = body.split("`````yaml\n")
    inside, after = rest.split("\n`````\n", 1)
    assert yaml.safe_load(inside)["data.system"] == system
    for text in (before, after):
        assert "# Not" not in re.sub(r"`[^\n]*`|\\#", "", text) and not re.search(r"(?<!\\)<", text)
        assert "\n---" not in text
    assert "```a`b``c```" not in card and "``` a`b``c ```" in card and "`` fine`tune ``" in card


@pytest.mark.long
def test_dollar_signs_in_names_are_drawn(tmp_path: Path) -> None:
    run = tmp_path / r"a$\frac$b"
    run.mkdir()
    rows = [{"step": step, "loss": 1.0 / step, r"rewards/$\x$": 1.0 * step, r"$\y$": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curves([run], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


ESCAPES = "a\x1b[2J\x1b]0;title\x07\r\x9b31mb\n\tc"
SHOWN = "a\\x1b[2J\\x1b]0;title\\x07\\r\\x9b31mb\n\tc"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_an_answer(monkeypatch, capsys, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    expected = SHOWN if is_terminal else ESCAPES
    generate = catalog.load_recipe(catalog.find_recipe("generate"))
    monkeypatch.setattr(generate, "stream", lambda *_, **__: iter([ESCAPES[:9], ESCAPES[9:]]))
    given = ["model.path=tiny", "device=cpu", "prompt=x"]
    assert generate.main(load_config(generate.Config, None, given)) == [ESCAPES]
    assert capsys.readouterr().out == f"{expected}\n"
    chat = catalog.load_recipe(catalog.find_recipe("chat"))
    monkeypatch.setattr(chat, "converse", lambda *_, **__: iter([ESCAPES]))
    monkeypatch.setattr(chat, "_lines", lambda _: iter(["hello"]))
    chat.main(load_config(chat.Config, None, given[:2]))
    assert f"{expected}\n" in capsys.readouterr().out


def test_rows_and_names_of_fields_are_shown_without_control_characters(leanft, tmp_path) -> None:
    rows = [{"prompt": ESCAPES, "completion": ESCAPES, f"id{ESCAPES}": "1"}, {"prompt": ESCAPES, "completion": 5}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = ["finetune", "model.path=tiny", f"data.source={tmp_path}/rows.jsonl", "data.on_bad_row=skip"]
    for verb in ("preview", "stats"):
        answer = leanft.ok("data", verb, *run)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", answer.out + answer.err), verb
    answer = leanft(
        "data",
        "stats",
        *run[:3],
        "data.format=prompt_completion",
        "data.on_bad_row=raise",
        "data.columns.prompt=a\x1bb",
    )
    assert answer.code == 2 and "\x1b" not in answer.err
