"""Requests to a sampling server. Its replies are a stranger's: their size, time and depth are limited."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPMessage
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from lean_ft.system.foreign_values import JSON, plain, valid_text
from lean_ft.training.bad_steps import TrainingFailed

LONGEST_SECONDS = 3600.0  # for one reply
_CHUNK_BYTES = 2**16
_MAX_REPLY_BYTES = 2**22
_MAX_ERROR_BYTES, _MAX_ERROR_CHARACTERS = 2**16, 500
_STARTING = (502, 503, 504)  # codes of a server that starts, or that a gateway does not reach
API_KEY = "VLLM_API_KEY"  # environment variable, as of the server itself


class ServerError(TrainingFailed):
    """The server did not do what was asked."""


class Unreachable(ServerError):
    """No connection to the server, or a reply that broke off."""


class ServerRefusal(ServerError):
    """The server answered with an error, or with something else than expected."""

    code = 0
    """Of the error, by HTTP."""


class Client:
    """A server at a URL. Requests carry the API key of the environment variable VLLM_API_KEY, if it is set."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that is none of http or https."""
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            is_known, self.host = parts.scheme in ("http", "https"), parts.hostname or ""
            _ = parts.port
        except ValueError:
            is_known, self.host = False, ""
        if not is_known or not self.host:
            raise ValueError(
                f"generation.engine_url={url}: expected a URL of http or https, for example http://127.0.0.1:8000."
            )
        # The server is on this machine or network, so the environment's proxy does not apply.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        return self.host in ("localhost", "127.0.0.1", "::1")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which the server computes nothing. It forgets what it cached."""
        self.ask("pause?mode=wait", {})
        try:
            yield
        finally:
            self.ask("resume", {})

    def ask(
        self, route: str, content: dict[str, JSON] | None = None, *, max_bytes: int = _MAX_REPLY_BYTES
    ) -> dict[str, Any]:
        """Return the JSON object that answers a POST of `content`, or a GET if it is None; an empty one for a reply
        that is no JSON, such as a text that confirms.

        Raises Unreachable if there is no whole reply, and ServerRefusal if the reply is an error, too large or deep.
        """
        body = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        place = f"{self.url}/{route.partition('?')[0]}"
        request = urllib.request.Request(f"{self.url}/{route}", body, headers)
        try:
            with self._opener.open(request, timeout=LONGEST_SECONDS) as reply:
                text = _read(reply, max_bytes, place)
                expected = reply.headers.get("Content-Length", "")
        except urllib.error.HTTPError as error:
            said = valid_text(error.read(_MAX_ERROR_BYTES).decode(errors="replace"))
            text = f"{place} answered {error.code}: {_message_of(said)}."
            if error.code in _STARTING:
                raise Unreachable(text) from None
            refusal = ServerRefusal(text)
            refusal.code = error.code
            raise refusal from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = "it closed the connection" if isinstance(reason, HTTPException) else reason
            raise Unreachable(f"{place} does not answer: {reason}.") from None
        if expected.isdecimal() and len(text) < int(expected):
            raise Unreachable(f"{place} does not answer: its reply has {len(text):,} of {int(expected):,} bytes.")
        return read_object(text, place)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """A redirection is an error."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _read(reply: _Readable, max_bytes: int, place: str) -> bytes:
    """The whole reply."""
    parts, size, deadline = list[bytes](), 0, time.monotonic() + LONGEST_SECONDS
    while part := reply.read(_CHUNK_BYTES):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise ServerRefusal(f"{place} answered more than {max_bytes:,} bytes. Another program answers at this URL.")
        if time.monotonic() > deadline:
            raise Unreachable(f"{place} does not answer: its reply takes more than {LONGEST_SECONDS:.0f} s.")
    return b"".join(parts)


def read_object(text: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        raise ServerRefusal(f"{place} answered JSON that is not an object. Another program answers at this URL.")
    try:
        return plain(found, "the reply", markers=True, repair=True)
    except ValueError as error:
        raise ServerRefusal(f"{place}: {error}.") from None


def _message_of(text: str) -> str:
    """The message of vLLM's error, or the text itself, in one line."""
    try:
        found = json.loads(text)["error"]
        text = found if isinstance(found, str) else str(found["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    text = " ".join(text.split()).rstrip(".")
    if text.startswith("<"):
        return "an HTML page. Another program answers at this URL"
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[:_MAX_ERROR_CHARACTERS]} ..."
