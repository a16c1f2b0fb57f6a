"""How lean_ft is installed here, and the commands that add its optional packages."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
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
        required = [one.partition(";") for one in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        required = []
    named = [name.strip() for name, _, marker in required if re.search(rf"""extra == ['"]{extra}['"]""", marker)]
    return shlex.join([*_pip_install(), *named])


def checkout() -> Path | None:
    """Return the folder of the clone that this package is in, or None if it was copied into site-packages."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None


def source_elsewhere() -> str:
    """Return where another machine can install this lean_ft from: `git+URL@commit`, or the URL or path of a wheel.

    Raises ValueError if only this machine has it.
    """
    folder = checkout()
    if folder is not None:
        remote, commit = _git(folder, "remote", "get-url", "origin"), _git(folder, "rev-parse", "HEAD")
        url = re.sub(r"//[^/@]*@", "//", re.sub(r"^git@([^:]+):", r"https://\1/", remote))  # without a user's token
        if url.startswith("https://") and _git(folder, "branch", "--remotes", "--contains", commit):
            return f"git+{url}@{commit}"
    else:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        url = origin.get("url", "")
        if "vcs_info" in origin:
            return f"git+{url}@{origin['vcs_info']['commit_id']}"
        if url.endswith(".whl") and (url.startswith("https://") or Path(url.removeprefix("file://")).is_file()):
            return url.removeprefix("file://")
    raise ValueError(
        f"--source is missing: other machines cannot install lean_ft from {folder or _ROOT}. Push the commit of your clone to a "
        f"remote repository, or build a wheel with `pip wheel --no-deps -w . {folder or 'CLONE'}` and pass --source FILE.whl."
    )


def _git(folder: Path, *words: str) -> str:
    """Return what a git command prints; empty if it fails."""
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]  # fsmonitor may name a program to run
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return ""


def _pip_install() -> list[str]:
    """Return `pip install` for this Python, which may not be the Python of the shell's `pip`."""
    # Not `find_spec("pip")`, which turns off the distutils of setuptools, and torch.compile then fails.
    if not any(metadata.distributions(name="pip")):
        return ["uv", "pip", "install", "--python", sys.executable]
    found = shutil.which("pip")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    return ["pip", "install"] if is_ours else [sys.executable, "-m", "pip", "install"]
