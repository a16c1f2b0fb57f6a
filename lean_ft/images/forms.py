"""Forms of an image in rows, prompts and requests: a path, a URL, base64 text, encoded bytes, or an object with one of
these.

The content of a text decides whether it is base64 or a path, not its length: base64 of an image begins as image files
do.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 1 << 27  # of an encoded image; Pillow reads a WebP file and the tags of a TIFF file whole to learn its size
KEYS = ("bytes", "base64", "data", "url", "path", "image", "image_url", "source")
"""Keys of an object that may hold its image, such as `data` in Anthropic's `source`, and `bytes` in `datasets`."""
_ENCODED = ("bytes", "base64", "data")  # a text under these keys is base64
_START_CHARACTERS = 64
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # possible lengths of the header
_FROM_URL_SAFE = str.maketrans("-_", "+/")


def image_in(value: Any) -> Any:
    """Return the path, URL, encoded bytes or other value that an object holds under `KEYS`. Return other values
    unchanged.

    Base64 text becomes bytes. Raises ValueError for an object without an image, and for invalid base64.
    """
    key, value = _unwrapped(value)
    if key in _ENCODED and not isinstance(value, str | bytes | bytearray | memoryview):
        raise ValueError(f"an image is not valid base64: its `{key}` is {short(value)}.")
    if not isinstance(value, str):
        return value
    if is_data_url(value):
        return _from_data_url(value)
    return from_base64(value) if key in _ENCODED or is_base64(value) else value


def as_url(value: Any) -> str:
    """Return the data URL of an image in a request. Another URL or a path is returned unchanged. Raises ValueError for
    other values."""
    key, value = _unwrapped(value)
    if not isinstance(value, str):
        raise ValueError(f"an image is {short(value)}; expected a text.")
    if not is_data_url(value) and (key in _ENCODED or is_base64(value)):
        return f"data:;base64,{value}"
    return value


def _unwrapped(value: Any) -> tuple[str | None, Any]:
    """Return the innermost key of nested objects that hold an image, and its value; None and the value if it is no
    object."""
    key = None
    while isinstance(value, Mapping):
        found = next((name for name in KEYS if value.get(name) is not None), None)
        if found is None:
            keys = short(list(value))
            raise ValueError(f"an image is an object of {keys}; expected bytes, base64, url, path or image.")
        key, value = found, value[found]
    return key, value


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def is_base64(text: str) -> bool:
    """Whether a text is an image file in base64, by its first characters."""
    start = re.sub(r"\s", "", text[: 2 * _START_CHARACTERS])[:_START_CHARACTERS]
    try:
        return is_image(base64.b64decode(start[: len(start) & -4].translate(_FROM_URL_SAFE), validate=True))
    except binascii.Error:
        return False


def is_image(start: bytes) -> bool:
    """Whether a file with this start is an image of a common format, also of one that lean_ft does not read."""
    if start.startswith(b"BM"):
        return int.from_bytes(start[14:18], "little") in _BMP_HEADERS
    if start.startswith(b"RIFF"):
        return start[8:12] == b"WEBP"
    if start[4:8] == b"ftyp":  # AVIF, HEIC
        return True
    return start.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"))


def from_base64(text: str) -> bytes:
    """Decode base64, also in lines and in the alphabet of URLs."""
    try:
        if len(text) > MAX_BYTES * 4 // 3 + 4:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        return base64.b64decode("".join(text.split()).translate(_FROM_URL_SAFE), validate=True)
    except ValueError as error:
        raise ValueError(f"an image is not valid base64: {error}.") from None


def _from_data_url(url: str) -> bytes:
    kind, comma, content = url.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise ValueError(f"an image is the data URL {short(url)}; expected data:image/png;base64,...")
    return from_base64(content)


def short(value: Any) -> str:
    """A value for an error message."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"
