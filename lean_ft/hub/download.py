"""Download models from the Hugging Face Hub into the Hub's own cache, at a known commit.

The huggingface_hub client provides the cache, the token (which this module never reads) and the progress bars. This
module fetches only files that finetuning reads, and explains each failure in one message (`lean_ft.hub.errors`). It
fetches one
file at a time, weights last: a snapshot that has its weights is complete, and Ctrl-C stops at once and loses at most
part of one file. (hf-xet still transfers a large file in parallel.) `snapshot_download` instead waits for the files
under way before it stops, and records a branch's new commit before its files are there.
"""

import json
import logging
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lean_ft.hub.errors import OTHER_DISK, DownloadFailed, HubUnreachable, explained
from lean_ft.system.whole_files import write_whole

# huggingface_hub is imported inside functions, since importing it would slow down `leanft --help`.

# Files that finetuning does not read: pickled weights, and copies of the weights for other programs.
SKIPPED = (
    *("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.h5", "*.msgpack", "*.ot", "*.npz", "*.tflite"),
    *("*.gguf", "*.onnx", "*.onnx_data", "onnx/*", "openvino/*", "coreml/*", "metal/*"),
    *("original/*", "consolidated*.safetensors"),
)
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
TIMEOUT_SECONDS = 30.0  # for the list of a repository's files
MAX_NAME_BYTES = 255  # of a file name, on almost every file system

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w.][\w./-]*))?(?::([\w.][\w./-]*\.gguf))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"(?!\.)[\w.+=:-]{1,200}", re.ASCII)
_log = logging.getLogger(__name__)


class RepositoryName(NamedTuple):
    """`org/name`, or `org/name@revision` for a branch, tag or commit; either may name a file: `org/name:FILE.gguf`."""

    repo: str
    revision: str | None
    file: str = ""

    def __str__(self) -> str:
        at_revision = self.repo if self.revision is None else f"{self.repo}@{self.revision}"
        return f"{at_revision}:{self.file}" if self.file else at_revision

    @property
    def names_commit(self) -> bool:
        """Whether the revision is a full commit hash, which never changes its meaning."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at one commit, on disk."""

    folder: Path
    commit: str
    num_files: int
    size_bytes: int


