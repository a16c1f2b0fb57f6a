"""Nothing in the current folder is imported, by any verb and by any process that it starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.processes import needs_parts

NAMES = [
    *("lean_ft", "wandb", "yaml", "torch", "json", "sitecustomize", "usercustomize", "pickle", "socket", "runpy"),
    *("struct", "typing", "numpy", "rich", "typer", "pydantic", "tokenizers", "select", "selectors", "queue"),
    *("ctypes", "hashlib", "subprocess", "multiprocessing"),
]
LEANFT = Path(sys.executable).with_name("leanft")
SHORT = ["max_steps=1", "device=cpu", "eval_answers=0"]
RUN = ["run", "--config", "tiny/full", *SHORT, "output_dir=../run"]
COMMANDS = {
    "ls": ["ls"],
    "own function": [*RUN, "data.format=own/format.py:f"],
    "own recipe": ["run", "own/recipe.py", *RUN[1:]],
    "wandb": [*RUN, "log.to=[wandb]", "log.offline=true"],
    "compiled": [*RUN, "compile=true"],
    "cat": ["cat", "finetune"],
    "validate": ["validate", "--config", "tiny/full"],
    "preview": ["data", "preview", "--config", "tiny/full"],
    "plan": ["plan", "--config", "tiny/full"],
    "env": ["env"],
    "check": ["check", "tiny", "--quick"],
}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that hide libraries, and a folder `own` with the user's files."""
    folder = tmp_path / "folder"
    (folder / "own").mkdir(parents=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    shutil.copy(Path(__file__).parents[2] / "recipes" / "full_finetune_single_device.py", folder / "own" / "recipe.py")
    with (folder / "own" / "recipe.py").open("a") as recipe:
        recipe.write("\nimport beside\n")
    (folder / "own" / "format.py").write_text("import beside\n\ndef f(row):\n    return row\n")
    (folder / "own" / "beside.py").write_text("")
    monkeypatch.chdir(folder)
    for name, value in {"WANDB_SILENT": "true", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}.items():
        monkeypatch.setenv(name, value)
    return folder


def imported(folder: Path, *command: str | Path) -> str:
    """Run a command and return the names of the files that it imported."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    file = folder.with_name("imported")
    return file.read_text() if file.exists() else ""


@pytest.mark.skipif(not LEANFT.exists(), reason="needs the installed command")
@pytest.mark.first(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_nothing_here(hostile: Path, name: str) -> None:
    if name == "wandb":
        pytest.importorskip("wandb")
    assert imported(hostile, LEANFT, *COMMANDS[name]) == ""


def test_the_users_functions_import_nothing_here(hostile: Path, leanft) -> None:
    """Modules that this process has imported are not imported again, so the path is checked too."""
    path = [*sys.path]
    leanft.ok("data", "preview", "--config", "tiny/full", "data.format=own/format.py:f", "-n", "1")
    assert not hostile.with_name("imported").exists()
    assert not {"", ".", str(hostile)} & ({*sys.path} - {*path})


@needs_parts
@pytest.mark.long
def test_launched_processes_import_nothing_here(hostile: Path) -> None:
    run = ["run", "--nproc-per-node", "2", "finetune", "--config", "tiny/full", *SHORT, "output_dir=../run"]
    assert imported(hostile, sys.executable, "-P", "-m", "lean_ft", *run) == ""


@pytest.mark.long
def test_python_dash_m_imports_no_library_here(hostile: Path) -> None:
    """Python itself imports lean_ft, and what it needs to find it, from the current folder."""
    for name in ("lean_ft", "runpy", "sitecustomize", "typing", "socket", "select", "selectors"):
        (hostile / f"{name}.py").unlink()
    assert imported(hostile, sys.executable, "-m", "lean_ft", "ls") == ""


def test_data_processes_import_nothing_here(hostile: Path) -> None:
    """A spawned process has the current folder on its path until it gets the path of its parent."""
    program = hostile.with_name("program.py")
    program.write_text(
        "import os\nfrom lean_ft.data.workers import map_in_processes\n"
        "if __name__ == '__main__':\n    assert list(map_in_processes(abs, [-1, 2, -3], 2)) == [1, 2, 3]\n"
        "    assert 'PYTHONSAFEPATH' not in os.environ\n"
    )
    assert imported(hostile, sys.executable, program) == ""


def test_a_hostile_folder_is_noticed(hostile: Path) -> None:
    """The other tests could not fail if Python itself ignored the folder."""
    assert "json" in imported(hostile, sys.executable, "-c", "import json")


def test_no_variable_of_this_process_protects_the_folder() -> None:
    assert "PYTHONSAFEPATH" not in os.environ
