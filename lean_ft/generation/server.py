"""A model behind OpenAI's chat API, for trying a checkpoint with the programs that one has.

POST /v1/chat/completions   an answer, whole or as it grows (server-sent events)
GET  /v1/models             the one model

One answer at a time: a lock keeps the model to itself, and who comes next waits. What a request asks for and is not done here
(tools, penalties, log-probabilities, several answers) is refused with its name. Without a token the server answers this machine
alone, and no page of a browser: a request has to name a loopback address, and say that it is JSON.

Source: https://platform.openai.com/docs/api-reference/chat; top_k and min_p as in vLLM.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from lean_ft.generation.decoding import sample_steps
from lean_ft.generation.texts import asked_of, text_of
from lean_ft.models import Decoder
from lean_ft.system.log import say
from lean_ft.system.spelling import did_you_mean
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.context_length import context_length

MOST_BODY_BYTES = 16 << 20
IDLE_SECONDS = 60  # after which a connection that says nothing is closed
_READ = ("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "seed")
_READ += ("temperature", "top_p", "top_k", "min_p")
# What is not done here -> the values that ask for nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}
_IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")


class _Refused(Exception):
    """What is wrong with a request, as OpenAI's errors tell it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ChatServer(ThreadingHTTPServer):
    """Serves `model` under `name` at `host` and `port` (0: a free one); `serve_forever` answers until it is ended.

    `max_new_tokens` is what an answer may have where a request does not say. With a `token`, requests have to bring it. Raises
    ValueError for a model without a chat template, and for a host that is not loopback without a token.
    """

    daemon_threads = True

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_new_tokens: int = 1024,
        token: str | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(f"{name} has no chat template, so it cannot be asked by messages.")
        if not token and not _is_loopback(host):
            raise ValueError(
                f"host {host} lets others ask this model. Set the variable LEANFT_TOKEN to a token that they have to give "
                "(as OpenAI's clients give their api_key), or leave the host out."
            )
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.max_new_tokens, self.token = max_new_tokens, token or None
        self.started, self.lock = int(time.time()), threading.Lock()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}/v1"


