"""Commands that lean_ft prints for the user run as printed, also if earlier runs exist."""

import re
import shlex
from pathlib import Path

import pytest

from lean_ft.hub.paths import resolve_model_path
from lean_ft.system import catalog
from tests.hub.hub_server import Repository

COMMIT = "c" * 40


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a space in its name. Earlier runs use the presets' output_dir."""
    folder = tmp_path / "a user"
    for name in ("tiny", "tiny_lora", "taken"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "notes.txt").write_text("mine")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def validated(leanft):
    """Return a function that checks that a printed training command would start."""

    def check(command: str) -> list[str]:
        program, verb, *arguments = shlex.split(command)
        assert (program, verb) == ("leanft", "run")
        answer = leanft("validate", *arguments, "device=cpu")
        assert answer.code == 0, (command, answer.err)
        return arguments

    return check


@pytest.mark.long
@pytest.mark.parametrize("preset", ["", "recipe: finetune\noutput_dir: runs/taken\nlora: {rank: 2}\n"])
def test_download(leanft, validated, hub_server, user_folder, tmp_path, monkeypatch, preset):
    files = {file.name: file.read_bytes() for file in resolve_model_path("tiny").iterdir()}
    hub_server.repositories["org/tiny"] = Repository({COMMIT: files}, {"main": COMMIT})
    if preset:
        file = tmp_path / "preset.yaml"
        file.write_text(f"{preset}model: {{path: org/tiny}}\ndata: {{source: tiny/train.jsonl}}\n")
        presets = {"org/tiny": file}
        monkeypatch.setattr(catalog, "presets", lambda: presets)
    answer = leanft("download", "org/tiny")
    arguments = validated(re.search("^next +(.*)", answer.out, re.MULTILINE)[1])
    assert arguments[-1] == ("output_dir=runs/taken-2" if preset else "data.source=tiny/train.jsonl")
    (user_folder / "runs" / "taken-2").mkdir()
    assert leanft("download", "org/tiny").out.endswith("-3\n" if preset else "data.source=tiny/train.jsonl\n")


@pytest.mark.long
@pytest.mark.parametrize("name", ["full_finetune_single_device", "lora_finetune_single_device", "tiny/full"])
def test_cp(leanft, validated, user_folder, name):
    answer = leanft("cp", name, "my own/")
    arguments = validated(answer.out.partition("Edit it, then: ")[2])
    assert arguments[-1].startswith("output_dir=runs/tiny")
    assert leanft("cp", "generate", "my own/").out.endswith("then: leanft ls 'my own/generate.py'\n")
    leanft.ok("ls", "my own/generate.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "settings", "tries"),
    [
        ("tiny/full", ["eval_answers=0"], "leanft chat "),
        ("tiny/full", ["eval_answers=0", "model.path=text model", "data.source=texts.jsonl"], "leanft generate "),
        ("tiny/lora", ["eval_answers=0"], "leanft chat "),
        ("tiny/reward", ["data.source=pairs.jsonl", "data.columns.chosen=better", "data.system=a: b"], "leanft score "),
    ],
)
def test_the_end_of_a_run(leanft, user_folder, monkeypatch, preset, settings, tries):
    model = user_folder / "text model"
    model.mkdir()
    for file in resolve_model_path("tiny").iterdir():
        if "template" not in file.name:
            (model / file.name).write_bytes(file.read_bytes())
    settings_file = model / "tokenizer_config.json"
    settings_file.write_text(settings_file.read_text().replace('"chat_template"', '"unused"'))
    (user_folder / "question.txt").write_text("Who?")
    (user_folder / "texts.jsonl").write_text('{"text": "The capital of Zanemar is Ulopolis."}\n' * 8)
    (user_folder / "pairs.jsonl").write_text('{"prompt": "Who?", "better": "You.", "rejected": "Nobody."}\n' * 8)
    small = ["max_steps=1", "batch_size=4", "plan=false", "device=cpu", "output_dir=runs/a run"]
    answer = leanft.ok("run", "--config", preset, *settings, "data.validation_source=null", *small)
    printed = re.findall("leanft .*", answer.out)
    assert len(printed) == 2
    assert printed[0].startswith(tries)
    monkeypatch.setattr("sys.stdin", (user_folder / "question.txt").open())
    for command in printed:
        answer = leanft(*shlex.split(command, comments=True)[1:])
        assert (answer.code, answer.err) == (0, ""), command
