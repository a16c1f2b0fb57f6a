"""What objects of a request have in common, and content parts of messages."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from lean_ft.tokenizers import Tokenizer


class RequestObject(BaseModel):
    """An object of a request. Its values are checked and never converted."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ContentPart(RequestObject):
    """A content part. A subclass names its type in the field `type`."""

    most_body_bytes: ClassVar[int]
    """Maximum size of a request's body, if the model reads such parts."""
    cache_control: dict[str, Any] | None = None  # for other servers' caches

    @classmethod
    def as_ours(cls, part: Any) -> Any:
        """Return a part in another form of this type, such as another API's, in this form; other parts unchanged."""
        return part

    @classmethod
    def is_read_by(cls, tokenizer: Tokenizer) -> bool:
        """Whether the model of this tokenizer reads such parts."""
        raise NotImplementedError

    def check_size(self) -> None:
        """Raise ValueError for a part that would take too much memory to decode, or that cannot be opened."""
        raise NotImplementedError
