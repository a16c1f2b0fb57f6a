"""What training left, wherever it is named: a model's folder, a checkpoint, a run, or an adapter that knows its model."""

from pathlib import Path

from lean_ft.hub.download import TOKENIZER_FILES
from lean_ft.hub.paths import repository_name, resolve_model_path
from lean_ft.peft import is_adapter
from lean_ft.peft.peft_format import read_adapter
from lean_ft.training.checkpoint import MANIFEST, TRAINING_STATE_FILE, check_whole, newest_whole, read_training_state


def find_finished(source: str | Path, checksum_up_to_bytes: int | None = None, weights: bool = True) -> Path:
    """The folder of a model or an adapter that `source` names: a checkpoint, any folder of Hugging Face's or PEFT's, a
    run's newest whole checkpoint, or what else `resolve_model_path` knows.

    A checkpoint's files are compared with its manifest: sizes, and checksums of files up to `checksum_up_to_bytes`
    (None: all). Raises ValueError where there is none, or none that is whole.
    """
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else resolve_model_path(source, weights)
    if (folder / "config.json").is_file() or is_adapter(folder):
        if (folder / MANIFEST).is_file():
            check_whole(folder, checksum_up_to_bytes)
        return folder
    checkpoint = newest_whole(folder, "Passed over for an earlier one.", checksum_up_to_bytes)
    if checkpoint is None:
        raise ValueError(
            f"{folder} has neither a config.json, as a checkpoint has, nor checkpoints step_*, as a run directory has."
        )
    return checkpoint


def find_base(adapter: Path) -> str:
    """The model that an adapter is of, as its own config names it, or the run that wrote it where that is gone.

    Raises ValueError where neither names one that is here or on the hub.
    """
    names = [read_adapter(adapter).base_model]
    if (adapter / TRAINING_STATE_FILE).is_file():
        names.append(read_training_state(adapter)["settings"].get("model.path"))
    for name in filter(None, names):
        if name == "tiny" or repository_name(name) is not None or Path(name).expanduser().is_dir():
            return name
    said = f"says that it is of {names[0]}, which is not here" if names[0] else "does not say which model it is of"
    raise ValueError(f"{adapter} {said}; give the model's folder (model.path=..., or --base of `leanft export`).")


def tokenizer_folder(*folders: Path) -> Path | None:
    """The first of the folders that holds a tokenizer."""
    return next((f for f in folders if any((f / name).is_file() for name in TOKENIZER_FILES)), None)
