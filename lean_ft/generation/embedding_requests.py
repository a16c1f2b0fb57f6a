"""Requests for vectors and for scores of passages, with a type and a bound for every field.

Sources: https://platform.openai.com/docs/api-reference/embeddings, with `input_type` as in NVIDIA's and Cohere's APIs
and `truncate` as in text-embeddings-inference; https://api.jina.ai/redoc for `/v1/rerank`.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from lean_ft.embedding.encode import UsedAs
from lean_ft.generation.requests import APIRequest

MOST_TEXTS = 2048
MOST_TOKENS = 300_000  # of all texts of a request

_Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=MOST_TOKENS)]
_Text = Annotated[str, Field(min_length=1)]


def _as_list(given: Any) -> Any:
    """A single text or list of ids as a list of one."""
    is_ids = isinstance(given, list) and bool(given) and all(type(one) is int for one in given)
    return [given] if isinstance(given, str) or is_ids else given


def _as_text(document: Any) -> Any:
    """The text of a document `{"text": ...}`."""
    return document["text"] if isinstance(document, dict) and document.keys() == {"text"} else document


class EmbeddingRequest(APIRequest):
    """The body of POST /v1/embeddings. Ids are the whole text, without a prompt or further tokens."""

    input: Annotated[list[_Text] | list[_Ids], BeforeValidator(_as_list), Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=2**24)] | None = None
    input_type: Literal["query", "passage", "document"] | None = None
    truncate: bool = False

    @property
    def used_as(self) -> UsedAs | None:
        return "passage" if self.input_type == "document" else self.input_type


class RerankRequest(APIRequest):
    """The body of POST /v1/rerank."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"truncation": (True,)}  # a passage's end is cut
    ignored: ClassVar[Collection[str]] = ("user",)

    query: _Text
    documents: Annotated[list[Annotated[str, BeforeValidator(_as_text)]], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool = False
