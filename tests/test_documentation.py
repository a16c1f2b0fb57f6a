"""Documents are correct: recipes accept every `key=value` in them, and every command works, run in order in one folder.

Printed output is compared with the output that a document shows: words, labels and columns, but not numbers.
"""

import ast
import dataclasses
import html
import importlib
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from PIL import Image

import lean_ft
from lean_ft.cli.main import app, run_command_line
from lean_ft.hub.paths import resolve_model_path
from lean_ft.plan.devices import CUDA_CONTEXT_BYTES
from lean_ft.settings.describing import describe
from lean_ft.settings.text import load_config
from lean_ft.system import catalog
from lean_ft.system.units import GIB
from lean_ft.torch_private import PRIVATE_NAMES

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
DOCUMENTS = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = ("data_by_example.md", "coming_from_torchtune.md", "many_devices.md")  # others train for a while
TRAINED = {"runs/first", "runs/qat", "runs/tiny", "runs/tiny_images"}  # created by an earlier command
NO_SETTING = {"shell=True", "merge=True"}  # Python, not a setting
PLACEHOLDERS = {"N": "4", "FOLDER": "folder", "$lr": "1e-4", "$seed": "1"}


def by_hand(document: Path) -> str:
    """The text without the tables that are made from lean_ft/assets/other_tools.yaml;
    tests/settings/test_other_tools.py tests the file and that the tables are current."""
    return re.sub(r"<!-- settings: .*?<!-- end of settings -->", "", document.read_text(), flags=re.DOTALL)


def settings_in(text: str) -> list[str]:
    """All settings in a text. `a=b|c` means a=b and a=c, and `a=N` a number. Blocks of Python, which
    tests/test_notebook.py runs, and of output are skipped, calls of Python and
    pictures."""
    text = re.sub(r"```(?:python|text).*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`(?:\w+\.)*\w+\([^`]*\)`|<(?:img|source) [^>]*>", "", text)
    found = re.findall(
        r"(?:^|(?<=[\s`(']))([a-z_]+(?:\.[a-z_]+)*)=(\"[^\"]*\"|(?!\.\.\.)[^\s`|=]+(?:\|[^\s`|]+)*)", text, re.MULTILINE
    )
    pairs = [(key, choice) for key, value in found for choice in value.strip("'\".,;").split("|")]
    return sorted({f"{key}={PLACEHOLDERS.get(value, value)}" for key, value in pairs} - NO_SETTING)


def refusal(config_class: type, setting: str) -> str:
    """The error for a setting, or "" if only other settings or a package are missing."""
    try:
        load_config(config_class, None, [setting])
    except ValueError as error:
        is_missing = "(command line)" not in str(error) or "is not installed here" in str(error)
        return "" if is_missing else str(error)
    return ""


@pytest.fixture(scope="module")
def config_classes() -> list[type]:
    return [catalog.load_recipe(file).Config for file in catalog.recipes().values()]


