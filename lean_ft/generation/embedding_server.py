"""Serves a model for vectors, or a reranker.

POST /v1/embeddings   vectors of texts, in OpenAI's format
POST /v1/rerank       passages by their relevance to a query, in Jina's format
GET  /v1/models       the model

The computing thread takes turns of at most `TOKENS_A_TURN` tokens, or one text, so a small request does not wait for
the end of a large one. Texts that are too long are refused unless the request has `truncate`; passages lose their end.
"""

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from lean_ft.embedding.encode import (
    Embedder,
    Reranker,
    computed_in_turns,
    kind_of_folder,
    open_embedder,
    open_reranker,
    score_steps,
)
from lean_ft.generation.embedding_requests import MOST_TOKENS, EmbeddingRequest, RerankRequest
from lean_ft.generation.requests import Refused
from lean_ft.generation.server import CHARACTERS_A_TOKEN, APIServer, client_of
from lean_ft.system.log import say
from lean_ft.system.units import counted

TOKENS_A_TURN = 1024
MOST_BODY_BYTES = 8 << 20


def open_server(
    path: str | Path, name: str, device: str, dtype: str, host: str, port: int, token: str | None
) -> APIServer | None:
    """Return a server for a model whose folder says that it makes vectors or scores; None for other models.

    Arguments are those of `open_embedder` and `APIServer`. Raises ValueError as they do.
    """
    kind = kind_of_folder(path)
    if kind is None:
        return None
    if kind == "vectors":
        return EmbeddingServer(open_embedder(path, device, dtype), name, host=host, port=port, token=token)
    return RerankServer(open_reranker(path, device, dtype), name, host=host, port=port, token=token)


class _Job:
    """A request in progress. `steps` yields after each part and returns the result."""

    def __init__(self, steps: Generator[None, None, Tensor]) -> None:
        self._steps, self._loop = steps, asyncio.get_running_loop()
        self._result: asyncio.Future[Tensor] = self._loop.create_future()
        self._is_over = False

    def take_turn(self) -> bool:
        """Compute one part; return whether there is more to compute."""
        if self._is_over:
            return False
        try:
            next(self._steps)
        except StopIteration as end:
            self._send(self._result.set_result, end.value)
        except Exception as error:
            self._send(self._result.set_exception, error)
        else:
            return True
        return False

    def _send(self, send: Callable[[Any], None], value: object) -> None:
        def send_unless_left() -> None:
            if not self._result.done():
                send(value)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(send_unless_left)

    async def result(self, request: Request) -> Tensor:
        """Wait for the result. Raises the error that ended the computation, and ClientDisconnect if the client left."""
        left = asyncio.create_task(_until_left(request))
        try:
            await asyncio.wait([self._result, left], return_when=asyncio.FIRST_COMPLETED)
            if not self._result.done():
                raise ClientDisconnect
            return self._result.result()
        finally:
            self._is_over = True
            left.cancel()


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EmbeddingServer(APIServer):
    """Serves a model for vectors. Raises ValueError as `APIServer` does."""

    known = "POST /v1/embeddings and GET /v1/models"

    def __init__(
        self, embedder: Embedder, name: str, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        super().__init__(name, host=host, port=port, token=token)
        self._embedder = embedder

    def endpoints(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {"/v1/embeddings": self._embed}

    async def _embed(self, request: Request) -> Response:
        begun, body = time.monotonic(), await self.body_of(request, MOST_BODY_BYTES)
        asked = await asyncio.to_thread(EmbeddingRequest.read, body)
        self.check_model(asked.model)
        ids = await asyncio.to_thread(self._ids_of, asked)
        job = _Job(computed_in_turns(len(ids), self._embedder.steps(ids, asked.dimensions, TOKENS_A_TURN)))
        self.add(job)
        vectors = await job.result(request)
        num_tokens = sum(map(len, ids))
        _log(request, len(ids), num_tokens, begun)
        return await asyncio.to_thread(self._response, asked, vectors.numpy(), num_tokens)

    def _ids_of(self, asked: EmbeddingRequest) -> Sequence[Sequence[int] | np.ndarray]:
        """The ids of the texts. Runs in a thread, since long texts take a while."""
        embedder = self._embedder
        if asked.dimensions is not None and asked.dimensions > embedder.size:
            raise Refused(400, f"dimensions is {asked.dimensions}: expected 1 to {embedder.size}.", None, "dimensions")
        texts = [one for one in asked.input if isinstance(one, str)]
        longest = embedder.max_length
        if texts:
            _check_characters(texts, longest, "input")
            try:
                whole = embedder.ids(texts, asked.used_as, cuts=False)
                ids = embedder.ids(texts, asked.used_as) if asked.truncate else whole
            except ValueError as error:
                raise Refused(400, str(error), None, "input") from None
        else:
            ids = [one for one in asked.input if not isinstance(one, str)]
            vocab_size = embedder.model.config.vocab_size
            if max(map(max, ids)) >= vocab_size:
                raise Refused(400, f"an id is above {vocab_size - 1}, the model's last.", None, "input")
        _check_lengths(ids, longest, "set truncate to cut their ends")
        return ids

    def _response(self, asked: EmbeddingRequest, vectors: np.ndarray, num_tokens: int) -> Response:
        if not np.isfinite(vectors).all():
            raise Refused(500, "a vector is not finite. Serve the model with --dtype bfloat16 or float32.")
        if asked.encoding_format == "base64":
            made: list[Any] = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in vectors]
        else:
            made = vectors.tolist()
        data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(made)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})


