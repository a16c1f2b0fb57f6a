"""Serves a model by OpenAI's chat API, to try a checkpoint with existing clients.

POST /v1/chat/completions   a completion, whole or streamed (server-sent events)
GET  /v1/models             the model

One thread computes up to `MOST_AT_ONCE` completions in turns. A turn is one token or one part of a prompt. A long
prompt therefore delays others by one part, and a completion ends at its next turn after its client disconnects.
Clients that do not send their request in time are disconnected; until then they delay nobody.
Unsupported requests get an error that names the field (`lean_ft.generation.requests`). Without a token, the server only
accepts requests to a loopback address with a JSON content type, so that no web page can call it.
A content part has its data in the request: the server fetches no URL and reads no file.
"""

import asyncio
import contextlib
import hmac
import json
import queue
import re
import secrets
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Protocol, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lean_ft.data.columns import Document
from lean_ft.generation.calling import CallingTurn
from lean_ft.generation.choosing import Sampling
from lean_ft.generation.connections import Connection
from lean_ft.generation.content_parts import most_body_bytes
from lean_ft.generation.decoding import sample_steps
from lean_ft.generation.requests import ChatRequest, Refused
from lean_ft.generation.texts import PromptTooLong, asked_of
from lean_ft.models import Decoder
from lean_ft.system.log import say
from lean_ft.system.redaction import redact
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.loading import context_length

MOST_AT_ONCE = 4  # completions that are computed in turns
MOST_WAITING = 64  # requests, including those
PROMPT_PART = 256  # prompt tokens per turn
BODY_SECONDS = 30  # time to send a request's body
CHARACTERS_A_TOKEN = 32  # longer texts, in multiples of the context, are refused before they are tokenized

_End = Exception | None  # the error that ended a completion, if any


class TakesTurns(Protocol):
    """Something that the computing thread computes in parts, so that others wait for one part at most."""

    def take_turn(self) -> bool:
        """Compute a part; return whether there is more to compute."""
        ...


