"""Models from the Hugging Face hub: a repository's name becomes a folder in the hub's own cache, at a known commit.

Everything goes through huggingface-hub: its cache, its token, its progress bars. What is added here: only what a
finetune reads is fetched (pickled weights and other frameworks' copies of them are passed over), and every way to fail
has one message that says what to do. Files come one at a time, weights last: a large one is transferred in parallel
pieces anyway where hf-xet is installed, Ctrl-C answers at once and costs at most the file under way, and a snapshot
that holds its weights is whole.

The token is the one that huggingface-hub finds (HF_TOKEN, or what `hf auth login` stored). It is never read here.
"""

import contextlib
import errno
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

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
_HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # which one huggingface-hub uses is its affair
_log = logging.getLogger(__name__)


class RepositoryName(NamedTuple):
    """`org/name`, or `org/name@revision` for a branch, tag or commit."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    def at(self, commit: str) -> "RepositoryName":
        return RepositoryName(self.repo, commit)

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


class RepositoryNotFound(ValueError):
    """The hub has no repository of this name that the token may see."""


class DownloadFailed(RuntimeError):
    """The hub, the network or the disk failed; the message says what to do."""


class HubUnreachable(DownloadFailed):
    """There is no way to the hub from here, or it is switched off."""


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
    selected = _select(name, sizes, include, exclude)
    folder = None if output_dir is None else _check_output_dir(Path(output_dir).expanduser())
    _check_disk(name, commit, {file: sizes[file] for file in selected}, folder)
    place = _fetch(name, commit, {file: sizes[file] for file in selected}, folder)
    if folder is None:
        _record_revision(name, commit)
    return Snapshot(place, commit, len(selected), sum(sizes[file] for file in selected))


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
            _log.warning(_FROM_CACHE, name, cached.name)
        return cached


_FROM_CACHE = "%s: no way to the Hugging Face hub, so it is the copy in the cache, commit %s."


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


# What is fetched -------------------------------------------------------------------------------------------------


def _list_files(name: RepositoryName) -> tuple[str, dict[str, int]]:
    """The commit that `name` stands for, and its files with their sizes in bytes."""
    from huggingface_hub import HfApi

    with _explained(name):
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
    assert info.sha is not None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    for file in sizes:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
            raise ValueError(f"{name.repo} lists a file {file!r}, which leads out of its folder. Nothing was fetched.")
    return info.sha, sizes


def _select(name: RepositoryName, sizes: dict[str, int], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The files to fetch: small ones, then config.json, then weights, so that what comes later vouches for the rest."""
    left_out = exclude if include else (*SKIPPED, *exclude)
    wanted = [f for f in sizes if (not include or _matches(f, include)) and not _matches(f, left_out)]
    has_weights = any(_matches(f, (WEIGHTS,)) and not _matches(f, SKIPPED) for f in sizes)
    if not include and not has_weights and WEIGHTS not in exclude:
        others = sorted(f for f in sizes if _matches(f, SKIPPED))
        found = f"It has {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}. " if others else ""
        raise ValueError(
            f"{name.repo} has no safetensors weights, and lean_ft reads no others. {found}"
            "Look for another repository of the model; --include PATTERN fetches files of any kind."
        )
    if not wanted:
        raise ValueError(
            f"no file of {name.repo} is left to fetch with these patterns. It has: {', '.join(sorted(sizes)[:12])}"
            f"{' ...' if len(sizes) > 12 else ''}"
        )
    return sorted(wanted, key=lambda f: (_matches(f, (WEIGHTS,)), f == "config.json", f))


