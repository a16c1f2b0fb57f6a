"""Find a trained model by a folder, a checkpoint, a run directory, a hub id, or an adapter that names its base
model."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from lean_ft.hub.download import TOKENIZER_FILES
from lean_ft.hub.paths import EMBEDDED, repository_name, resolve_model_path
from lean_ft.models import Decoder
from lean_ft.peft.stored_adapter import is_adapter, read_adapter
from lean_ft.system.run_directory import (
    MANIFEST,
    TRAINING_STATE_FILE,
    check_whole,
    newest_whole,
    read_training_state,
)
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.tokenizers.media import read_media


def find_finished(source: str | Path, *, quick: bool = False, weights: bool = True) -> Path:
    """The model or adapter folder for `source`: a checkpoint, a Hugging Face or PEFT folder, the newest whole
    checkpoint of a run directory, or a name that `resolve_model_path` knows.

    A checkpoint's files are verified by its manifest: sizes and checksums, with `quick` the checksums of small files
    alone. Raises ValueError if there is no folder, or no whole checkpoint.
    """
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else resolve_model_path(source, weights)
    if (folder / "config.json").is_file() or is_adapter(folder):
        if (folder / MANIFEST).is_file():
            check_whole(folder, quick=quick)
        return folder
    checkpoint = newest_whole(folder, "An earlier checkpoint is used.", quick=quick)
    if checkpoint is None:
        raise ValueError(
            f"{folder} has neither a config.json (a model or checkpoint) nor step_* folders (a run directory)."
            f"{_runs_in(folder)}"
        )
    return checkpoint


def _runs_in(folder: Path) -> str:
    """The end of a message about a folder that is no run: a run in it, the newest first."""
    runs = {checkpoint.parent for checkpoint in folder.glob("*/step_*")}
    newest = max(runs, key=lambda run: run.stat().st_mtime, default=None)
    return "" if newest is None else f" It is a folder of runs. Name one of them, such as {newest}."


def find_base(adapter: Path) -> str:
    """The base model of an adapter, from its own config, else from the settings of the run that wrote it.

    Raises ValueError if neither names a model that is here or on the hub.
    """
    names = [read_adapter(adapter).base_model]
    if (adapter / TRAINING_STATE_FILE).is_file():
        names.append(read_training_state(adapter)["settings"].get("model.path"))
    for name in filter(None, names):
        if name in EMBEDDED or repository_name(name) is not None or Path(name).expanduser().exists():
            return name
    problem = f"no such base model: {names[0]}" if names[0] else "the adapter does not name its base model"
    raise ValueError(f"{adapter}: {problem}. Set the base model's folder by model.path, or --base of `leanft export`.")


def tokenizer_folder(*folders: Path) -> Path | None:
    """The first folder that holds a tokenizer."""
    return next((f for f in folders if any((f / name).is_file() for name in TOKENIZER_FILES)), None)


def tokenizer_of(*folders: Path, chat_template: Path | None = None, model: Decoder | None = None) -> Tokenizer:
    """The tokenizer of the first of `folders` that holds one, with `data.chat_template_kwargs` and the limits of media
    of the run that wrote the first checkpoint among them.

    chat_template: a file that replaces its template; model: was loaded from the last folder, and reads media if it has
    its towers. Raises ValueError if there is no tokenizer.
    """
    tokenizer = load_tokenizer(tokenizer_folder(*folders) or folders[-1], chat_template)
    checkpoint = next((folder for folder in folders if (folder / TRAINING_STATE_FILE).is_file()), None)
    settings = {} if checkpoint is None else read_training_state(checkpoint)["settings"]
    tokenizer.chat_template_kwargs = template_kwargs(settings)
    if model is not None and model.vision is not None:
        media = read_media(folders[-1], tokenizer.added_tokens)
        tokenizer.media = tuple(medium.of_run(settings) for medium in media)
        for medium in tokenizer.media:
            medium.check()
    return tokenizer


def template_kwargs(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The group `data.chat_template_kwargs` of settings by dotted key."""
    prefix, variables = "data.chat_template_kwargs.", dict[str, Any]()
    for key, value in settings.items():
        if key.startswith(prefix):
            *groups, name = key.removeprefix(prefix).split(".")
            reduce(lambda inner, group: inner.setdefault(group, {}), groups, variables)[name] = value
    return variables