class APIServer:
    """Serves a model as `name` at `host` and `port` (0: a free port); `serve_forever` runs until `shutdown` or Ctrl-C.

    A subclass adds the routes of one kind of model. With a `token`, requests must send it. Raises ValueError for a host
    other than loopback without a token, and for an address that cannot be used.
    """

    known = "GET /v1/models"
    """The routes, for errors."""

    def __init__(self, name: str, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if not token and not _is_loopback(host):
            raise ValueError(
                f"--host {host} accepts requests from other machines. Set the environment variable LEANFT_TOKEN, which "
                "clients send as their API key, or remove --host."
            )
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port.") from None
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.address[1]}/v1"
        self.name, self.token = name, token or None
        self._started = int(time.time())
        self._turns = _Turns()
        models = [Route(path, self._guarded(self._models)) for path in ("/v1/models", "/v1/models/{name:path}")]
        added = [Route(path, self._guarded(answer), methods=["POST"]) for path, answer in self.endpoints().items()]
        app = Starlette(routes=models + added, exception_handlers={HTTPException: self._nothing_here})
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)

    def endpoints(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """The functions that answer POST requests, by path. They may raise `Refused`."""
        return {}

    def serve_forever(self) -> None:
        """Serve until `shutdown`. Raises KeyboardInterrupt on Ctrl-C."""
        self._turns.start()
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._turns.stop()

    def shutdown(self) -> None:
        """End `serve_forever`, from another thread."""
        self._uvicorn.should_exit = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        if not self._uvicorn.started:  # otherwise uvicorn closes it
            self._socket.close()

    def _guarded(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """An endpoint that checks its caller and returns errors in OpenAI's format."""

        async def answer(request: Request) -> Response:
            try:
                self._check_caller(request)
                return await endpoint(request)
            except Refused as refused:
                return _refusal(request, refused)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # such as out of memory: later requests can still work
                return _refusal(request, _failure(error))

        return answer

    def _check_caller(self, request: Request) -> None:
        token = re.sub("^bearer +", "", request.headers.get("Authorization", ""), flags=re.IGNORECASE)
        if self.token is not None and not hmac.compare_digest(token.encode(), self.token.encode()):
            raise Refused(401, "the API key is missing or wrong.", "invalid_api_key")
        if self.token is None and not _is_loopback(_host_of(request)):
            raise Refused(403, "a server without a token only accepts requests to a loopback address.")

    async def _models(self, request: Request) -> Response:
        card = {"id": self.name, "object": "model", "created": self._started, "owned_by": "lean_ft"}
        wanted = request.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": [card]})
        if wanted != self.name:
            raise self._no_model(wanted)
        return JSONResponse(card)

    async def body_of(self, request: Request, most_bytes: int) -> bytes:
        """Return a request's JSON, not yet parsed. Raises Refused for another content type, for a body that is too
        long, and for one that does not arrive in time."""
        if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "expected Content-Type: application/json.")
        try:
            return await asyncio.wait_for(_body(request, most_bytes), BODY_SECONDS)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_SECONDS} s.") from None

    def check_model(self, wanted: str | None) -> None:
        """Raise Refused for a request to another model."""
        if wanted not in (None, self.name):
            raise self._no_model(str(wanted))

    def add(self, turn: TakesTurns) -> None:
        """Let the computing thread compute a request in turns with others. Raises Refused if too many wait."""
        self._turns.add(turn)

    async def _nothing_here(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        unknown = f"unknown: {request.method} {request.url.path[:100]}. Use {self.known}."
        return _refusal(request, Refused(status, unknown))

    def _no_model(self, wanted: str) -> Refused:
        return Refused(
            404, f"no such model: {wanted!r:.100}. This server has {self.name!r}.", "model_not_found", "model"
        )


class ChatServer(APIServer):
    """Serves a language model by the chat API. `max_new_tokens` applies to requests without a length.

    Raises ValueError as `APIServer` does, and for a model without a chat template.
    """

    known = "POST /v1/chat/completions and GET /v1/models"

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
            raise ValueError(f"{name} has no chat template. Serve a model that has one.")
        super().__init__(name, host=host, port=port, token=token)
        self.model, self.tokenizer, self.max_new_tokens = model, tokenizer, max_new_tokens
        self._most_body_bytes = most_body_bytes(tokenizer)
        self._decodes = threading.Lock()

    def endpoints(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {"/v1/chat/completions": self._chat}

    async def _chat(self, request: Request) -> Response:
        chat = ChatRequest.read(await self.body_of(request, self._most_body_bytes))
        self.check_model(chat.model)
        prompt, how, turn = await asyncio.to_thread(self._prompt_of, chat)
        answer = _Answer(self.model, self.tokenizer, prompt, how, turn)
        self.add(answer)
        watch = asyncio.create_task(answer.end_without(request))
        pieces = self._logged(request, answer, watch)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}
        if not chat.stream:
            text = "".join([piece async for piece in pieces])
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls := answer.turn.tool_calls:
                message |= {"content": text or None, "tool_calls": calls}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
            body = {**head, "object": "chat.completion", "choices": [choice], "usage": answer.usage}
            return JSONResponse(body)
        with_usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
        events = _events(request, answer, pieces, {**head, "object": "chat.completion.chunk"}, with_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _logged(self, request: Request, answer: "_Answer", watch: asyncio.Task[None]) -> AsyncIterator[str]:
        """The pieces of a completion; logs its outcome."""
        begun, outcome = time.monotonic(), "client disconnected"
        try:
            async for piece in answer.pieces():
                yield piece
            if not answer.client_left:
                outcome = f"finish_reason: {answer.finish_reason}"
        except Exception:
            outcome = "failed"
            raise
        finally:
            answer.is_over = True
            watch.cancel()
            tokens = f"{len(answer.ids)} completion tokens, {len(answer.prompt)} prompt tokens"
            say("answered", f"{client_of(request)}: {tokens}, {time.monotonic() - begun:.1f} s, {outcome}")

    def _prompt_of(self, asked: ChatRequest) -> tuple[Document, Sampling, CallingTurn]:
        """The prompt, the sampling settings, and the turn to sample. Runs in a thread, since a long text takes a
        while."""
        context = context_length(self.model.source.config)
        most = asked.max_completion_tokens or asked.max_tokens
        if context is not None and asked.num_characters > CHARACTERS_A_TOKEN * context:
            raise Refused(
                400,
                f"the messages have {asked.num_characters} characters, too many for the model's context of {context} "
                "tokens.",
                "context_length_exceeded",
                "messages",
            )
        settings: dict[str, Any] = {
            "max_new_tokens": most or self.max_new_tokens,
            "stop": asked.stop or [],
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "seed": secrets.randbits(31) if asked.seed is None else asked.seed,
        }
        settings |= {name: value for name in ("top_p", "top_k", "min_p") if (value := getattr(asked, name)) is not None}
        variables = asked.variables(self.tokenizer.template_names)
        row = {"messages": asked.chat, "tools": asked.schemas, "chat_template_kwargs": variables}
        field = "messages"
        try:
            if asked.has_calls and "tool_calls" not in self.tokenizer.template_names:
                raise ValueError("messages have tool_calls, which the chat template does not write. Use another model.")
            with self._decodes if asked.attached else contextlib.nullcontext():  # which bounds the memory
                for part in asked.attached:
                    part.check_size()
                how, (prompt,) = asked_of(self.model, self.tokenizer, [row], True, settings)
            field, how_to_call = "tools", (variables, asked.forced, asked.parallel_tool_calls)
            turn = CallingTurn(self.tokenizer, asked.schemas, *how_to_call)
        except ValueError as error:  # also messages that the template refuses
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            raise Refused(400, str(error), code, field) from None
        prompt = prompt.continued(turn.begun)
        if context is None:
            return prompt, how, turn
        if len(prompt) + (most or 1) > context:
            raise Refused(
                400,
                f"the prompt has {len(prompt)} tokens and max_tokens is {most}, more than the model's context of "
                f"{context} tokens.",
                "context_length_exceeded",
                "messages",
            )
        return prompt, replace(how, max_new_tokens=min(how.max_new_tokens, context - len(prompt))), turn


class _Answer:
    """A completion in progress: the computing thread takes its steps, and the event loop reads its pieces."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, prompt: Document, how: Sampling, turn: CallingTurn
    ) -> None:
        self.prompt, self.how, self.ids = prompt, how, list[int]()
        self.is_over = False  # set by either thread: complete, or no longer needed
        self.client_left = False
        self._tokenizer = tokenizer
        steps = sample_steps(model, [prompt], how, tokenizer.decode, prompt_part=PROMPT_PART)
        self.turn, self._texts = turn, turn.content(self._kept(steps), how.stop_texts)
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[str | _End]()

    def _kept(self, steps: Iterator[list[int | None]]) -> Iterator[int | None]:
        for (token,) in steps:
            self.ids += [] if token is None else [token]
            yield token

    def take_turn(self) -> bool:
        """Compute one token or one part of the prompt; return whether there is more to compute."""
        end: _End = None
        if not self.is_over:
            try:
                if piece := next(self._texts):
                    self._send(piece)
                return True
            except StopIteration:
                pass
            except Exception as error:
                end = error
        self.is_over = True
        self._send(end)
        return False

    def _send(self, piece: str | _End) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[str]:
        """Its text, piece by piece. Raises the error that ended it."""
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def end_without(self, request: Request) -> None:
        """End the completion when the client disconnects."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.client_left = self.is_over = True

    @property
    def finish_reason(self) -> str:
        if self.turn.tool_calls:
            return "tool_calls"
        if len(self.ids) < self.how.max_new_tokens or self.ids[-1] in self.how.stop_ids:
            return "stop"
        text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
        return "stop" if any(stop in text for stop in self.how.stop_texts) else "length"

    @property
    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class _Turns:
    """The computing thread, which takes turns."""

    def __init__(self) -> None:
        self._new = queue.SimpleQueue[TakesTurns | None]()
        self._num_answers = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="leanft-serve").start()

    def stop(self) -> None:
        self._new.put(None)

    def add(self, answer: TakesTurns) -> None:
        with self._lock:
            if self._num_answers >= MOST_WAITING:
                raise Refused(429, f"{MOST_WAITING} requests are waiting. Try again later.", "rate_limit_exceeded")
            self._num_answers += 1
        self._new.put(answer)

    def _run(self) -> None:
        running: list[TakesTurns] = []
        while True:
            while len(running) < MOST_AT_ONCE and not (running and self._new.empty()):
                answer = self._new.get()
                if answer is None:
                    return
                running.append(answer)
            left = [answer for answer in running if answer.take_turn()]
            with self._lock:
                self._num_answers -= len(running) - len(left)
            running = left


async def _events(
    request: Request, answer: _Answer, pieces: AsyncIterator[str], head: dict[str, Any], with_usage: bool
) -> AsyncIterator[str]:
    """A completion as server-sent events. An error after the first event is the last event."""

    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body)}\n\n"

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    try:
        yield chunk({"role": "assistant", "content": ""})
        async for piece in pieces:
            yield chunk({"content": piece})
        for index, call in enumerate(answer.turn.tool_calls):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, answer.finish_reason)
        if with_usage:
            yield event({**head, "choices": [], "usage": answer.usage})
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield event(_failure(error).body)
    finally:
        answer.is_over = True


