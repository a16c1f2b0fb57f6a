"""What an error of the Hugging Face hub's client means, in one message that says what to do."""

import contextlib
import errno
import logging
from collections.abc import Iterator

_HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # which one huggingface-hub uses is its affair
OTHER_DISK = "Free some space, or choose another disk: --output-dir, or the variable HF_HOME for the hub's cache."


class RepositoryNotFound(ValueError):
    """The hub has no repository of this name that the token may see."""


class DownloadFailed(RuntimeError):
    """The hub, the network or the disk failed; the message says what to do."""


class HubUnreachable(DownloadFailed):
    """There is no way to the hub from here, or it is switched off."""


@contextlib.contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Explains what goes wrong while the block asks the hub for `repo`; the client's own warnings are left out."""
    client_log = logging.getLogger("huggingface_hub")
    level = client_log.level
    client_log.setLevel(logging.ERROR)  # they quote addresses that are signed, which is as good as a key
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
    hub = constants.ENDPOINT
    login = "`hf auth login`, or the variable HF_TOKEN"
    statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in chain]
    status = next(filter(None, statuses), None)

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
        return ValueError(f"{repo} is gated (error {status}): accept its licence at {hub}/{repo}, {then}")
    if caused_by(errors.RevisionNotFoundError):
        return ValueError(
            f"{repo} has no revision {revision!r} (error 404); expected one of its branches, tags or full commit "
            f"hashes: {hub}/{repo}/commits/main"
        )
    if caused_by(errors.RepositoryNotFoundError):
        whose = "of an account that may read it" if get_token() is not None else f"that may read it: {login}"
        return RepositoryNotFound(
            f"the Hugging Face hub knows no repository {repo!r}, or does not show it (error {status}). Check the "
            f"spelling at {hub}/models?search={repo.partition('/')[2]}; a private one needs a token {whose}."
        )
    if status == 401:
        return ValueError(
            "the Hugging Face hub does not accept your token (error 401): it is mistyped, expired or revoked. Give "
            f"another ({login}); {hub}/settings/tokens makes one."
        )
    if status == 403:
        return ValueError(f"your token may not read {repo} (error 403). Give one that may: {login}.")
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in chain):
        return DownloadFailed(
            f"the disk is full. The files of {repo} that are complete stay, and the same command goes on from there. "
            f"{OTHER_DISK}"
        )
    if caused_by(errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return HubUnreachable(
            f"HF_HUB_OFFLINE is set, so {repo if revision is None else f'{repo}@{revision}'} is not fetched; a run takes "
            f"what is whole in the cache, {constants.HF_HUB_CACHE}. Unset it to download."
        )
    if status is not None:
        return DownloadFailed(
            f"the Hugging Face hub answered with error {status} for {repo}. Give the same command again later: what is "
            "complete is kept."
        )
    if caused_by(ConnectionError, TimeoutError) or any(type(e).__module__.startswith(_HTTP_CLIENTS) for e in chain):
        return HubUnreachable(
            f"the connection to the Hugging Face hub at {hub} failed ({type(error).__name__}). Check the network and "
            "the proxy, then give the same command again: what is complete is kept."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return error  # a file of the cache or the folder that cannot be written: it names itself
    return DownloadFailed(f"{repo} could not be fetched: {type(error).__name__}. Give the same command again.")


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error, and those that it came from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