def _matches(file: str, patterns: Sequence[str]) -> bool:
    """Whether a file matches a pattern; `*` crosses folders, and a folder stands for all that is in it."""
    return any(fnmatchcase(file, pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)


def _check_output_dir(folder: Path) -> Path:
    """The folder to fetch into, unless it holds something else: the hub's client overwrites files of the same name."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, which need not exist yet.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ".cache" / "huggingface").is_dir():
        raise ValueError(f"{folder} holds files that no download put there; give a new or empty folder.")
    return folder


def _check_disk(name: RepositoryName, commit: str, sizes: dict[str, int], folder: Path | None) -> None:
    """Refuses a download that the disk has no room for."""
    from huggingface_hub import constants, try_to_load_from_cache

    def is_there(file: str) -> bool:
        if folder is not None:
            return (folder / file).is_file() and (folder / file).stat().st_size == sizes[file]
        return isinstance(try_to_load_from_cache(name.repo, file, revision=commit), str)

    needed = sum(size for file, size in sizes.items() if not is_there(file))
    place = Path(constants.HF_HUB_CACHE) if folder is None else folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DownloadFailed(
            f"{name.repo} needs {gigabytes(needed)} more, and the disk of {place} has {gigabytes(free)} free. "
            f"Nothing was fetched. {_OTHER_DISK}"
        )


_OTHER_DISK = "Free some space, or choose another disk: --output-dir, or the variable HF_HOME for the hub's cache."


def _fetch(name: RepositoryName, commit: str, sizes: dict[str, int], folder: Path | None) -> Path:
    """Fetches files in order, and returns the folder that they are in."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # Bars are for a terminal; elsewhere a line tells of each file that takes a while.
    in_terminal = sys.stderr.isatty()
    quiet = not in_terminal and not are_progress_bars_disabled()
    file, place, done = "", folder, 0
    if quiet:
        disable_progress_bars()
    try:
        with _explained(name):
            for file, size in sizes.items():
                if not in_terminal and size >= 10**8:
                    print(f"fetching {file}, {gigabytes(size)}", file=sys.stderr, flush=True)
                path = Path(hf_hub_download(name.repo, file, revision=commit, local_dir=folder))
                if folder is None:
                    place = path.parents[len(PurePosixPath(file).parts) - 1]
                done += 1
    except KeyboardInterrupt as error:
        error.add_note(
            f"{done} of {len(sizes)} files of {name.repo} are complete and stay where they are; the same command goes "
            f"on with {file}."
        )
        raise
    finally:
        if quiet:
            enable_progress_bars()
    assert place is not None
    return place


def _record_revision(name: RepositoryName, commit: str) -> None:
    """Notes in the cache, as the hub's client does, which commit a branch or tag is at: it serves without a network.

    Only now that the snapshot is whole: until then the one before it serves.
    """
    from huggingface_hub import constants

    if name.names_commit:
        return
    ref = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}" / "refs" / (name.revision or "main")
    ref.parent.mkdir(parents=True, exist_ok=True)
    temporary = ref.with_name(ref.name + ".tmp")
    temporary.write_text(commit, encoding="utf-8")
    temporary.replace(ref)


# What went wrong -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(name: RepositoryName) -> Iterator[None]:
    """Says in one message what an error of the hub's client means and what to do; its own warnings are left out."""
    client_log = logging.getLogger("huggingface_hub")
    level = client_log.level
    client_log.setLevel(logging.ERROR)  # they quote addresses that are signed, which is as good as a key
    try:
        yield
    except Exception as error:
        raise _explanation(error, name) from error
    finally:
        client_log.setLevel(level)


def _explanation(error: Exception, name: RepositoryName) -> Exception:
    from huggingface_hub import constants, errors, get_token

    chain = _causes(error)
    page = f"{constants.ENDPOINT}/{name.repo}"
    login = "`hf auth login`, or the variable HF_TOKEN"
    status = next((_status(cause) for cause in chain if _status(cause)), None)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    if caused_by(errors.GatedRepoError):
        if get_token() is None:
            then = f"then give a token of that account: {login}."
        else:
            then = (
                "with the account of your token. If you have: the owner may not have answered yet, and a fine-grained "
                "token needs the permission to read gated repositories."
            )
        return ValueError(f"{name.repo} is gated (error {status}): accept its licence at {page}, {then}")
    if caused_by(errors.RevisionNotFoundError):
        return ValueError(
            f"{name.repo} has no revision {name.revision!r} (error 404); expected one of its branches, tags or full "
            f"commit hashes: {page}/commits/main"
        )
    if caused_by(errors.RepositoryNotFoundError):
        whose = "of an account that may read it" if get_token() is not None else f"that may read it: {login}"
        return RepositoryNotFound(
            f"the Hugging Face hub knows no repository {name.repo!r}, or does not show it (error {status}). Check the "
            f"spelling at {constants.ENDPOINT}/models?search={name.repo.partition('/')[2]}; a private one needs a "
            f"token {whose}."
        )
    if status == 401:
        return ValueError(
            "the Hugging Face hub does not accept your token (error 401): it is mistyped, expired or revoked. Give "
            f"another ({login}); {constants.ENDPOINT}/settings/tokens makes one."
        )
    if status == 403:
        return ValueError(f"your token may not read {name.repo} (error 403). Give one that may: {login}.")
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in chain):
        return DownloadFailed(
            f"the disk is full. The files of {name.repo} that are complete stay, and the same command goes on from "
            f"there. {_OTHER_DISK}"
        )
    if caused_by(errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return HubUnreachable(
            f"HF_HUB_OFFLINE is set, so {name} is not fetched; a run takes what is whole in the cache, "
            f"{constants.HF_HUB_CACHE}. Unset it to download."
        )
    if status is not None:
        return DownloadFailed(
            f"the Hugging Face hub answered with error {status} for {name.repo}. Give the same command again later: "
            "what is complete is kept."
        )
    if caused_by(ConnectionError, TimeoutError) or any(_is_http(cause) for cause in chain):
        return HubUnreachable(
            f"the connection to the Hugging Face hub at {constants.ENDPOINT} failed ({type(error).__name__}). Check the "
            "network and the proxy, then give the same command again: what is complete is kept."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return error  # a file of the cache or the folder that cannot be written: it names itself
    return DownloadFailed(f"{name.repo} could not be fetched: {type(error).__name__}. Give the same command again.")


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error, and those that it came from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _status(error: Any) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_http(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _HTTP_CLIENTS


def gigabytes(num_bytes: int) -> str:
    """Bytes as the hub counts them: `2.47 GB`, `12.3 MB`."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"
