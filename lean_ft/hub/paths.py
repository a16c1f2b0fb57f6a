"""Resolve the paths that users give: a folder or file on disk, a model on the Hub, or an embedded model or data
file."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from lean_ft.hub import download as hub
from lean_ft.hub import errors as hub_errors
from lean_ft.system.catalog import shipped_config
from lean_ft.system.spelling import did_you_mean

_ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED = ("tiny", "tiny-images", "tiny-tools")
"""Names of the embedded models. Each has a folder of data files of the same name."""


def resolve_model_path(path: str | Path, weights: bool = True) -> Path:
    """Return the folder of the model `path`: a folder on disk, an embedded model by its name, or a repository of the
    Hub (`org/name` or `org/name@revision`), downloaded into the Hub's cache if necessary. For a GGUF file on disk or of
    a repository (`org/name:FILE.gguf`), return a folder of the cache with its configuration and tokenizer.

    A folder or file on disk has precedence, and a run directory means its newest checkpoint. `weights=False` downloads
    no safetensors files. Raises ValueError if there is no such folder or repository, and the errors of
    `lean_ft.hub.download`.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists() and (checkpoints := checkpoints_in(folder)):
            folder = checkpoints[-1]
        return folder
    if folder.is_file():
        return _open_gguf(folder, path)
    if str(path) in EMBEDDED:
        embedded = _ASSETS / str(path) / "model"
        if not embedded.is_dir():
            raise ValueError(f"the embedded model is missing from {embedded}: reinstall lean_ft.")
        return embedded
    name = repository_name(path)
    if name is None:
        raise ValueError(
            f"model path {str(path)!r} does not exist."
            f"{_nearest_folder(folder) or did_you_mean(str(path), EMBEDDED)} Expected a folder with config.json, a "
            f"repository of the Hugging Face Hub (org/name), a GGUF file, or an embedded model ({', '.join(EMBEDDED)})."
        )
    with _mentioning_folders(path):
        found = hub.model_folder(name, weights)
    return _open_gguf(found / name.file, path) if name.file else found


def planned_model_path(path: str | Path) -> Path:
    """As `resolve_model_path`, for a plan: if the model is not on this machine and a preset uses it, the folder of the
    config.json that ships with the preset."""
    name = repository_name(path)
    missing = name is not None and hub.find_cached(name, weights=False) is None
    return (shipped_config(str(path)) if missing else None) or resolve_model_path(path, weights=False)


def _open_gguf(file: Path, path: str | Path) -> Path:
    if file.suffix != ".gguf":
        raise ValueError(f"model path {str(path)!r} is a file; expected the folder with config.json, or a .gguf file.")
    from lean_ft.gguf.open import gguf_folder  # imported here, because most runs open no GGUF file

    return gguf_folder(file, path)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run directory, by step; [] for another folder."""
    return sorted(folder.glob("step_" + "[0-9]" * 8))


def checkpoint_hint(folder: Path) -> str:
    """Return a hint to use a checkpoint if `folder` is a run directory that has any, else an empty string."""
    checkpoints = checkpoints_in(folder)
    return f" It is a run directory: use one of its checkpoints, such as {checkpoints[-1]}." if checkpoints else ""


def free_directory(path: str | Path) -> str:
    """Return `path` if it does not exist, else the first of `path-2`, `path-3`, ... that does not."""
    names = chain([str(path)], (f"{path}-{n}" for n in count(2)))
    return next(name for name in names if not Path(name).expanduser().exists())


def path_at_commit(path: str | Path, begun: str | None = None) -> str | Path:
    """Return a Hub repository as `org/name@commit` at its current commit, which never changes, and any other path as it
    is.

    A path that names no revision keeps the commit of `begun`, which a run began with. Downloads all files but the
    weights. Raises as `resolve_model_path` does.
    """
    name = repository_name(path)
    if name is None or name.names_commit:
        return path
    then = hub.parse_name(begun or "")
    if then is not None and then.names_commit and then._replace(revision=None) == name:
        return str(then)
    with _mentioning_folders(path):
        return str(name._replace(revision=hub.model_folder(name, weights=False).name))


def repository_name(path: str | Path) -> hub.RepositoryName | None:
    """Return the Hub repository that a model path names; None for a folder, for an invalid name, and for a missing run:
    a path below `runs`, or next to a run."""
    folder = Path(path).expanduser()
    name = None if folder.exists() else hub.parse_name(str(path))
    is_run = name is not None and (folder.parts[0] == "runs" or any(folder.parent.glob("*/metrics.jsonl")))
    return None if is_run else name


@contextmanager
def _mentioning_folders(path: str | Path) -> Iterator[None]:
    """If the repository is not found, mention in the error that there is no such folder either."""
    try:
        yield
    except (hub_errors.RepositoryNotFound, hub_errors.HubUnreachable) as error:
        hint = _nearest_folder(Path(path).expanduser())
        raise type(error)(f"model path {str(path)!r} is not a folder here.{hint} As a repository: {error}") from error


def _nearest_folder(missing: Path) -> str:
    """Suggest a sibling of a missing folder or an embedded model: ` Did you mean 'runs/tiny'?`, or an empty string."""
    beside = missing.parent.iterdir() if missing.parent.is_dir() else ()
    return did_you_mean(str(missing), [*EMBEDDED, *(str(folder) for folder in beside if folder.is_dir())])


def resolve_data_path(path: str | Path) -> Path:
    """Return the path of a data file: on disk, or an embedded file such as `tiny/train.jsonl`.

    A file on disk has precedence. The returned file may not exist.
    """
    file = Path(path).expanduser()
    if not file.exists() and file.parts[:1] and file.parts[0] in EMBEDDED:
        embedded = _ASSETS / file.parts[0] / "data" / Path(*file.parts[1:])
        if embedded.is_file():
            return embedded
    return file
