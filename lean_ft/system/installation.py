"""How lean_ft is installed here, and the commands that add its optional packages."""

import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "lean-ft"


def install_command(extra: str) -> str:
    """Return a command that installs the packages of an extra of lean_ft, such as `plots`.

    In a clone it names the clone. Otherwise it names the packages themselves, because lean_ft is in no package index.
    """
    if (folder := checkout()) is not None:
        return shlex.join([*_pip_install(), "-e", f"{folder}[{extra}]"])
    try:
        required = [requirement.partition(";") for requirement in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        required = []
    named = [name.strip() for name, _, marker in required if re.search(rf"""extra == ['"]{extra}['"]""", marker)]
    return shlex.join([*_pip_install(), *named])


def checkout() -> Path | None:
    """Return the folder of the clone that this package is in, or None if it was copied into site-packages."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None


def _pip_install() -> list[str]:
    """Return `pip install` for this Python, which may not be the Python of the shell's `pip`."""
    # Not `find_spec("pip")`, which turns off the distutils of setuptools, and torch.compile then fails.
    if not any(metadata.distributions(name="pip")):
        return ["uv", "pip", "install", "--python", sys.executable]
    executable = shutil.which("pip")
    is_ours = executable is not None and Path(executable).parent == Path(sys.executable).parent
    return ["pip", "install"] if is_ours else [sys.executable, "-m", "pip", "install"]
