"""Models from the Hugging Face hub: a repository's name becomes a folder in the hub's own cache, at a known commit.

Everything goes through huggingface-hub: its cache, its token (which is never read here), its progress bars. What is added
here: only what a finetune reads is fetched (pickled weights and other frameworks' copies of them are passed over), and
every way to fail has one message that says what to do (`lean_ft.hub.errors`). Files come one at a time, weights last: a
large one is transferred in parallel pieces anyway where hf-xet is installed, Ctrl-C answers at once and costs at most the
file under way, and a snapshot that holds its weights is whole. `snapshot_download` does neither: it waits for the files
under way before it lets Ctrl-C through, and a branch is its new commit from the start.
"""

import contextlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lean_ft.hub.errors import OTHER_DISK, DownloadFailed, HubUnreachable, explained
from lean_ft.system.whole_files import write_whole

# huggingface_hub is imported where it is used: `leanft --help` must not wait for it.

# What a finetune does not read: pickled weights, and the same weights once more for other programs.
SKIPPED = (
    *("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.h5", "*.msgpack", "*.ot", "*.npz", "*.tflite"),
    *("*.gguf", "*.onnx", "*.onnx_data", "onnx/*", "openvino/*", "coreml/*", "metal/*"),
    *("original/*", "consolidated*.safetensors"),
)
WEIGHTS = "*.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
TIMEOUT_SECONDS = 30.0  # for the hub to list a repository

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w.][\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"(?!\.)[\w.+=:-]{1,200}", re.ASCII)
MAX_NAME_BYTES = 255  # of a file, on almost every disk
_log = logging.getLogger(__name__)


class RepositoryName(NamedTuple):
    """`org/name`, or `org/name@revision` for a branch, tag or commit."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def names_commit(self) -> bool:
        """Whether the revision is a full commit hash, which never means anything else later."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True)
class Snapshot:
    """A repository's files as they are at one commit, on the disk."""

    folder: Path
    commit: str
    num_files: int
    size_bytes: int


def parse_name(text: str) -> RepositoryName | None:
    """`org/name` or `org/name@revision`; None for what cannot be a repository's name."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return RepositoryName(match[1], match[2])


def download(
    repo: str,
    revision: str | None = None,
    output_dir: str | Path | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Snapshot:
    """Fetches a model's files into the hub's cache, or into `output_dir`, and returns where they are.

    `include` takes only the files that match one of its patterns (`*.md`, `original/*`), `exclude` leaves out those
    that match; without `include`, what lean_ft does not read (SKIPPED) is left out. Files that are there are kept.
    Raises ValueError for what the user can put right (the name, the revision, the licence, the token, a pattern),
    DownloadFailed where the network, the hub or the disk fails.
    """
    name = parse_name(repo if revision is None else f"{repo}@{revision}")
    if name is None:
        asked = repo if revision is None else f"{repo} at revision {revision}"
        raise ValueError(f"{asked!r} is no repository of the Hugging Face hub; expected org/name.")
    commit, sizes = _list_files(name)
    wanted = {file: sizes[file] for file in _select(name.repo, sizes, include, exclude)}
    folder = None if output_dir is None else _check_output_dir(Path(output_dir).expanduser())
    at_commit = RepositoryName(name.repo, commit)
    _check_disk(at_commit, wanted, folder)
    place = _fetch(at_commit, wanted, folder)
    if folder is None:
        _record_revision(name, commit)
    return Snapshot(place, commit, len(wanted), sum(wanted.values()))


def model_folder(name: RepositoryName, weights: bool = True) -> Path:
    """The folder of a model's snapshot in the hub's cache, fetched where it is not there yet.

    A commit that is cached whole needs no network. A branch or tag is looked up, and where the hub cannot be reached
    its newest whole copy in the cache serves, which is logged. Without `weights`, safetensors files are not needed and
    not fetched. Raises as `download` does.
    """
    cached = find_cached(name, weights)
    if name.names_commit and cached is not None and any((cached / file).is_file() for file in TOKENIZER_FILES):
        return cached
    try:
        return download(*name, exclude=() if weights else (WEIGHTS,)).folder
    except HubUnreachable:
        if cached is None:
            raise
        if not name.names_commit:
            _log.warning(
                "%s: no way to the Hugging Face hub, so it is the copy in the cache, commit %s.", name, cached.name
            )
        return cached


# What is fetched -------------------------------------------------------------------------------------------------


def _list_files(name: RepositoryName) -> tuple[str, dict[str, int]]:
    """The commit that `name` stands for, and its files with their sizes in bytes."""
    from huggingface_hub import HfApi

    with explained(name.repo, name.revision):
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise DownloadFailed(_not_a_hub(f"the commit of {name.repo}", info.sha))
    sizes: dict[str, int] = {}
    for sibling in info.siblings or ():
        file, size = sibling.rfilename, sibling.size or 0
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if not parts or parts[0] == "/" or ".." in parts or "\\" in file or not _is_file_name(parts):
            raise ValueError(
                f"{name.repo} lists a file {str(file)[:300]!r}, which leads out of its folder. Nothing was fetched."
            )
        if not isinstance(size, int) or size < 0:
            raise DownloadFailed(_not_a_hub(f"the size of {file}", size))
        sizes[file] = size
    return info.sha, sizes


def _is_file_name(parts: Sequence[str]) -> bool:
    return all("\0" not in part and len(part.encode(errors="replace")) <= MAX_NAME_BYTES for part in parts)


def _not_a_hub(what: str, found: Any) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT} answered with {str(found)[:100]!r} as {what}, as no hub does. Nothing was written; check HF_ENDPOINT."


@contextlib.contextmanager
def _checked_answers(commit: str | None) -> Iterator[None]:
    """Inside, refuse an ETag or a commit in the hub's headers that is not one: the hub's client makes paths of them."""
    from huggingface_hub import file_download

    ask = file_download.get_hf_file_metadata

    def ask_and_check(*arguments: Any, **named: Any) -> Any:
        try:
            found = ask(*arguments, **named)
        except Exception as error:  # of a missing file the client keeps a note under the commit
            headers = getattr(getattr(error, "response", None), "headers", {})
            if headers.get("X-Repo-Commit", commit) != commit:
                raise DownloadFailed(_not_a_hub("a commit", headers["X-Repo-Commit"])) from error
            raise
        if found.commit_hash not in (None, commit):
            raise DownloadFailed(_not_a_hub("a commit", found.commit_hash))
        if found.etag is not None and not _ETAG.fullmatch(found.etag):
            raise DownloadFailed(_not_a_hub("an ETag", found.etag))
        return found

    file_download.get_hf_file_metadata = ask_and_check
    try:
        yield
    finally:
        file_download.get_hf_file_metadata = ask


def _select(repo: str, sizes: dict[str, int], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The files to fetch: small ones, then config.json, then weights, so that what comes later vouches for the rest."""
    from huggingface_hub.utils import filter_repo_objects

    def matching(allowed: Sequence[str], ignored: Sequence[str] = ()) -> list[str]:
        return sorted(filter_repo_objects(sizes, allow_patterns=list(allowed), ignore_patterns=list(ignored)))

    if not include and WEIGHTS not in exclude and not matching([WEIGHTS], SKIPPED):
        others = matching(SKIPPED)
        found = f"It has {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}. " if others else ""
        raise ValueError(
            f"{repo} has no safetensors weights, and lean_ft reads no others. {found}"
            "Look for another repository of the model; --include PATTERN fetches files of any kind."
        )
    wanted = matching(include, exclude) if include else matching(["*"], [*SKIPPED, *exclude])
    if not wanted:
        raise ValueError(
            f"no file of {repo} is left to fetch with these patterns. It has: {', '.join(sorted(sizes)[:12])}"
            f"{' ...' if len(sizes) > 12 else ''}"
        )
    return sorted(wanted, key=lambda file: (file.endswith(".safetensors"), file == "config.json"))


