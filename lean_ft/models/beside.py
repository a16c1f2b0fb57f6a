"""Files of a model's folder that lean_ft does not need to compute the model, and that say how others use it.

They are kept as JSON values in `Source.beside` and written again into every folder that is saved: those that were read
with the model, or those that a recipe set. sentence-transformers' are the only kind: modules.json, the files that it
names, and prompts.
"""

from collections.abc import Mapping
from pathlib import Path

from lean_ft.system.foreign_values import JSON
from lean_ft.system.whole_files import read_json_value, write_json

_FIRST = "modules.json"
_FOLDERS = "[0-9]_*"
_FILES = (_FIRST, "config_sentence_transformers.json", "sentence_*_config.json")
_MOST_FILES = 32


def is_beside(entry: Path) -> bool:
    """Whether an entry of a model's folder is a file of this kind, or a folder with nothing but a module's files."""
    if not entry.is_dir():
        return any(entry.match(pattern) for pattern in _FILES)
    return entry.match(_FOLDERS) and {one.name for one in entry.iterdir()} <= {"config.json", "model.safetensors"}


def files_beside(folder: Path) -> dict[str, JSON]:
    """Return the values of a folder's files of this kind by name; empty without a modules.json. Raises ValueError for a
    file that is not JSON."""
    if not (folder / _FIRST).is_file():
        return {}
    found = [
        file
        for pattern in (*_FILES, f"{_FOLDERS}/config.json")
        for file in sorted(folder.glob(pattern))
        if file.is_file()
    ][:_MOST_FILES]
    return {file.relative_to(folder).as_posix(): read_json_value(file) for file in found}


def write_beside(files: Mapping[str, JSON], folder: Path) -> None:
    """Write the files into a folder."""
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, value)
