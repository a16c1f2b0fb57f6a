"""What an installed lean_ft is: a wheel with recipes, presets and assets inside, which finds them."""

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


def leanft(installed: Path, workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from lean_ft.cli.main import run_command_line; run_command_line()", *arguments],
        cwd=workplace,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )


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
    listed = leanft(installed, tmp_path, "ls")
    assert listed.returncode == 0, listed.stderr
    for file in (CHECKOUT / "recipes").glob("[!_]*.py"):
        assert file.stem in listed.stdout
        copied = leanft(installed, tmp_path, "cp", file.stem, f"my_{file.stem}")
        assert copied.returncode == 0, copied.stderr
        assert str(installed) in copied.stdout
        assert (tmp_path / f"my_{file.stem}.py").read_bytes() == file.read_bytes()
    for file in (CHECKOUT / "configs").rglob("*.yaml"):
        name = file.relative_to(CHECKOUT / "configs").with_suffix("").as_posix()
        assert name in listed.stdout
        assert leanft(installed, tmp_path, "cat", name).stdout == file.read_text()


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