@pytest.fixture(scope="module")
def refusals(config_classes) -> Callable[[str], list[str]]:
    """A function that returns the recipes' errors for a setting; none if a recipe takes the setting."""

    keys = {config_class: {one.key for one in describe(config_class)} for config_class in config_classes}

    @cache
    def of(setting: str) -> list[str]:
        errors, key = [], setting.partition("=")[0]
        for config_class in sorted(config_classes, key=lambda config_class: key not in keys[config_class]):
            if not (error := refusal(config_class, setting)):
                return []
            errors.append(error)
        return errors

    return of


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_setting_in_a_document_is_taken_by_a_recipe(refusals, document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # with the user files that documents name
    (tmp_path / "my_rows.py").write_text("def convert(row): ...\n")
    (tmp_path / "my_tools.py").write_text("def get_weather(city): ...\n")
    (tmp_path / "my_family.py").write_text("from lean_ft.models.families import Family\n\nmy_model = NAME = Family()\n")
    (tmp_path / "my_loss.py").write_text("def fn(answers): ...\n")
    (tmp_path / "my_schedule.py").write_text("def fn(step, total_steps): ...\n")
    (tmp_path / "my_lion.py").write_text("class Lion: ...\n")
    (tmp_path / "my_lion_8bit.py").write_text("def lion_8bit(): ...\n")
    (tmp_path / "my_tools.py").write_text("def add(a, b): ...\n")
    (tmp_path / "my_env.py").write_text("class Guess: ...\n")
    for setting in settings_in(by_hand(document)):
        assert not refusals(setting)


def names_in_tables(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """The names in backticks of each row of the two-column tables: of the other framework, and of lean_ft."""
    for theirs, ours in re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE):
        yield re.findall(r"`([\w.]+)`", theirs), re.findall(r"`([\w.]+)(?:=[^`]*)?`", ours)


def test_names_of_lean_ft_in_comparisons_exist(config_classes):
    known = {setting.key for config_class in config_classes for setting in describe(config_class)}
    known |= {key.rpartition(".")[0] for key in known} | catalog.recipes().keys() | catalog.aliases().keys()
    rows = [row for page in (ROOT / "docs").glob("coming_from_*.md") for row in names_in_tables(by_hand(page))]
    assert len(rows) > 60
    for _, ours in rows:
        assert {*ours} <= known, ours


@pytest.mark.long
def test_names_of_trl_exist():
    import trl
    from trl.experimental.sdft import SDFTConfig

    configs = [SDFTConfig, *(getattr(trl, name) for name in dir(trl) if name.endswith("Config"))]
    known = {field.name for config in configs for field in dataclasses.fields(config)} | {"dataset_name"}
    known |= {field.name for field in dataclasses.fields(trl.ScriptArguments)} | set(dir(trl))
    for trainer in (trl.SFTTrainer, trl.GRPOTrainer):
        known |= inspect.signature(trainer.__init__).parameters.keys()
    for theirs, _ in names_in_tables((ROOT / "docs" / "coming_from_trl.md").read_text()):
        assert {name.rpartition(".")[2] for name in theirs} <= known, theirs


@pytest.mark.long
def test_defaults_are_those_of_both_sides():
    import trl

    def is_(default: Any, cell: str) -> bool:  # the cell starts with the default; an explanation may follow a comma
        cell, default = re.split(r"[,;] ", cell)[0], getattr(default, "value", default)
        numeric = isinstance(default, int | float) and not isinstance(default, bool)
        return float(cell) == default if numeric else yaml.safe_load(cell) == default

    table = re.findall(
        r"^\| `(?:(\w+)\.)?(\w+)` \| (.*?) \| (?:`(\w+)`: )?`([\w.]+)` \| (.*?) \|$",
        (ROOT / "docs" / "coming_from_trl.md").read_text(),
        re.MULTILINE,
    )
    assert len(table) > 20
    for owner, theirs, their_default, recipe, ours, our_default in table:
        config = (
            trl.ModelConfig if theirs == "dtype" or theirs.startswith("lora") else getattr(trl, owner or "SFTConfig")
        )
        field = {field.name: field for field in dataclasses.fields(config)}[theirs]
        assert is_(field.default, their_default), theirs
        settings = describe(catalog.load_recipe(catalog.find_recipe(recipe or "finetune")).Config)
        [default] = [setting.default for setting in settings if setting.key == ours]
        assert is_(default, our_default), ours


def test_settings_are_found_and_wrong_ones_refused(config_classes):
    text = '`a.b=[c,d.[0-3].*]`, `x=1|y` (e="f g"), `h=N`\nj=2\n`=k` m==n'
    assert settings_in(text) == ["a.b=[c,d.[0-3].*]", "e=f g", "h=4", "j=2", "x=1", "x=y"]
    assert len(settings_in((ROOT / "docs" / "lora.md").read_text())) > 10
    assert all(refusal(config_class, "lora.targts=[q_proj]") for config_class in config_classes)


# Commands -------------------------------------------------------------------------------------------------------------

# Replacements in commands, applied in order, with the reason. Folders with the names of models hold the embedded model.
SUBSTITUTES = [
    (r"\[(--.*?)\]", r"\1", "include options in brackets"),
    (
        r"^(leanft run (?!generate|quantize|evaluate)(?!.*max_steps=).*)",
        r"\1 max_steps=2 eval_answers=0 compile=false plan=false",
        "so it takes seconds",
    ),
    (r"^(leanft run \S*finetune\S* .*)", r"\1 batch_size=2", "so it takes seconds"),
    (r"^(leanft generate .*)", r"\1 max_new_tokens=3", "so it takes seconds"),
    (r"^(leanft data stats .* --peak)$", r"\1 data.batch_tokens=2100", "so it takes seconds; longer rows show a dash"),
    (r",another\]", r",runs/lora]", "a second adapter; one adapter may be used twice"),
    (r"^leanft env --check", "leanft env", "it takes minutes; tests/cli/test_env_verb.py tests it"),
    (r"^leanft download (\S+)", r"leanft validate generate model.path=\1 prompt=x", "tests download nothing"),
]
NOT_RUN = {
    "make ": "installs from the network; continuous integration runs these targets",
    "python benchmarks/": "takes minutes; tests/benchmarks",
    ".venv/bin/python -m pytest ": "runs the tests",
    "python scripts/": "changes the checkout; tests/models/test_new_family.py",
    "leanft run finetune model.path=my-model ": "a model that is not here; tests/cli/test_own_family.py",
    **dict.fromkeys(
        (
            "leanft run finetune model.path=glm ",
            "leanft run finetune model.path=runs/trunk ",
            "leanft evaluate runs/drafting ",
        ),
        "a model that is not here; benchmarks/drafting.py",
    ),
    "leanft run finetune model.path=merged ": "a model with drafting layers; tests/recipes/test_drafting.py",
    "vllm serve ": "another program; benchmarks/drafting.py",
    "leanft export runs/my-model_finetune ": "a model that is not here; tests/cli/test_own_family.py",
    "pip ": "installs from the network; tests/test_packaging.py builds and installs the wheel",
    "python3 -m venv ": "continuous integration makes an environment",
    "source ": "a command of the shell",
    "cd ": "a command of the shell",
    "docker ": "another program",
    "leanft plan ": "takes a minute; the long test below",
    "leanft check ": "takes a minute; tests/cli/test_check_verb.py and tests/test_check.py",
    "leanft chat ": "interactive; tests/recipes/test_chat.py tests it",
    "leanft push ": "uploads; tests/cli/test_push_verb.py tests it on loopback",
    "leanft serve ": "runs until Ctrl-C; tests/generation/test_server.py tests it",
    "curl ": "asks a server; tests/generation/test_server.py",
    "leanft evaluate runs/notes tasks=mteb:": "downloads data; tests/embedding/test_mteb.py",
    "llama-cli ": "a program of llama.cpp; tests/gguf/test_llama_cpp.py",
    "llama-imatrix ": "a program of llama.cpp",
    "llama-quantize ": "a program of llama.cpp",
    "ollama ": "another program; tests/export/test_ollama.py",
    "python show_episode.py": "needs a model that takes a minute to fine-tune",
    "leanft run --nproc-per-node ": "starts processes; tests/parallel tests it",
}


@dataclass(frozen=True)
class Command:
    """A command in a document, and the output that the document shows."""

    line: str
    output: list[str]


HEREDOC = re.compile(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", re.MULTILINE | re.DOTALL)  # writes a file


def commands_in(text: str) -> Iterator[Command]:
    """The commands of bash blocks and of blocks that start with `$`."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        block = re.sub(r" *\\\n +", " ", HEREDOC.sub("", block))
        if language == "bash":
            while loop := re.search(r"^ *for (\w+) in (.*); do\n((?:(?! *for ).*\n)*?) *done\n", block, re.MULTILINE):
                name, values, body = loop.groups()
                turns = "".join(body.replace(f"${name}", value) for value in values.split())
                block = block[: loop.start()] + turns + block[loop.end() :]
            lines = [re.sub(r"(?:^|\s+)# .*", "", line.strip()) for line in block.splitlines()]
            yield from (Command(line, []) for line in lines if line)
        elif block.startswith("$ "):
            line, *output = block.splitlines()
            yield Command(line.removeprefix("$ "), output)


def shape_of(line: str) -> str:
    """A line of output without its numbers: `3.1 MiB` equals `24 GiB`, and all bars are equal."""
    for pattern, stands_for in (
        (r"[\d,.]*\d", "N"),
        ("N min N s", "N s"),
        ("[KMG]iB", "iB"),
        ("█+", "█"),
        (r"\s+", " "),
    ):
        line = re.sub(pattern, stands_for, line)
    return line.strip()


def shown_lines(shown: list[str], printed: str) -> Iterator[tuple[str, str]]:
    """Pairs of a shown line and the printed line of the same shape, in order. `...` stands for the rest of a line, or
    for lines."""
    rest = iter(printed.splitlines())
    for line in shown:
        wanted, is_whole = shape_of(line.removesuffix("...")), not line.endswith("...")
        if wanted and not wanted.startswith("..."):
            alike = (
                found
                for found in rest
                if shape_of(found) == wanted or (not is_whole and shape_of(found).startswith(wanted))
            )
            found = next(alike, None)
            assert found is not None, f"the document shows {line!r}, which is not (or not here) in:\n{printed}"
            yield line, found


def typed(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command, check exit code 0, and return its output."""
    capsys.readouterr()
    line, _, file = line.partition(" > ")
    program, *arguments = shlex.split(line)
    assert program == "leanft", f"{line}: add it to NOT_RUN with the reason"
    with pytest.raises(SystemExit) as exited:
        run_command_line(arguments)
    printed = capsys.readouterr()
    assert exited.value.code == 0, f"{line}\n{printed.out}\n{printed.err}"
    if file:
        Path(file).write_text(printed.out)
    return printed.out


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_loop_on_a_front_page_is_that_of_the_recipe(name):
    """Equal statements; comments and line breaks may differ."""
    recipe = ast.parse((ROOT / "recipes" / "full_finetune_single_device.py").read_text())
    [loop] = [node for node in ast.walk(recipe) if isinstance(node, ast.For) and "run.steps" in ast.unparse(node.iter)]
    [shown] = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    assert ast.unparse(ast.parse(shown)) == ast.unparse(loop)


def memory_of_presets() -> dict[str, set[float]]:
    """By preset: GiB allocated, reserved and with driver, on the simulated card and on a real one."""
    found: dict[str, set[float]] = {}
    for benchmark in ("pretended_ladder_presets", "gpu_presets"):
        [file] = (ROOT / "benchmarks" / "results").glob(f"{benchmark}_*.json")
        for row in json.loads(file.read_text())["rows"]:
            amounts = (row["allocated_bytes"], row["reserved_bytes"], row["reserved_bytes"] + CUDA_CONTEXT_BYTES)
            found.setdefault(row["label"], set()).update(amount / GIB for amount in amounts)
    return found


def test_memory_of_a_preset_is_that_of_the_results():
    """In every line that names a preset without overrides; other figures of the line are in parentheses."""
    known, checked = memory_of_presets(), 0
    for document in DOCUMENTS:
        text = re.sub(r"<!-- table:.*?<!-- /table -->", "", document.read_text(), flags=re.DOTALL)
        for line in text.splitlines():
            names = known.keys() & re.findall(r"`[^`=]*?(\w+/\w+)`", line)
            for figure in re.findall(r"([\d.]+) GiB", re.sub(r"\(.*?\)", "", line)) if names else ():
                digits = len(figure.partition(".")[2])
                assert any(f"{amount:.{digits}f}" == figure for name in names for amount in known[name]), line
                checked += 1
    assert checked > 20


def test_the_number_of_private_names_is_that_of_the_code():
    [shown] = re.findall(r"^private names of torch .*: (.*) found$", (ROOT / "docs" / "install.md").read_text(), re.M)
    assert shown == f"{len(PRIVATE_NAMES)} of {len(PRIVATE_NAMES)}"


@pytest.mark.long
@pytest.mark.parametrize("name", ["README.md", "docs/first_fine_tune.md"])
def test_the_first_fine_tune_learns_its_rows(name, tmp_path, monkeypatch, capsys):
    """The first commands that train, as written, in an empty folder, twice."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / name).read_text()
    rows = re.search(r'(?:^\{"prompt".*\}\n)+', text, re.MULTILINE)
    assert rows
    Path("my_chats.jsonl").write_text(rows[0])
    [(block, answer)] = re.findall(r"^(```bash\nleanft run finetune .*?^```\n)\n```text\n(.*?)\n```", text, re.M | re.S)
    for command in [*commands_in(block)] * 2:
        printed = typed(command.line, capsys)
    assert printed.strip() == answer
    for row in map(json.loads, rows[0].splitlines()):
        asked = typed(f"leanft generate runs/first prompt={shlex.quote(row['prompt'])}", capsys)
        assert asked.strip() == row["completion"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_shells_pass_each_command_as_it_is_written(document):
    """zsh takes an unquoted bracket for a pattern of file names, and refuses the command."""
    text = document.read_text()
    inline = re.findall(r"`(leanft [^`]*=[^`]*)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
    for line in [*(command.line for command in commands_in(text)), *inline]:
        typed_line = re.sub(r" \[(--[^\]]*)\]", r" \1", line)  # brackets around what is optional
        outside_quotes = re.sub(r"""'[^']*'|"[^"]*\"""", "", typed_line)
        assert not re.search(r"[\[\]*?]", outside_quotes), f"quote the value: {line}"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the files and models that the documents mention."""
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": "It is 42."}]
    for name, rows in {
        "my_chats.jsonl": [{"messages": chat}] * 40,
        "my_pairs.jsonl": [{"prompt": "Hello?", "chosen": "Hello!", "rejected": "No."}] * 40,
        "my_search.jsonl": [{"query": f"What is {n} x 7?", "positive": f"It is {7 * n}."} for n in range(1200)],
        "mine.jsonl": [{"prompt": "What is 6 x 7?", "completion": "It is 42."}] * 40,
        "questions.jsonl": [{"prompt": "What is 6 x 7?"}] * 2,
        "capitals.jsonl": [{"question": "The capital of Zanemar is", "choices": [" Ulopolis.", " 21."], "answer": 0}],
        "3B_lora_single_device.yaml": [
            {
                "output_dir": "runs/torchtune",
                "model": {"_component_": "torchtune.models.llama3_2.llama3_2_3b"},
                "checkpointer": {"checkpoint_dir": "tiny"},
                "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
                "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5},
            }
        ],
        "my_axolotl.yaml": [
            {
                "base_model": "tiny",
                "datasets": [{"path": "my_chats.jsonl"}],
                "learning_rate": 1e-4,
                "output_dir": "runs/axolotl",
            }
        ],
        "gsm8k_train.jsonl": [{"question": "How many? " * n, "answer": "So many."} for n in range(1, 200)],
    }.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "photos").mkdir()
    photos = []
    for name, answer in (("photos/0.jpg", "Three green dots."), ("photos/1.jpg", "Two yellow dots.")):
        Image.new("RGB", (320, 320), "green").save(tmp_path / name)
        asked = {"role": "user", "content": "Describe the picture."}
        photos.append({"messages": [asked, {"role": "assistant", "content": answer}], "images": [name]})
    (tmp_path / "photos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in photos))
    (tmp_path / f"lean_ft-{lean_ft.__version__}-py3-none-any.whl").touch()
    text = "".join(document.read_text() for document in DOCUMENTS)
    presets = {name for name in re.findall(r"--config ([^\s`]+)", text) if not name.startswith("runs/")}
    presets -= {"NAME", "...", "mine.yaml", "mixed.yaml"}
    text += "".join(catalog.find_preset(name).read_text() for name in presets)
    for name in set(re.findall(r"(?:model\.path=|  path: )([\w.-]+(?:/[\w.-]+)+)", text)) - TRAINED:
        shutil.copytree(resolve_model_path("tiny"), tmp_path / name)
        if "Instruct" not in name:  # a base model has no chat template
            file = tmp_path / name / "tokenizer_config.json"
            settings = json.loads(file.read_text())
            file.write_text(json.dumps({key: value for key, value in settings.items() if key != "chat_template"}))
    return tmp_path


def typed_in(document: Path) -> list[Command]:
    return [one for one in commands_in(document.read_text()) if not one.line.startswith(tuple(NOT_RUN))]


@pytest.mark.first(len(SHORT))
@pytest.mark.parametrize(
    "document",
    sorted(filter(typed_in, DOCUMENTS), key=lambda document: document.name not in SHORT),
    ids=lambda document: document.name,
)
def test_what_a_document_says_to_type_runs_and_prints_what_it_shows(document, reader, capsys):
    text = document.read_text()
    files = re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name, content in [*files, *HEREDOC.findall(text)]:
        (reader / name).write_text(content)  # a user file
    for command in typed_in(document):
        line = command.line
        for pattern, stands_for, _ in SUBSTITUTES:
            line = re.sub(pattern, stands_for, line)
        printed = typed(line, capsys).replace(f"{ROOT}/", ".../")
        assert all(shown_lines(command.output, printed))


def lines_of_picture(name: str) -> list[str]:
    """The lines of a picture of the terminal, from scripts/make_terminal_pictures.py. The first is the command."""
    lines: dict[float, str] = {}
    parts = re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', (ASSETS / f"{name}.svg").read_text())
    for x, y, text in parts:  # a character is 12.2 wide
        line = lines.get(float(y), "").ljust(round(float(x) / 12.2))
        lines[float(y)] = line + html.unescape(text).replace("\xa0", " ")
    return [line.rstrip() for _, line in sorted(lines.items())]


def test_the_picture_of_a_preview_is_what_the_command_prints(reader, capsys):
    (rows,) = HEREDOC.findall((ROOT / "README.md").read_text())
    (reader / rows[0]).write_text(rows[1])
    command, *shown = lines_of_picture("data_preview")
    printed = typed(command.removeprefix("$ "), capsys)
    assert re.sub(r"[⟦⟧]", "", printed).split() == " ".join(shown).split()


@pytest.mark.long
def test_the_picture_of_a_plan_has_the_figures_that_the_command_prints(reader, capsys):
    shutil.rmtree(reader / "meta-llama", ignore_errors=True)  # the preset's own config.json
    command, *shown = lines_of_picture("plan")  # its long lines are wrapped
    texts = [
        " ".join(" ".join(lines).split()) for lines in (shown, typed(command.removeprefix("$ "), capsys).splitlines())
    ]
    assert shape_of(texts[1]).startswith(shape_of(texts[0]))
    for amount, found in zip(*(re.findall(r"([\d.]+) GiB", text) for text in texts), strict=False):
        assert float(found) == pytest.approx(float(amount), rel=0.02)


@pytest.mark.parametrize("name", ["data_preview", "plan"])
def test_the_picture_for_phones_has_the_words_of_the_wide_one(name):
    def words(picture):
        return re.sub(r" in (\d+ min )?[\d.]+ s(?= peak)", "", " ".join(" ".join(lines_of_picture(picture)).split()))

    assert words(f"{name}_narrow") == words(name)
    assert max(map(len, lines_of_picture(f"{name}_narrow"))) <= 50


# Lines with these programs hold options of those programs.
OTHER_PROGRAMS = re.compile(
    r"(?:[ `]vllm serve|`tensorboard|llama-cli|llama-quantize|llama-mtmd-cli|convert_hf_to_gguf\.py|[dD]ocker|pip install|pip wheel|wsl) "  # noqa: E501
)


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    leanft: Any = typer.main.get_command(app)
    return {"": leanft, **leanft.commands, **leanft.commands["data"].commands}


@pytest.fixture(scope="module")
def scripts() -> str:
    return "".join(file.read_text() for name in ("benchmarks", "scripts") for file in (ROOT / name).glob("*.py"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_document_names_only_what_is_there(document, commands, scripts):
    """Verbs, options, extras, make targets, scripts and links exist, in blocks, sentences and comments."""
    text = re.sub(r" *\\\n +", " ", document.read_text())
    parameters = [parameter for command in commands.values() for parameter in command.params]
    options = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    options |= {"--help"}
    ours = "\n".join(line for line in text.splitlines() if not OTHER_PROGRAMS.search(line))
    for option in set(re.findall(r"(?<=[\s`\[])--[a-z][a-z-]+", f"\n{ours}")):
        parameter = option.removeprefix("--").replace("-", "_")  # typer derives the option from it
        assert option in options or f'"{option}"' in scripts or f" {parameter}: Annotated[" in scripts, option
    for verb in set(re.findall(r"(?:^|[`$] ?)leanft ([a-z_]+(?:-[a-z]+)*)", text, re.MULTILINE)):
        assert verb in commands or verb in catalog.recipes(), verb
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"(?:lean-ft|'\.)\[(\w+)\]", text)) <= extras.keys()
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= set(targets)
    for name in re.findall(r"(?:python |`|\]\()((?:benchmarks|scripts|docs|lean_ft|recipes|tests)/[\w/.+-]*)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"""(?:\]\(|(?:src|srcset)=")(?!https?:)([^)#"]+)""", text):
        assert (document.parent / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_code_in_a_document_fits_the_column_of_the_site(document):
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```$", document.read_text(), re.MULTILINE | re.DOTALL)
    whole = ";base64,", "<|"  # a data URL, or a line of rendered text, is not broken
    lines = [line for block in blocks for line in block.splitlines() if not any(part in line for part in whole)]
    assert [line for line in lines if len(line) > 76] == []


PICTURES_OF_PAGES = {".": "plan.svg", "measurements": "memory.png", "correctness": "trl_curves.png"}


@pytest.mark.long
def test_the_documents_are_a_site(tmp_path):
    """A strict build: links work, every page is in the navigation, nothing is loaded from other servers, and the
    reference has all public names."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert {page.parent.name for page in tmp_path.glob("*/index.html")} == {
        page.stem for page in DOCUMENTS if page.stem not in ("README", "AGENTS", "index")
    }
    notebooks = {notebook.stem for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert {page.parent.name for page in tmp_path.glob("notebooks/*/index.html")} == notebooks
    reference = (tmp_path / "api" / "index.html").read_text()
    for package in re.findall(r"^::: (lean_ft(?:\.[a-z]+)?)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        module = importlib.import_module(package)
        for public in (getattr(module, name) for name in module.__all__):
            if inspect.isclass(public) or inspect.isfunction(
                public
            ):  # an alias is documented under the function's name
                assert re.search(rf'id="{package}(\.\w+)?\.{public.__name__}"', reference), public
    assert "Peak learning rate." in reference
    for page, picture in PICTURES_OF_PAGES.items():
        narrow, text = picture.replace(".", "_narrow."), (tmp_path / page / "index.html").read_text()
        assert re.search(rf'<picture><source [^>]*{narrow}"><img [^>]*{picture}"', text)
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")
    assert {url for page in tmp_path.rglob("*.html") for url in loaded.findall(page.read_text())} == set()


def test_yaml_in_a_document_is_a_preset(tmp_path):
    config = catalog.load_recipe(catalog.recipes()["full_finetune_single_device"]).Config
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "preset.yaml").write_text(block)
        assert load_config(config, tmp_path / "preset.yaml", ["model.path=tiny", "output_dir=run"]).data.source


@pytest.mark.long  # the lint runs the same script
def test_the_map_of_the_packages_is_that_of_the_imports():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "draw_map.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