def _check_output_dir(folder: Path) -> Path:
    """The folder to fetch into, unless it holds something else: the hub's client overwrites files of the same name."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, which need not exist yet.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ".cache" / "huggingface").is_dir():
        raise ValueError(f"{folder} holds files that no download put there; give a new or empty folder.")
    return folder


def _check_disk(name: RepositoryName, sizes: dict[str, int], folder: Path | None) -> None:
    """Refuses to fetch the files of a commit where the disk has no room for them."""
    from huggingface_hub import constants, try_to_load_from_cache

    def is_there(file: str) -> bool:
        if folder is not None:
            return (folder / file).is_file() and (folder / file).stat().st_size == sizes[file]
        return isinstance(try_to_load_from_cache(name.repo, file, revision=name.revision), str)

    needed = sum(size for file, size in sizes.items() if not is_there(file))
    place = Path(constants.HF_HUB_CACHE) if folder is None else folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DownloadFailed(
            f"{name.repo} needs {gigabytes(needed)} more, and the disk of {place} has {gigabytes(free)} free. "
            f"Nothing was fetched. {OTHER_DISK}"
        )


def _fetch(name: RepositoryName, sizes: dict[str, int], folder: Path | None) -> Path:
    """Fetches the files of a commit in order, and returns the folder that they are in."""
    from huggingface_hub import hf_hub_download

    in_terminal, place = sys.stderr.isatty(), Path()
    for done, (file, size) in enumerate(sizes.items()):
        if not in_terminal and size >= 10**8:  # a terminal has the client's bars
            print(f"fetching {file}, {gigabytes(size)}", file=sys.stderr, flush=True)
        try:
            with explained(name.repo, name.revision), _checked_answers(name.revision):
                path = Path(hf_hub_download(name.repo, file, revision=name.revision, local_dir=folder))
        except KeyboardInterrupt as error:
            error.add_note(
                f"{done} of {len(sizes)} files of {name.repo} are complete and stay where they are; the same command "
                f"goes on with {file}."
            )
            raise
        place = folder or path.parents[len(PurePosixPath(file).parts) - 1]
    return place


# The layout of the hub's cache: models--org--name/{refs/main, snapshots/COMMIT/..., blobs/...} --------------------


def find_cached(name: RepositoryName, weights: bool = True) -> Path | None:
    """The folder of a snapshot that is in the hub's cache, with its weights where they are wanted; no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if not weights or _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Whether the weights are there: one file, or each that the index names."""
    if (folder / "model.safetensors").is_file():
        return True
    try:
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / file).is_file() for file in files)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def cached_name(folder: Path) -> RepositoryName | None:
    """The repository and commit that a folder is a snapshot of, in a cache of the hub's client; None for any other."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return RepositoryName(repository.removeprefix("models--").replace("--", "/"), folder.name)


def home_of_links(folder: Path) -> Path:
    """Where links in a model's folder may lead: of a snapshot in the hub's cache to the blobs of its repository."""
    return folder if cached_name(folder) is None else folder.parent.parent / "blobs"


def _record_revision(name: RepositoryName, commit: str) -> None:
    """Notes in the cache, as the hub's client does, which commit a branch or tag is at: it serves without a network.

    Only now that the snapshot is whole: until then the one before it serves.
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
    """Bytes as the hub counts them: `2.47 GB`, `12.3 MB`."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"
