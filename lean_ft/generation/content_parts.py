"""The types of content parts in requests, for requests and the server, which know `ContentPart` alone."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from lean_ft.generation.image_parts import ImagePart
from lean_ft.generation.request_objects import ContentPart
from lean_ft.tokenizers import Tokenizer


class TextPart(ContentPart):
    most_body_bytes: ClassVar[int] = 4 << 20
    type: Literal["text"]
    text: str

    @classmethod
    def is_read_by(cls, tokenizer: Tokenizer) -> bool:
        return True

    def check_size(self) -> None:
        """The body's size is its bound."""


_Known = TextPart | ImagePart
PART_TYPES: tuple[type[ContentPart], ...] = get_args(_Known)


def _as_ours(part: Any) -> Any:
    for part_type in PART_TYPES:
        part = part_type.as_ours(part)
    return part


AnyPart = Annotated[Annotated[_Known, Field(discriminator="type")], BeforeValidator(_as_ours)]


def most_body_bytes(tokenizer: Tokenizer) -> int:
    """Maximum size of a request's body, for the model of this tokenizer."""
    return max(part.most_body_bytes for part in PART_TYPES if part.is_read_by(tokenizer))
