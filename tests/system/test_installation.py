"""The printed commands that add optional packages."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from lean_ft.system import installation
from lean_ft.system.installation import install_command

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OURS = str(Path(sys.executable).parent)


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{OURS}:{os.environ['PATH']}")


def test_a_clone_is_named_and_other_installations_name_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("plots") == f"pip install -e '{ROOT}[plots]'"
    monkeypatch.setattr(installation, "checkout", lambda: None)
    for extra in ("plots", "serve", "mlflow"):
        words = shlex.split(install_command(extra))
        assert words[:2] == ["pip", "install"] and sorted(words[2:]) == sorted(EXTRAS[extra])
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy", 'gguf<2,>=0.17; extra == "gguf"'])
    assert install_command("gguf") == "pip install 'gguf<2,>=0.17'"


def test_the_command_is_for_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    assert install_command("plots").startswith(f"{sys.executable} -m pip install ")
    monkeypatch.setattr(installation.metadata, "distributions", lambda name: [])
    assert install_command("plots").startswith(f"uv pip install --python {sys.executable} ")


def test_every_named_extra_exists() -> None:
    sources = [file.read_text() for file in (ROOT / "lean_ft").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"install_command\(['\"](\w+)", text)}
    assert named == {"datasets", "eval", "gguf", "mteb", "plots", "serve", "zstd"} and named <= EXTRAS.keys()
    assert not [text for text in sources if "lean-ft[" in text]


@pytest.mark.long
def test_a_message_leaves_the_imports_of_other_packages_alone() -> None:
    """setuptools hides its distutils, which torch.compile needs, from a process that looks for pip's module."""
    code = (
        "from lean_ft.system.installation import install_command; install_command('plots'); import distutils.core as "
        "d; print(d.__file__)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    plain = [sys.executable, "-P", "-c", "import distutils.core as d; print(d.__file__)"]
    assert done.stdout == subprocess.run(plain, capture_output=True, text=True, check=True).stdout