class RerankServer(APIServer):
    """Serves a reranker. Raises ValueError as `APIServer` does."""

    known = "POST /v1/rerank and GET /v1/models"

    def __init__(
        self, reranker: Reranker, name: str, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        super().__init__(name, host=host, port=port, token=token)
        self._reranker = reranker

    def endpoints(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {"/v1/rerank": self._rerank}

    async def _rerank(self, request: Request) -> Response:
        begun, body = time.monotonic(), await self.body_of(request, MOST_BODY_BYTES)
        asked = await asyncio.to_thread(RerankRequest.read, body)
        self.check_model(asked.model)
        ids = await asyncio.to_thread(self._ids_of, asked)
        steps = score_steps(self._reranker.model, ids, self._reranker.how.yes_no, TOKENS_A_TURN)
        job = _Job(computed_in_turns(len(ids), steps))
        self.add(job)
        scores = await job.result(request)
        num_tokens = sum(map(len, ids))
        _log(request, len(ids), num_tokens, begun)
        if not bool(scores.isfinite().all()):
            raise Refused(500, "a score is not finite. Serve the model with --dtype bfloat16 or float32.")
        order = torch.argsort(scores, descending=True, stable=True)[: asked.top_n].tolist()
        relevance = scores.double().sigmoid()  # in float32, high scores would be equal
        results = []
        for i in order:
            document = {"document": {"text": asked.documents[i]}} if asked.return_documents else {}
            results.append({"index": i, "relevance_score": relevance[i].item(), **document})
        head = {"id": f"rerank-{secrets.token_hex(12)}", "object": "list", "model": self.name}
        return JSONResponse({**head, "results": results, "usage": {"total_tokens": num_tokens}})

    def _ids_of(self, asked: RerankRequest) -> list[np.ndarray]:
        """The ids of the pairs. Runs in a thread, since long texts take a while."""
        _check_characters([asked.query], self._reranker.max_length, "query")
        _check_characters(asked.documents, self._reranker.max_length, "documents", extra=len(asked.query))
        try:
            ids = self._reranker.ids(asked.query, asked.documents)
        except ValueError as error:
            raise Refused(400, str(error), "context_length_exceeded", "query") from None
        _check_lengths(ids, None, "", "documents")
        return ids


def _check_characters(texts: Sequence[str], longest: int | None, field: str, extra: int = 0) -> None:
    """Raise Refused for texts that would take long to tokenize: more characters than so many tokens have, or with the
    `extra` characters of each, more than a request may have."""
    most = None if longest is None else CHARACTERS_A_TOKEN * longest
    for number, text in enumerate(texts, start=1):
        if most is not None and len(text) > most:
            reason = f"{field}: text {number} has {len(text)} characters, too many for {longest} tokens."
            raise Refused(400, reason, "context_length_exceeded", field)
    if (num := sum(map(len, texts)) + extra * len(texts)) > CHARACTERS_A_TOKEN * MOST_TOKENS:
        raise Refused(400, f"{field} has {num} characters in all, too many for {MOST_TOKENS} tokens.", None, field)


def _check_lengths(
    ids: Sequence[Sequence[int] | np.ndarray], longest: int | None, remedy: str, field: str = "input"
) -> None:
    for number, one in enumerate(ids, start=1):
        if longest is not None and len(one) > longest:
            reason = f"{field}: text {number} has {len(one)} tokens, more than {longest}. Shorten it, or {remedy}."
            raise Refused(400, reason, "context_length_exceeded", field)
        if not len(one):
            raise Refused(400, f"{field}: text {number} has no token.", None, field)
    if (num := sum(map(len, ids))) > MOST_TOKENS:
        raise Refused(400, f"{field} has {num} tokens in all; expected at most {MOST_TOKENS}.", None, field)


def _log(request: Request, num_texts: int, num_tokens: int, begun: float) -> None:
    seconds = time.monotonic() - begun
    say("answered", f"{client_of(request)}: {counted(num_texts, 'texts')}, {num_tokens} tokens, {seconds:.1f} s")