async def _body(request: Request, most_bytes: int) -> bytes:
    """The request's body. The rest of a body that is too long is read and dropped, since clients read the response only
    after they sent everything; a body that is much too long is not read to its end."""
    too_long = Refused(413, f"the body is longer than {most_bytes} bytes.")
    if int(request.headers.get("Content-Length", 0)) > 16 * most_bytes:
        raise too_long
    body, num_bytes = bytearray(), 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= most_bytes:
            body += part
        elif num_bytes > 16 * most_bytes:
            raise too_long
    if num_bytes > most_bytes:
        raise too_long
    return bytes(body)


def _failure(error: Exception) -> Refused:
    if isinstance(error, ValueError | FloatingPointError):  # whose messages are written for users
        return Refused(500, redact(str(error)))
    say("failed", "".join(traceback.format_exception(error)))
    return Refused(500, "the server failed to answer this request. Its log has the error.")


def _refusal(request: Request, refused: Refused) -> Response:
    say("refused" if refused.status < 500 else "failed", f"{client_of(request)}: {refused.status}, {refused!s:.200}")
    # Otherwise the unread rest of the body would be parsed as the next request.
    headers = {"Connection": "close"} if refused.status in (408, 413) else None
    return JSONResponse(refused.body, refused.status, headers=headers)


def client_of(request: Request) -> str:
    return "unknown" if request.client is None else request.client.host


def _host_of(request: Request) -> str:
    """Return the name or address in the Host header, or an empty text if it is anything but HOST or HOST:PORT."""
    header = request.headers.get("Host", "").lower()
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::[0-9]*)?", header)
    return (match[1] or match[2]) if match else ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
