"""What an installed lean_ft is: a wheel with recipes, presets and assets inside, which finds them."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import lean_ft

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout with what is installed here."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed, and the wheel is built without a network")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", folder, CHECKOUT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("lean_ft-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as pip would into site-packages."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


# Runs commands in one process, and prints the exit code and the output of each.
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


def test_an_installed_copy_finds_its_recipes_and_presets(installed, tmp_path):
    recipes = list((CHECKOUT / "recipes").glob("[!_]*.py"))
    presets = {
        file.relative_to(CHECKOUT / "configs").with_suffix("").as_posix(): file
        for file in (CHECKOUT / "configs").rglob("*.yaml")
    }
    commands = [
        ["ls"],
        *(["cp", file.stem, f"my_{file.stem}"] for file in recipes),
        *(["cat", name] for name in presets),
    ]
    listed, *printed = leanft(installed, tmp_path, commands)
    for file, copied in zip(recipes, printed, strict=False):
        assert file.stem in listed
        assert str(installed) in copied.replace("\n", "")
        assert (tmp_path / f"my_{file.stem}.py").read_bytes() == file.read_bytes()
    for (name, file), shown in zip(presets.items(), printed[len(recipes) :], strict=True):
        assert name in listed
        assert shown == file.read_text()


def test_versions_agree():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert project["version"] == lean_ft.__version__


def test_every_dependency_is_pinned_in_the_constraints():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]

    def name(requirement: str) -> str:
        return requirement.split(";")[0].split(">")[0].split("=")[0].strip().lower()

    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pinned = {name(line) for line in lines if line and not line.startswith("#")}
    others = {
        name(requirement) for requirement in wanted if not requirement.startswith("lean-ft[")
    }  # extras of its own
    assert others <= pinned
    assert all("==" in line for line in lines if line and not line.startswith("#"))