class _Answer:
    """One answer: its text as it grows, and afterwards what it took and why it ended."""

    def __init__(self, server: ChatServer, asked: dict[str, Any]) -> None:
        self._server, self.ids = server, list[int]()
        messages = _messages(asked)
        most = next((asked[n] for n in ("max_completion_tokens", "max_tokens") if asked.get(n) is not None), None)
        stop = asked.get("stop") or []
        settings: dict[str, Any] = {
            "max_new_tokens": server.max_new_tokens if most is None else _number("max_tokens", most, int),
            "stop": [stop] if isinstance(stop, str) else stop,
            "temperature": _number("temperature", 1.0 if asked.get("temperature") is None else asked["temperature"]),
            "seed": secrets.randbits(31) if asked.get("seed") is None else _number("seed", asked["seed"], int),
        }
        for name, kind in (("top_p", float), ("top_k", int), ("min_p", float)):
            if asked.get(name) is not None:
                settings[name] = _number(name, asked[name], kind)
        try:
            self.how, (self.prompt,) = asked_of(server.model, server.tokenizer, [messages], True, settings)
        except (ValueError, TypeError) as error:  # sampling out of range; messages that the template does not take
            raise _Refused(400, str(error)) from None
        context = context_length(server.model.source.config)
        if context is None:
            return
        if len(self.prompt) + (1 if most is None else self.how.max_new_tokens) > context:
            raise _Refused(
                400,
                f"the messages have {len(self.prompt)} tokens{'' if most is None else f', and max_tokens is {most}'}: more "
                f"than the model's context of {context}.",
                "context_length_exceeded",
            )
        self.how = replace(self.how, max_new_tokens=min(self.how.max_new_tokens, context - len(self.prompt)))

    def text(self) -> Iterator[str]:
        server = self._server
        with server.lock:
            steps = sample_steps(server.model, [self.prompt], self.how, server.tokenizer.decode)
            yield from text_of(server.tokenizer, self._noted(token for (token,) in steps), self.how.stop_texts)
        say("answered", f"{len(self.prompt)} tokens of messages by {len(self.ids)}")

    def _noted(self, tokens: Iterator[int | None]) -> Iterator[int | None]:
        for token in tokens:
            self.ids += [] if token is None else [token]
            yield token

    @property
    def finish_reason(self) -> str:
        if len(self.ids) < self.how.max_new_tokens or self.ids[-1] in self.how.stop_ids:
            return "stop"
        text = self._server.tokenizer.decode(self.ids, skip_special_tokens=True)
        return "stop" if any(stop in text for stop in self.how.stop_texts) else "length"

    @property
    def usage(self) -> dict[str, int]:
        asked, told = len(self.prompt), len(self.ids)
        return {"prompt_tokens": asked, "completion_tokens": told, "total_tokens": asked + told}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server: ChatServer  # pyright: ignore[reportIncompatibleVariableOverride]
    _begun = False

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._guarded(self._models)

    def do_POST(self) -> None:
        self._guarded(self._chat)

    def _guarded(self, answer: Any) -> None:
        self._begun = False
        try:
            self._check_caller()
            answer()
        except (BrokenPipeError, ConnectionResetError, TimeoutError):  # the client has enough
            self.close_connection = True
        except _Refused as refused:
            self._refuse(refused)
        except Exception as error:  # the next request may be better: out of memory, logits that are not finite
            say("failed", f"{type(error).__name__}: {error}")
            self._refuse(_Refused(500, f"{type(error).__name__}: {error}"))

    def _check_caller(self) -> None:
        server = self.server
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if server.token is not None and not hmac.compare_digest(given.encode(), server.token.encode()):
            raise _Refused(401, "this server wants a token that the request does not bring.", "invalid_api_key")
        if server.token is None and not _is_loopback(urlsplit(f"//{self.headers.get('Host')}").hostname or ""):
            raise _Refused(403, "without a token this server answers requests to a loopback address alone.")

    def _models(self) -> None:
        card = {"id": self.server.name, "object": "model", "created": self.server.started, "owned_by": "lean_ft"}
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [card]})
        elif self.path == f"/v1/models/{self.server.name}":
            self._send(200, card)
        else:
            raise self._nothing_here()

    def _chat(self) -> None:
        asked = self._body()
        if self.path != "/v1/chat/completions":
            raise self._nothing_here()
        _check_fields(asked)
        if asked.get("model", self.server.name) != self.server.name:
            raise _Refused(
                404, f"there is no model {asked['model']!r} here, but {self.server.name!r}.", "model_not_found"
            )
        answer = _Answer(self.server, asked)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.server.name}
        if asked.get("stream"):
            self._stream(answer, head, bool((asked.get("stream_options") or {}).get("include_usage")))
            return
        message = {"role": "assistant", "content": "".join(answer.text()), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
        self._send(200, {**head, "object": "chat.completion", "choices": [choice], "usage": answer.usage})

    def _stream(self, answer: _Answer, head: dict[str, Any], tells_usage: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")  # its end is the end of the answer
        self.end_headers()
        self._begun = self.close_connection = True

        def event(delta: dict[str, str], finish_reason: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
            self._event({**head, "object": "chat.completion.chunk", "choices": [choice]})

        event({"role": "assistant", "content": ""})
        for text in answer.text():
            event({"content": text})
        event({}, answer.finish_reason)
        if tells_usage:
            self._event({**head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length") or ""
        if not length.isdigit() or int(length) > MOST_BODY_BYTES:
            self.close_connection = True  # what is not read would be taken for the next request
            raise _Refused(413, f"expected a Content-Length of at most {MOST_BODY_BYTES} bytes.")
        body = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "expected Content-Type: application/json.")
        try:
            asked = json.loads(body)
        except ValueError as error:
            raise _Refused(400, f"the body is no JSON: {error}.") from None
        if not isinstance(asked, dict):
            raise _Refused(400, f"expected a JSON object, came {type(asked).__name__}.")
        return asked

    def _nothing_here(self) -> _Refused:
        return _Refused(
            404, f"there is no {self.command} {self.path[:100]} here, but POST /v1/chat/completions and GET /v1/models."
        )

    def _event(self, value: Mapping[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _refuse(self, refused: _Refused) -> None:
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        error = {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}
        try:
            self._event(error) if self._begun else self._send(refused.status, error)
        except OSError:
            self.close_connection = True

    def _send(self, status: int, value: Mapping[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _check_fields(asked: dict[str, Any]) -> None:
    for name, value in asked.items():
        if name in _NOT_DONE and value is not None and value not in _NOT_DONE[name]:
            raise _Refused(400, f"{name} is not done by this server. Leave it out.", "unsupported_parameter")
        if name not in (*_NOT_DONE, *_READ, *_IGNORED):
            raise _Refused(400, f"{name} is not known here.{did_you_mean(name, _READ)}", "unknown_parameter")


def _messages(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages with their contents as text, of which clients send parts too."""
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise _Refused(400, 'expected messages, a list of {"role": ..., "content": ...}.')
    read = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise _Refused(
                    400, "a message's content has a part that is no text, and this model reads nothing else."
                )
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise _Refused(400, f"a message's content is {content!r:.80}; expected text.")
        read.append({**message, "content": content})
    return read


def _number(name: str, value: Any, kind: type = float) -> Any:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise _Refused(400, f"{name} is {value!r:.40}; expected a {'whole ' if kind is int else ''}number.")
    if name == "max_tokens" and value < 1:
        raise _Refused(400, f"max_tokens is {value}; expected 1 or more.")
    return kind(value)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
