"""Images in requests: OpenAI's content parts of the type `image_url`, and other forms of them.

Source: https://platform.openai.com/docs/api-reference/chat; the forms of Anthropic and of OpenAI's Responses API.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, field_validator

from lean_ft.data.parts import units_read
from lean_ft.generation.request_objects import ContentPart, RequestObject
from lean_ft.images.forms import KEYS, as_url, is_data_url
from lean_ft.tokenizers import Tokenizer


def _as_object(url: Any) -> Any:
    return {"url": url} if isinstance(url, str) else url


class _ImageURL(RequestObject):
    url: str
    detail: Literal["auto", "high"] | None = None  # low would scale images down

    @field_validator("url")
    @classmethod
    def _has_data(cls, url: str) -> str:
        if not is_data_url(url := as_url(url)):
            raise ValueError(
                "expected a data URL, as in data:image/png;base64,...; this server fetches no URL and reads no file"
            )
        return url


class ImagePart(ContentPart):
    """An image, as a data URL."""

    most_body_bytes: ClassVar[int] = 32 << 20
    type: Literal["image_url"]
    image_url: Annotated[_ImageURL, BeforeValidator(_as_object)]

    @classmethod
    def as_ours(cls, part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") not in ("image", "input_image"):
            return part
        image = {name: value for name, value in part.items() if name in KEYS}
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        rest = {name: value for name, value in part.items() if name not in (*KEYS, "type", "detail")}
        return {"type": "image_url", "image_url": {"url": as_url(image), **detail}, **rest}

    @classmethod
    def is_read_by(cls, tokenizer: Tokenizer) -> bool:
        return "image" in units_read(tokenizer)

    def check_size(self) -> None:
        from lean_ft.images.reading import open_image, reference  # here, since texts do not need Pillow

        open_image(reference(self.image_url.url, Path())).close()
