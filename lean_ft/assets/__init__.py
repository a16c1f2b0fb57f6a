"""What ships inside the package, and the rules by which a path that a user gives becomes a folder or a file."""

import re
from pathlib import Path

_TINY = Path(__file__).parent / "tiny"


def resolve_model_path(path: str | Path) -> Path:
    """Returns the existing folder that `path` names: a folder on disk, or `tiny` for the embedded model.

    A folder on disk wins over the embedded name. Raises ValueError where there is no such folder.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ValueError(f"model path {str(path)!r} is a file; expected the folder that holds config.json.")
    if str(path) == "tiny":
        embedded = _TINY / "model"
        if not embedded.is_dir():
            raise ValueError(f"the embedded model is missing from {embedded}: reinstall lean_ft.")
        return embedded
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)):
        raise ValueError(
            f"model path {str(path)!r} is not a folder here. If it is the name of a repository on the Hugging Face "
            "hub, download it first and give the folder."
        )
    raise ValueError(
        f"model path {str(path)!r} does not exist; expected a folder that holds config.json, or `tiny` for the "
        "embedded model."
    )


def resolve_data_path(path: str | Path) -> Path:
    """Returns the file that `path` names, there or not: on disk, or `tiny/train.jsonl` and `tiny/validation.jsonl`, the
    embedded model's data. A file on disk wins over an embedded one.
    """
    file = Path(path).expanduser()
    if not file.exists() and file.parts[:1] == ("tiny",):
        embedded = _TINY / "data" / Path(*file.parts[1:])
        if embedded.is_file():
            return embedded
    return file
