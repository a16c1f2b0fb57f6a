"""Vectors and rankings over the network, asked for by OpenAI's client, equal the library's."""

import json
import threading
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest

from lean_ft.embedding.encode import Embedder, Reranker, open_embedder, open_reranker
from lean_ft.embedding.folder import ScoresOf, VectorsOf
from lean_ft.generation.embedding_server import EmbeddingServer, RerankServer, open_server
from lean_ft.generation.server import APIServer
from tests.embedding.conftest import Save

HOW = VectorsOf("mean", True, "Query: ", "passage: ", 64)
TEXTS = ["Which city is the capital of Zanemar?", "Tom has 48 apples.", "x"]
TEMPLATE = "<|begin|>Query: {query}\nPassage: {passage}<|assistant|>"


@contextmanager
def _serving(server: APIServer) -> Iterator[APIServer]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server


@pytest.fixture(scope="module")
def embedder(save_folder: Save) -> Embedder:
    return open_embedder(save_folder(HOW), "cpu")


@pytest.fixture(scope="module")
def server(embedder: Embedder) -> Iterator[APIServer]:
    with _serving(EmbeddingServer(embedder, "mine")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: APIServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reranker(save_folder: Save) -> Reranker:
    return open_reranker(save_folder(ScoresOf(TEMPLATE, (70, 71), 64)), "cpu")


@pytest.fixture(scope="module")
def ranking(reranker: Reranker) -> Iterator[APIServer]:
    with _serving(RerankServer(reranker, "ranks")) as server:
        yield server


def _post(server: APIServer, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(server.url + path, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_vectors_equal_the_library(client: openai.OpenAI, embedder: Embedder, encoding: Any):
    given = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="mine", input=TEXTS, **given)
    expected = embedder.encode(TEXTS).numpy()
    for i, one in enumerate(answer.data):
        assert one.index == i
        is_text = isinstance(one.embedding, str)  # the client decodes what it asked for by itself
        vector = np.frombuffer(b64decode(str(one.embedding)), "<f4") if is_text else one.embedding
        np.testing.assert_allclose(vector, expected[i], rtol=0, atol=1e-6)
    num_tokens = sum(map(len, embedder.ids(TEXTS)))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (num_tokens, num_tokens, "mine")


def test_prompts_sizes_and_ids(client: openai.OpenAI, embedder: Embedder):
    def asked(given: Any, **more: Any) -> np.ndarray:
        answer = client.embeddings.create(model="mine", input=given, **more)
        return np.array([one.embedding for one in answer.data])

    for used_as in ("query", "passage"):
        found = asked(TEXTS[0], extra_body={"input_type": used_as}, dimensions=16)
        np.testing.assert_allclose(found, embedder.encode(TEXTS[:1], used_as, 16).numpy(), rtol=0, atol=1e-6)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5)
    ids = [one.tolist() for one in embedder.ids(TEXTS)]
    np.testing.assert_allclose(asked(ids), embedder.encode(TEXTS).numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(asked(ids[0]), embedder.encode(TEXTS[:1]).numpy(), rtol=0, atol=1e-6)
    long = TEXTS[1] * 40
    with pytest.raises(openai.BadRequestError, match="more than 64. Shorten it, or set truncate") as error:
        asked(long)
    assert error.value.code == "context_length_exceeded"
    found = asked(long, extra_body={"truncate": True})
    np.testing.assert_allclose(found, embedder.encode([long]).numpy(), rtol=0, atol=1e-6)


def test_many_requests_at_once_get_their_own_vectors(server: APIServer, embedder: Embedder):
    expected, found = embedder.encode([f"text {i}" for i in range(12)]), dict[int, Any]()

    def ask(i: int) -> None:
        found[i] = _post(server, "/embeddings", {"input": [f"text {i}", "other " * 9]})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (status, answer) in found.items():
        assert status == 200
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected[i], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("body", "status", "message"), [
    ({}, 400, "input is missing"),
    ({"input": []}, 400, "input"),
    ({"input": ""}, 400, "input"),
    ({"input": ["a", 3]}, 400, "input"),
    ({"input": [["a"]]}, 400, "input"),
    ({"input": [-1]}, 400, "input"),
    ({"input": [800]}, 400, "an id is above 767"),
    ({"input": [True, False]}, 400, "input"),
    ({"input": "a", "dimensions": 129}, 400, "dimensions is 129: expected 1 to 128"),
    ({"input": "a", "dimensions": 0}, 400, "dimensions is 0"),
    ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format is 'int8'"),
    ({"input": "a", "model": "other"}, 404, "no such model: 'other'"),
    ({"input": "a", "dimension": 3}, 400, "unknown field: dimension. Did you mean 'dimensions'?"),
    ({"input": ["a"] * 2049}, 400, "input"),
    ({"input": ["a" * 3000]}, 400, "text 1 has 3000 characters, too many for 64 tokens"),
    (b"[1]", 400, "expected a JSON object"),
    (b'{"input": "\\ud800"}', 400, ""),
    (b"{" * 9000, 400, "not JSON"),
])  # fmt: skip
def test_wrong_requests_get_openais_errors(server: APIServer, body: Any, status: int, message: str):
    found, answer = _post(server, "/embeddings", body)
    assert found == status
    assert message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_long_is_refused(server: APIServer):
    status, answer = _post(server, "/embeddings", {"input": ["a" * (1 << 20)] * 9})
    assert (status, "longer than" in answer["error"]["message"]) == (413, True)


def test_passages_are_ranked_by_their_scores(ranking: APIServer, reranker: Reranker):
    passages = [*TEXTS, "Tom has 48 apples. " * 30, ""]
    status, answer = _post(ranking, "/rerank", {"query": TEXTS[0], "documents": passages, "return_documents": True})
    assert status == 200
    scores = reranker.scores(TEXTS[0], passages)
    order = scores.argsort(descending=True).tolist()
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]].double().sigmoid().item(), abs=1e-6)
        assert one["document"] == {"text": passages[one["index"]]}
    assert answer["usage"]["total_tokens"] == sum(map(len, reranker.ids(TEXTS[0], passages)))
    asked = {"query": TEXTS[0], "documents": [{"text": text} for text in passages], "top_n": 2, "model": "ranks"}
    status, fewer = _post(ranking, "/rerank", asked)
    assert fewer["results"] == [{k: one[k] for k in ("index", "relevance_score")} for one in answer["results"][:2]]


@pytest.mark.parametrize(("body", "message"), [
    ({"documents": ["a"]}, "query is missing"),
    ({"query": "a", "documents": []}, "documents"),
    ({"query": "a", "documents": [{"title": "a"}]}, "documents"),
    ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n is 0"),
    ({"query": "long " * 90, "documents": ["a"]}, "leaves no room for the passage within 64"),
])  # fmt: skip
def test_wrong_requests_to_rank(ranking: APIServer, body: Any, message: str):
    status, answer = _post(ranking, "/rerank", body)
    assert (status, message in answer["error"]["message"]) == (400, True)
    assert _post(ranking, "/embeddings", body)[1]["error"]["message"].endswith(
        "Use POST /v1/rerank and GET /v1/models."
    )


def test_the_folder_decides_what_is_served(save_folder: Save):
    for how, expected in ((HOW, EmbeddingServer), (ScoresOf(TEMPLATE, None), RerankServer)):
        server = open_server(save_folder(how), "mine", "cpu", "bfloat16", "127.0.0.1", 0, None)
        assert type(server) is expected
        with server:
            pass
    assert open_server("tiny", "mine", "cpu", "bfloat16", "127.0.0.1", 0, None) is None
