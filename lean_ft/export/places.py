"""Read the source of an export, and check its destination."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lean_ft.gguf.cache import gguf_file
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import Decoder, load_model, stored_labels
from lean_ft.models.beside import is_beside
from lean_ft.models.families import MULTIMODAL
from lean_ft.models.load_options import keywords_of_run, tower_of_run
from lean_ft.models.own_families import check_own_families
from lean_ft.models.stored_weights import WEIGHTS_INDEX, stored_dtype
from lean_ft.models.vision.loading import PROCESSOR_FILES
from lean_ft.peft import MergeReport, is_adapter, load_merged
from lean_ft.peft.finished_models import find_base, tokenizer_folder
from lean_ft.peft.stored_adapter import CONFIG_FILE as ADAPTER_CONFIG
from lean_ft.peft.stored_adapter import WEIGHTS_FILE as ADAPTER_WEIGHTS
from lean_ft.system.redaction import on_one_line
from lean_ft.system.run_directory import EMA_FOLDER, MANIFEST, STATE_FOLDER, TRAINING_STATE_FILE
from lean_ft.system.units import gibibytes
from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers import TEMPLATE_FOLDERS, TOKENIZER_FILES, Tokenizer, load_tokenizer
from lean_ft.tokenizers.media import LIMITS, media_of_run, read_media
from lean_ft.training.checkpoint import free_bytes
from lean_ft.training.view import not_in_files

# Files of an export, which --force may replace. A folder with any other file is never replaced.
_MODEL_FILES = {"config.json", "generation_config.json", WEIGHTS_INDEX, *TOKENIZER_FILES, *PROCESSOR_FILES}
_MODEL_FILES |= {ADAPTER_CONFIG, ADAPTER_WEIGHTS}


@dataclass(frozen=True)
class Exported:
    """The result of an export; `str()` describes it."""

    source: Path
    destination: Path
    details: str
    merged: MergeReport | None

    def __str__(self) -> str:
        merged = f"{self.merged}.\n" if self.merged else ""
        notes = "".join(f"\nNot in the files: {one}." for one in sentences_not_in_files(self.source))
        return f"{merged}exported {gguf_file(self.source) or self.source} to {self.destination}: {self.details}{notes}"


def read_source(
    folder: Path,
    merge: bool,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    with_tower: bool = False,
) -> tuple[Decoder, Tokenizer | None, MergeReport | None]:
    """Read the model in `folder`, or with `merge` the model `base` (default: the adapter's) with the folder's adapter.

    Weights are in `dtype` (default: as stored). `with_tower` also loads the vision tower, if the run that wrote the
    folder had one. Raises ValueError for an adapter without `merge`, a model with `merge`, and weights that are not
    finite.
    """
    if is_adapter(folder) and not merge:
        raise ValueError(
            f"{folder} has an adapter, not a model. Export it with its model by --merge, or alone by --adapter."
        )
    if merge and not is_adapter(folder):
        raise ValueError(f"{folder} has a whole model, not an adapter: leave out --merge.")
    model_folder = resolve_model_path(base or find_base(folder)) if merge else folder
    dtype = dtype or stored_dtype(model_folder)
    with_tokenizer = tokenizer_folder(folder, model_folder)
    tokenizer = load_tokenizer(with_tokenizer) if with_tokenizer else None
    options = keywords_of_run(settings_of_run(folder) if with_tower else {})
    if merge:
        model, merged = load_merged(folder, model_folder, dtype=dtype, **options)
        if model.config.num_scores and tokenizer is not None:  # transformers finds the end of a text by it
            model.source.config["pad_token_id"] = tokenizer.pad_id
    else:
        model, merged = load_model(folder, dtype=dtype, scores=stored_labels(folder), **options), None
    if tokenizer is not None and model.vision is not None:
        tokenizer.media = media_of_run(read_media(model_folder, tokenizer.added_tokens), settings_of_run(folder))
    check_own_families()
    _check_finite(model, folder)
    return model, tokenizer, merged


def sentences_not_in_files(folder: Path) -> list[str]:
    """Return sentences about settings of a checkpoint's run that shaped the model's input and that no file of an export
    holds."""
    settings, media = settings_of_run(folder), ()
    if any(settings.get(name) is not None for name in LIMITS):
        with suppress(ValueError):  # the base of an adapter is not here
            of_model = resolve_model_path(find_base(folder), weights=False) if is_adapter(folder) else folder
            media = media_of_run(read_media(of_model), settings)
    return not_in_files(settings, media)


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Return the settings, by dotted key, of the run that wrote a checkpoint; empty for other folders."""
    settings = read_json(folder / TRAINING_STATE_FILE).get("settings")
    return settings if isinstance(settings, dict) else {}


def check_tower_is_unchanged(folder: Path, file: str, remedy: str = "Export a folder.") -> str:
    """Return a remark for a `file` that has no vision tower. Raises ValueError if the run trained the tower."""
    if (tower := tower_of_run(settings_of_run(folder))) == "train":
        raise ValueError(
            f"{folder} has a vision tower that was trained, and {file} has the language model alone, which was trained "
            f"with that tower. {remedy}"
        )
    return "" if tower == "none" else f"\n{file} has the language model alone, without its vision tower."


def whole_before(folder: Path) -> str:
    """Return the model_type of the multimodal folder whose language model a run trained; "" if this machine has
    none."""
    base = settings_of_run(folder).get("model.path")
    name = read_json(Path(base).expanduser() / "config.json").get("model_type") if isinstance(base, str) else None
    return name if name in MULTIMODAL and name != read_json(folder / "config.json").get("model_type") else ""


def files_of_model(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint's model or adapter, without its training state and its averaged weights."""
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        is_state = path.parts[0] in (STATE_FOLDER, EMA_FOLDER) or path.name == MANIFEST
        if file.is_file() and not is_state and not any(part.startswith(".") for part in path.parts):
            yield file


def _check_finite(model: Decoder, folder: Path) -> None:
    """Raise ValueError if a weight is not finite, for example after a cast to float16 of a number above 65,504."""
    for name, parameter in model.named_parameters():
        lowest, highest = torch.aminmax(parameter.detach())
        if not (lowest.isfinite() and highest.isfinite()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"{folder}: {name} has a value above {torch.finfo(parameter.dtype).max:g}, which {dtype} cannot hold, "
                "or that is not finite in the source. Export it as bfloat16 or float32. If that fails too, the source "
                "is broken."
            )


def check_destination(destination: Path, source: Path, force: bool) -> None:
    """Raise ValueError unless an export may be written to `destination`.

    Only an earlier export (a model folder or a .gguf file) may be replaced, and only with `force`.
    """
    if on_one_line(str(destination)) != str(destination):  # a Modelfile and a model card name it
        raise ValueError(f"the destination {str(destination)!r} has control characters. Choose another name.")
    there, model = destination.resolve(), source.resolve()
    if there == model or there in model.parents or model in there.parents:
        raise ValueError(
            f"{destination} and the model folder {source} contain one another. Choose another destination."
        )
    if destination.is_dir():
        if not any(destination.iterdir()):
            return
        other = sorted(entry.name for entry in destination.iterdir() if not _is_model_file(entry))
        if other:
            raise ValueError(
                f"{destination} has files that no export writes ({', '.join(other[:3])}), so --force does not replace "
                "it. Choose a new folder."
            )
    elif destination.exists() and destination.suffix != ".gguf":
        raise ValueError(f"{destination} is a file; expected the name of a new folder.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists. Choose another destination, or overwrite it with --force.")


def _is_model_file(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name in TEMPLATE_FOLDERS or is_beside(entry)
    if entry.name == ".metadata" or entry.suffix == ".distcp":  # a DCP folder
        return True
    return (
        entry.name in _MODEL_FILES
        or is_beside(entry)
        or (entry.suffix == ".safetensors" and entry.name.startswith("model"))
    )


@contextmanager
def room_for(needed_bytes: int, destination: Path) -> Iterator[None]:
    """Raise a clear OSError if the disk has too little space, before or while the block writes."""
    free, needed = free_bytes(destination.parent), gibibytes(needed_bytes)
    remedy = "Free some space, or choose a destination on another disk."
    if free < needed_bytes:
        raise OSError(f"the export needs {needed}, and {destination.parent} has {gibibytes(free)} free. {remedy}")
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk of {destination.parent} became full during the export, which needs {needed}. Nothing was kept. "
            f"{remedy}"
        ) from None
