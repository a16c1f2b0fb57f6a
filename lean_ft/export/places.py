"""Where an export comes from and where it goes: the source found whole, the destination free and roomy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lean_ft.models.hf_format import WEIGHTS_INDEX
from lean_ft.paths import resolve_model_path
from lean_ft.peft import is_adapter
from lean_ft.tokenizers import TEMPLATE_FOLDERS, TOKENIZER_FILES
from lean_ft.training.checkpoint import MANIFEST, check_whole, free_bytes, newest_whole
from lean_ft.units import gibibytes

# What an export may hold, and so what --force may replace; anything else in a folder is somebody's work.
_OF_A_MODEL = {"config.json", "generation_config.json", WEIGHTS_INDEX, *TOKENIZER_FILES}


def find_source(source: str | Path) -> Path:
    """The folder of a model or an adapter that `source` names: a checkpoint, any folder of Hugging Face's or PEFT's, or
    a run's newest whole checkpoint.

    A checkpoint's files are compared with its manifest's checksums. Raises ValueError where there is none, or none that
    is whole.
    """
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else resolve_model_path(source)
    if (folder / "config.json").is_file() or is_adapter(folder):
        if (folder / MANIFEST).is_file():
            check_whole(folder)
        return folder
    checkpoint = newest_whole(folder, "Passed over for an earlier one.")
    if checkpoint is None:
        raise ValueError(
            f"{folder} has neither a config.json, as a checkpoint has, nor checkpoints step_*, as a run directory has."
        )
    return checkpoint


def check_destination(destination: Path, source: Path, force: bool) -> None:
    """Raises ValueError unless an export may take the place of `destination`.

    What is there gives way to `force` alone, and only where it is itself a model's folder or a .gguf file.
    """
    there, model = destination.resolve(), source.resolve()
    if there == model or there in model.parents or model in there.parents:
        raise ValueError(f"{destination} and the model's folder {source} lie within one another; name another place.")
    if destination.is_dir():
        if not any(destination.iterdir()):
            return
        foreign = [entry.name for entry in destination.iterdir() if not _is_of_a_model(entry)]
        if foreign:
            raise ValueError(
                f"{destination} holds what is no exported model's ({', '.join(sorted(foreign)[:3])}), so nothing is "
                "written there, --force or not. Name a new folder."
            )
    elif destination.exists() and destination.suffix != ".gguf":
        raise ValueError(f"{destination} is a file; expected the name of a new folder.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists. Name another place, or overwrite it with --force.")


def _is_of_a_model(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name in TEMPLATE_FOLDERS
    return entry.name in _OF_A_MODEL or (entry.suffix == ".safetensors" and entry.name.startswith("model"))


@contextmanager
def room_for(needed_bytes: int, destination: Path) -> Iterator[None]:
    """Raises OSError in one sentence where the disk has too little room, before or while the block writes."""
    free = free_bytes(destination.parent)
    if free < needed_bytes:
        raise OSError(
            f"the export needs {gibibytes(needed_bytes)}, and {destination.parent} has {gibibytes(free)} free. Nothing "
            "was written. Free some space, or name a place on another disk."
        )
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk of {destination.parent} filled up during the export, which needs {gibibytes(needed_bytes)}. "
            f"What was written is removed. Free some space, or name a place on another disk."
        ) from None
