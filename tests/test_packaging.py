"""The installed wheel contains recipes, presets and assets, and finds them."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import lean_ft

CHECKOUT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout with the installed tools."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed, and the wheel is built without a network")
    from hatchling.build import build_wheel

    folder = tmp_path_factory.mktemp("wheel")
    with contextlib.chdir(CHECKOUT):
        build_wheel(str(folder))
    (file,) = folder.glob("lean_ft-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as in site-packages."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


# Runs commands in one process and prints exit code and output of each.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from lean_ft.cli.main import app
answers = [CliRunner().invoke(app, command) for command in json.load(sys.stdin)]
print(json.dumps([(answer.exit_code, answer.stdout) for answer in answers]))
"""


def leanft(installed: Path, workplace: Path, commands: list[list[str]]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(commands),
        cwd=workplace,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [code for code, _ in answers] == [0] * len(commands), answers
    return [printed for _, printed in answers]


def test_the_wheel_holds_the_package_and_what_ships_with_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for ours, theirs in [("lean_ft", "lean_ft"), ("recipes", "lean_ft/_recipes"), ("configs", "lean_ft/_configs")]:
        tracked = subprocess.run(["git", "ls-files", ours], cwd=CHECKOUT, capture_output=True, text=True, check=False)
        files = [line.removeprefix(ours) for line in tracked.stdout.splitlines()]
        if tracked.returncode != 0:
            pytest.skip("not a git checkout, so which files belong to it is not known")
        assert {theirs + file for file in files} <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "recipes/", "configs/")) for name in names)
    assert not any(name.endswith(".pyc") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.long
def test_an_installed_copy_finds_its_recipes_and_presets(installed, tmp_path):
    recipes = sorted((CHECKOUT / "recipes").glob("[!_]*.py"))
    presets = {
        file.relative_to(CHECKOUT / "configs").with_suffix("").as_posix(): file
        for file in sorted((CHECKOUT / "configs").rglob("*.yaml"))
    }
    commands = [
        ["ls"],
        *(["cat", name] for name in presets),
        *(["cp", file.stem, f"my_{file.stem}"] for file in recipes),
    ]
    listed, *printed = leanft(installed, tmp_path, commands)
    assert all(name in listed for name in (*presets, *(file.stem for file in recipes)))
    for file, text in zip(presets.values(), printed, strict=False):
        assert text == file.read_text()
    for file, copied in zip(recipes, printed[len(presets) :], strict=True):
        assert str(installed) in copied.replace("\n", "")
        assert (tmp_path / f"my_{file.stem}.py").read_bytes() == file.read_bytes()


@pytest.mark.long
def test_the_wheel_installs_from_nothing_and_trains(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=600)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    constraints = ("-c", CHECKOUT / "constraints.txt")

    def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [tmp_path / "venv" / "bin" / program, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1800)

    if (done := run("pip", "install", *constraints, "torch")).returncode != 0:
        pytest.skip(f"torch cannot be installed: {done.stderr.splitlines()[-1]}")
    done = run("pip", "install", *constraints, wheel)
    assert done.returncode == 0, done.stderr
    installed = run("pip", "list", "--format=freeze").stdout.lower()
    extras = [one for name in PROJECT["optional-dependencies"] if name != "dev" for one in optional(name)]
    assert not [one for one in extras if f"\n{one}==" in installed]  # the base installation has none of them
    done = run("leanft", "run", "full_finetune_single_device", "--config", "tiny/full", "max_steps=2", "eval_answers=0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "tiny" / "step_00000002" / "config.json").is_file()


def test_the_wheel_and_the_pages_have_the_version_of_the_package(wheel):
    """`lean_ft.__version__` is the only place of the version."""
    version = lean_ft.__version__
    assert wheel.name == f"lean_ft-{version}-py3-none-any.whl"
    pages = "".join(page.read_text() for page in (CHECKOUT / "docs").glob("*.md"))
    assert set(re.findall(r"lean_ft(?:-|       )(\d+\.\d+\.\d+)", pages)) == {version}
    assert f"\n## {version}\n" in (CHECKOUT / "CHANGELOG.md").read_text()


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def optional(extra: str) -> list[str]:
    """The packages of an extra, without packages that other extras name."""
    return [name_of(one) for one in PROJECT["optional-dependencies"][extra] if not one.startswith("lean-ft[")]


def test_every_dependency_is_pinned_in_the_constraints():
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith("#")}
    wanted = {
        *map(name_of, PROJECT["dependencies"]),
        *(d for e in PROJECT["optional-dependencies"] for d in optional(e)),
    }
    assert wanted <= pinned
    assert all("==" in line for line in lines if line and not line.startswith("#"))
