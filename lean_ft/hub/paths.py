"""What a path that a user gives means: a folder or file on disk, a model of the hub, or what ships inside the package."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from lean_ft.hub import download as hub
from lean_ft.hub import errors as hub_errors
from lean_ft.system.spelling import did_you_mean

_TINY = Path(__file__).parents[1] / "assets" / "tiny"


def resolve_model_path(path: str | Path, weights: bool = True) -> Path:
    """Returns the existing folder that `path` names: a folder on disk, `tiny` for the embedded model, or a repository
    of the Hugging Face hub (`org/name` or `org/name@revision`) in the hub's cache, fetched if it is not there yet.

    A folder on disk wins over either name. Without `weights` no safetensors file is fetched. Raises ValueError where
    there is no such folder and no such repository, for a run directory, and as `lean_ft.hub.download` does.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists() and (hint := checkpoint_hint(folder)):
            raise ValueError(f"model path {str(path)!r} is no model.{hint}")
        return folder
    if folder.is_file():
        raise ValueError(f"model path {str(path)!r} is a file; expected the folder that holds config.json.")
    if str(path) == "tiny":
        embedded = _TINY / "model"
        if not embedded.is_dir():
            raise ValueError(f"the embedded model is missing from {embedded}: reinstall lean_ft.")
        return embedded
    name = repository_name(path)
    if name is None:
        raise ValueError(
            f"model path {str(path)!r} does not exist.{_nearest_folder(folder)} Expected a folder that holds config.json, "
            "a repository of the Hugging Face hub (org/name), or `tiny` for the embedded model."
        )
    with _no_folder_either(path):
        return hub.model_folder(name, weights)


def checkpoint_hint(folder: Path) -> str:
    """` It is a run directory: give one of its checkpoints, such as ...`, where it is one that has any, or nothing."""
    checkpoints = sorted(folder.glob("step_" + "[0-9]" * 8))
    return f" It is a run directory: give one of its checkpoints, such as {checkpoints[-1]}." if checkpoints else ""


def free_directory(path: str | Path) -> str:
    """Return `path` if nothing is there, else the first of `path-2`, `path-3`, ... that is free."""
    names = chain([str(path)], (f"{path}-{n}" for n in count(2)))
    return next(name for name in names if not Path(name).expanduser().exists())


def path_at_commit(path: str | Path) -> str | Path:
    """Returns a model path that means the same model for good: a repository of the hub at the commit that it is at now
    (`org/name@commit`), anything else as it is. Of the repository all but its weights is fetched. Raises as
    `resolve_model_path` does for one.
    """
    name = repository_name(path)
    if name is None or name.names_commit:
        return path
    with _no_folder_either(path):
        return str(hub.RepositoryName(name.repo, hub.model_folder(name, weights=False).name))


def repository_name(path: str | Path) -> hub.RepositoryName | None:
    """The repository of the Hugging Face hub that a model path names; None for a folder, for what is no name, and for a
    run that does not exist: a path below `runs`, or next to a run."""
    folder = Path(path).expanduser()
    name = None if folder.exists() else hub.parse_name(str(path))
    is_run = name is not None and (folder.parts[0] == "runs" or any(folder.parent.glob("*/metrics.jsonl")))
    return None if is_run else name


@contextmanager
def _no_folder_either(path: str | Path) -> Iterator[None]:
    """Says of a repository that is not found that there is no such folder either: one of them was meant."""
    try:
        yield
    except (hub_errors.RepositoryNotFound, hub_errors.HubUnreachable) as error:
        hint = _nearest_folder(Path(path).expanduser())
        raise type(error)(f"model path {str(path)!r} is no folder here.{hint} As a repository: {error}") from error


def _nearest_folder(missing: Path) -> str:
    """` Did you mean 'runs/tiny'?`, of what lies beside a folder that is not there, or nothing."""
    if not missing.parent.is_dir():
        return ""
    return did_you_mean(str(missing), [str(folder) for folder in missing.parent.iterdir() if folder.is_dir()])


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