def parse_name(text: str) -> RepositoryName | None:
    """Parse `org/name` or `org/name@revision`; None if that cannot be the name of a repository."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return RepositoryName(match[1], match[2], match[3] or "")


def download(
    repo: str,
    revision: str | None = None,
    output_dir: str | Path | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Snapshot:
    """Download a model's files into the Hub's cache, or into `output_dir`. Files that are there already are kept.

    `include` selects the files that match one of its patterns (`*.md`, `original/*`); without it, all files but
    `SKIPPED` are selected. `exclude` removes files from the selection. Raises ValueError for problems that the user can
    fix (name, revision, license, token, pattern), and DownloadFailed if the network, the Hub or the disk fails.
    """
    name = parse_name(repo if revision is None else f"{repo}@{revision}")
    if name is None:
        at_revision = "" if revision is None else f" at revision {revision}"
        raise ValueError(f"{repo!r}{at_revision} is not a repository of the Hugging Face Hub; expected org/name.")
    include = [name.file] if name.file else include
    commit, sizes = _list_files(name)
    selected = {file: sizes[file] for file in _select(name.repo, sizes, include, exclude)}
    folder = None if output_dir is None else _check_output_dir(Path(output_dir).expanduser())
    at_commit = RepositoryName(name.repo, commit)
    _check_disk(at_commit, selected, folder)
    snapshot_folder = _fetch(at_commit, selected, folder)
    if folder is None:
        _record_revision(name, commit)
    return Snapshot(snapshot_folder, commit, len(selected), sum(selected.values()))


def model_folder(name: RepositoryName, weights: bool = True) -> Path:
    """Return the folder of a model's snapshot in the Hub's cache, downloaded if necessary.

    A complete cached commit needs no network. A branch or tag is looked up on the Hub; if the Hub cannot be reached,
    its newest complete copy in the cache is used, with a warning. `weights=False` downloads no safetensors files.
    Raises as `download` does.
    """
    cached = find_cached(name, weights)
    names = (name.file,) if name.file else TOKENIZER_FILES
    if name.names_commit and cached is not None and any((cached / file).is_file() for file in names):
        return cached
    try:
        include = (name.file,) if name.file else ()
        return download(name.repo, name.revision, include=include, exclude=() if weights else (WEIGHTS,)).folder
    except HubUnreachable:
        if cached is None:
            raise
        if not name.names_commit:
            _log.warning("%s: cannot reach the Hugging Face Hub; using the cached commit %s.", name, cached.name)
        return cached


def _list_files(name: RepositoryName) -> tuple[str, dict[str, int]]:
    """Return the commit of `name`, and the sizes of its files in bytes."""
    from huggingface_hub import HfApi

    with explained(name.repo, name.revision):
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise _invalid_answer(f"the commit of {name.repo}", info.sha)
    sizes: dict[str, int] = {}
    for sibling in info.siblings or ():
        file, size = sibling.rfilename, sibling.size or 0
        if not isinstance(file, str) or not _is_relative_path(file):
            raise ValueError(f"{name.repo} has an unsafe file name: {str(file)[:300]!r}. Nothing was downloaded.")
        if not isinstance(size, int) or size < 0:
            raise _invalid_answer(f"the size of {file}", size)
        sizes[file] = size
    return info.sha, sizes


def _is_relative_path(file: str) -> bool:
    """Whether a file of this name stays inside its folder on every file system."""
    parts = PurePosixPath(file).parts
    too_long = any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in parts)
    return bool(parts) and parts[0] != "/" and ".." not in parts and not re.search(r"[\\\0]", file) and not too_long


def _invalid_answer(what: str, answer: object) -> DownloadFailed:
    from huggingface_hub import constants

    return DownloadFailed(
        f"{constants.ENDPOINT} returned an invalid value for {what}: {str(answer)[:100]!r}. Nothing was written. Check "
        "HF_ENDPOINT."
    )


def _check_metadata(name: RepositoryName, file: str) -> None:
    """Raise DownloadFailed if the Hub's ETag or commit of a file is invalid: the client uses both as parts of paths."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        found = get_hf_file_metadata(hf_hub_url(name.repo, file, revision=name.revision))
    except Exception as error:  # the client records a missing file under the commit of the response
        headers = getattr(getattr(error, "response", None), "headers", {})
        if headers.get("X-Repo-Commit", name.revision) != name.revision:
            raise _invalid_answer("the commit", headers["X-Repo-Commit"]) from error
        raise
    if found.commit_hash not in (None, name.revision):
        raise _invalid_answer("the commit", found.commit_hash)
    if found.etag is not None and not _ETAG.fullmatch(found.etag):
        raise _invalid_answer("an ETag", found.etag)


def _check_file(path: Path, size_bytes: int, home: Path) -> None:
    """Raise DownloadFailed if a file is outside of `home`, or has another size than the Hub says."""
    if not path.resolve().is_relative_to(home.resolve()):
        raise _invalid_answer("the place of a file", path.resolve())
    if size_bytes and path.stat().st_size != size_bytes:
        raise DownloadFailed(
            f"{path} has {path.stat().st_size:,} bytes, and the Hub's file has {size_bytes:,}. Delete {path.resolve()} "
            "and repeat the command."
        )


