"""Explain errors of the Hugging Face Hub's client, each in one message that says what to do."""

import contextlib
import errno
import logging
from collections.abc import Iterator

from lean_ft.system.whole_files import why_unusable

_HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # huggingface_hub may use any of them
OTHER_DISK = "Free some space, or choose another disk: --output-dir, or HF_HOME for the Hub's cache."


class RepositoryNotFound(ValueError):
    """The Hub has no repository of this name that the token may read."""


class DownloadFailed(RuntimeError):
    """The Hub, the network or the disk failed."""


class HubUnreachable(DownloadFailed):
    """The Hub cannot be reached from here, or HF_HUB_OFFLINE is set."""


@contextlib.contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Explain errors of requests about `repo` inside the block, and mute the client's own warnings."""
    client_log = logging.getLogger("huggingface_hub")
    level = client_log.level
    client_log.setLevel(logging.ERROR)  # warnings quote signed addresses, which give access like a token
    try:
        yield
    except DownloadFailed:
        raise
    except Exception as error:
        raise _explanation(error, repo, revision) from error
    finally:
        client_log.setLevel(level)


def _explanation(error: Exception, repo: str, revision: str | None) -> Exception:
    from huggingface_hub import constants, errors, get_token

    chain = _causes(error)
    hub, login = constants.ENDPOINT, "`hf auth login`, or the variable HF_TOKEN"
    statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in chain]
    status = next(filter(None, statuses), None)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    if caused_by(errors.GatedRepoError):
        if get_token() is None:
            then = f"then give a token of that account: {login}."
        else:
            then = (
                "with the account of your token. If you have done so, the owner may not have approved you yet, or a "
                "fine-grained token lacks the permission to read gated repositories."
            )
        return ValueError(f"{repo} is gated (error {status}): accept its license at {hub}/{repo}, {then}")
    if caused_by(errors.RevisionNotFoundError):
        return ValueError(
            f"{repo} has no revision {revision!r} (error 404); expected a branch, tag or full commit hash: "
            f"{hub}/{repo}/commits/main"
        )
    if caused_by(errors.RepositoryNotFoundError):
        token = "a token of an account that may read it" if get_token() is not None else f"a token: {login}"
        return RepositoryNotFound(
            f"the Hugging Face Hub has no repository {repo!r} that you may read (error {status}). Check the spelling "
            f"at {hub}/models?search={repo.partition('/')[2]}; a private repository needs {token}."
        )
    if status == 401:
        return ValueError(
            "the Hugging Face Hub rejects your token (error 401): it is mistyped, expired or revoked. Create a token "
            f"at {hub}/settings/tokens and set it: {login}."
        )
    if status == 403:
        return ValueError(f"your token may not read {repo} (error 403). Use a token that may: {login}.")
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in chain):
        return DownloadFailed(f"the disk is full. Complete files of {repo} are kept; repeat the command. {OTHER_DISK}")
    if caused_by(errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        name = repo if revision is None else f"{repo}@{revision}"
        return HubUnreachable(
            f"HF_HUB_OFFLINE is set, so {name} is not downloaded. Unset it to download. Offline runs use complete "
            f"models in {constants.HF_HUB_CACHE}."
        )
    if status is not None:
        return DownloadFailed(
            f"the Hugging Face Hub answered with error {status} for {repo}. Repeat the command later: complete files "
            "are kept."
        )
    if caused_by(ConnectionError, TimeoutError) or any(type(e).__module__.startswith(_HTTP_CLIENTS) for e in chain):
        return HubUnreachable(
            f"the connection to the Hugging Face Hub at {hub} failed. Check the network and the "
            "proxy, then repeat the command: complete files are kept."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return error  # a file that cannot be written; its message names the file
    return DownloadFailed(f"{repo} could not be downloaded: {why_unusable(error)}. Repeat the command.")


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return the error and the errors that caused it."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