def _select(repo: str, sizes: dict[str, int], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the files to fetch in order: small files, config.json, then weights. Each is complete once the next
    exists."""
    from huggingface_hub.utils import filter_repo_objects

    def matching(allowed: Sequence[str], ignored: Sequence[str] = ()) -> list[str]:
        return sorted(filter_repo_objects(sizes, allow_patterns=list(allowed), ignore_patterns=list(ignored)))

    if not include and WEIGHTS not in exclude and not matching([WEIGHTS], SKIPPED):
        raise ValueError(
            f"{repo} has no safetensors weights, which lean_ft needs (it has {_listed(matching(SKIPPED), 3)}). Choose "
            "another repository of the model, or pass --include PATTERN to download files of any kind."
        )
    selected = matching(include, exclude) if include else matching(["*"], [*SKIPPED, *exclude])
    if not selected:
        raise ValueError(f"no file of {repo} matches these patterns. It has {_listed(sorted(sizes), 12)}.")
    return sorted(selected, key=lambda file: (file.endswith(".safetensors"), file == "config.json"))


def _listed(files: list[str], most: int) -> str:
    return ", ".join(files[:most]) + (" ..." if len(files) > most else "") if files else "no files"


def _check_output_dir(folder: Path) -> Path:
    """Return `folder` unless it has files of another origin, which the client would overwrite."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, which may be new.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ".cache" / "huggingface").is_dir():
        raise ValueError(f"{folder} has files that were not downloaded. Choose a new or empty folder.")
    return folder


def _is_present(name: RepositoryName, file: str, size_bytes: int, folder: Path | None) -> bool:
    """Whether a file of a commit is in `folder`, or by default in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    if folder is not None:
        return (folder / file).is_file() and (folder / file).stat().st_size == size_bytes
    return isinstance(try_to_load_from_cache(name.repo, file, revision=name.revision), str)


def _check_disk(name: RepositoryName, sizes: dict[str, int], folder: Path | None) -> None:
    """Raise DownloadFailed if the disk has no room for the missing files."""
    from huggingface_hub import constants

    needed = sum(size for file, size in sizes.items() if not _is_present(name, file, size, folder))
    target = Path(constants.HF_HUB_CACHE) if folder is None else folder.absolute()
    while not target.exists():
        target = target.parent
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DownloadFailed(
            f"{name.repo} needs {gigabytes(needed)} more disk space, and {target} has {gigabytes(free)} free. Nothing "
            f"was downloaded. {OTHER_DISK}"
        )


def _fetch(name: RepositoryName, sizes: dict[str, int], folder: Path | None) -> Path:
    """Download the files of a commit in order, and return the folder that they are in."""
    from huggingface_hub import hf_hub_download

    in_terminal, snapshot_folder = sys.stderr.isatty(), Path()
    for num_complete, (file, size) in enumerate(sizes.items()):
        if not in_terminal and size >= 10**8:  # in a terminal, the client shows progress bars
            print(f"downloading {file}, {gigabytes(size)}", file=sys.stderr, flush=True)
        try:
            with explained(name.repo, name.revision):
                if folder is not None or not _is_present(name, file, size, folder):  # the client asks the Hub for it
                    _check_metadata(name, file)
                path = Path(hf_hub_download(name.repo, file, revision=name.revision, local_dir=folder))
                snapshot_folder = folder or path.parents[len(PurePosixPath(file).parts) - 1]
                _check_file(path, size, folder or snapshot_folder.parents[1])
        except KeyboardInterrupt as error:
            error.add_note(
                f"{num_complete} of {len(sizes)} files of {name.repo} are complete and kept. The same command resumes "
                f"with {file}."
            )
            raise
    return snapshot_folder


# The layout of the Hub's cache: models--org--name/{refs/main, snapshots/COMMIT/..., blobs/...} --------------------


def find_cached(name: RepositoryName, weights: bool = True) -> Path | None:
    """Return the folder of a snapshot in the Hub's cache, complete with its weights if `weights`; uses no network."""
    from huggingface_hub import try_to_load_from_cache

    file = name.file or "config.json"
    found = try_to_load_from_cache(name.repo, file, revision=name.revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parents[file.count("/")]
    if name.file:
        return folder
    return folder if not weights or _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Whether the weights are there: a single file, or every file that the index names."""
    if (folder / "model.safetensors").is_file():
        return True
    try:
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / file).is_file() for file in files)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def cached_name(folder: Path) -> RepositoryName | None:
    """Return the repository and commit of a snapshot folder in the Hub's cache; None for any other folder."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return RepositoryName(repository.removeprefix("models--").replace("--", "/"), folder.name)


def home_of_links(folder: Path) -> Path:
    """Return where links in a model's folder may lead: the repository's blobs for a snapshot, else the folder
    itself."""
    return folder if cached_name(folder) is None else folder.parent.parent / "blobs"


def _record_revision(name: RepositoryName, commit: str) -> None:
    """Record the commit of a branch or tag in the cache, as the client does, for use without a network.

    This happens after the snapshot is complete; until then, the previous commit stays in use.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if name.names_commit:
        return
    repository = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
    ref = repository / "refs" / (name.revision or "main")
    ref.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(ref) as temporary:
        temporary.write_text(commit, encoding="utf-8")


def gigabytes(num_bytes: int) -> str:
    """Bytes in the Hub's units: `2.47 GB`, `12.3 MB`."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"
