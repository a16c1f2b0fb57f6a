"""Recognize images, video and audio in fields and keys that lean_ft does not read.

A name alone is not enough: `image_id` holds no image. A field is refused if its content is a medium (encoded bytes, a
data URL, an object of `datasets`), or if its name means one (`img`, `frame_paths`) and its values look like files or
arrays. Paths under other names, such as `file_name`, are refused only if the run reads images and no row has one.
Otherwise the report names the field.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from shlex import quote
from typing import Any, NamedTuple

# Words of names, and suffixes of files, by medium.
_WORDS = {
    "image": r"images?|imgs?|pictures?|pics?|photos?|pixels?|screenshots?",
    "video": r"videos?|clips?|frames?|films?|movies?",
    "audio": r"audios?|sounds?|speech|wav|waveforms?",
}
_SUFFIXES = {
    "image": r"png|jpe?g|webp|gif|bmp|tiff?|heic|avif",
    "video": r"mp4|mov|avi|mkv|webm|m4v",
    "audio": r"wav|mp3|flac|ogg|opus|m4a",
}
# Words that a name may have beside these and still mean a medium, as in `image_path`.
_BESIDE = re.compile(
    "(path|file|filename|name|url|uri|byte|data|base64|b64|raw|list|input|local|value|tensor|array|feature|embed|grid|thw|attachment)s?"
)
_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n", "image"), (b"\xff\xd8\xff", "image"), (b"GIF8", "image"), (b"II*\0", "image"),
    (b"MM\0*", "image"), (b"ID3", "audio"), (b"fLaC", "audio"), (b"OggS", "audio"), (b"\x1aE\xdf\xa3", "video"),
)  # fmt: skip
_IMAGES_IN_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # how they begin
_FILE = re.compile(r"(?:[^\s<>\"|*]|(?<=\S) (?=\S)){1,1024}\.(\w{3,4})(?:\?\S*)?", re.ASCII)
_MOST_JSON = 1 << 16  # characters


NOT_READ = "only text and images are read. Remove the row, or skip such rows with data.on_bad_row=skip"
_IMAGE = "images are read from chats and prompts: from content parts, or from the row's field `images`"
UNREAD_MEDIA = ("video", "audio")
UNREAD_FIELDS = {name: NOT_READ for medium in UNREAD_MEDIA for name in (medium, f"{medium}s")}
MEDIA_FIELDS: dict[str, str] = {**dict.fromkeys(("image", "images"), _IMAGE), **UNREAD_FIELDS}
"""Names of fields and keys that hold media, with the remedy where they are not read."""
_SIZES = re.compile("pixels|^resized_|soft_tokens|image_tokens")  # keys of an image: the limits of its size
_SIZED = (
    "all images of a run have the same limits. Remove the key; data.image_tokens=N scales larger images down to N "
    "tokens"
)


class Medium(NamedTuple):
    """What a value looks like: encoded media, or only a path, a URL or an array."""

    kind: str  # image, video or audio
    is_content: bool


@lru_cache(1000)
def kind_of_name(name: str) -> str | None:
    """The medium that a name means, such as `img`, `imagePath` or `frames_2`; None for names with further words
    (`image_id`)."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+(?:64)?|[A-Z]+(?![a-z])", name)]
    others = [word for word in words if not _BESIDE.fullmatch(word)]
    kinds = [next((kind for kind, named in _WORDS.items() if re.fullmatch(named, word)), None) for word in others]
    return kinds[0] if kinds and None not in kinds else None


def medium_of(value: Any, named: str | None = None) -> Medium | None:
    """Return the medium that a value looks like. The first item of a list decides.

    named: the medium that its name means, without which arrays and unknown bytes are none.
    """
    if isinstance(value, str):
        return medium_of(_from_json(value), named) if value[:1] in ("[", "{") else _of_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return _of_bytes(bytes(value[:16])) or (Medium(named, True) if named else None)
    if isinstance(value, Mapping):
        return _of_mapping(value)
    if isinstance(value, list | tuple):
        first = next((item for item in value if item is not None), None)
        if isinstance(first, list | tuple) and named is not None and _is_number(next(iter(first), None)):
            return Medium(named, False)
        return None if first is None or _is_number(first) else medium_of(first, named)
    if type(value).__module__.startswith("PIL."):
        return Medium("image", True)
    return Medium(named, False) if named and getattr(value, "ndim", 0) > 1 else None


def image_fields(fields: Mapping[str, Any]) -> list[str]:
    """The names of fields that look like images or paths of images."""
    found = {name: medium_of(value, kind_of_name(name)) for name, value in fields.items()}
    return [name for name, medium in found.items() if medium is not None and medium.kind == "image"]


def refuse_media(fields: Mapping[str, Any], *, of_prompt: bool, shown: Collection[str], read: Collection[str]) -> None:
    """Raise ValueError if an unread field holds an image, video or audio, by its name and its value or by its content
    alone. The fields have values.

    of_prompt: rewards get the fields too, so only an image under the name of an image is refused; shown: the media that
    the row shows, so further ones are data; read: the media that the run reads.
    """
    for name, value in fields.items():
        named = kind_of_name(name)
        medium = medium_of(value, named)
        if medium is None or (named is None and (of_prompt or not medium.is_content)):
            continue
        if medium.kind in UNREAD_MEDIA and not of_prompt:
            raise ValueError(f"the row has the field `{name}`, which looks like {medium.kind}, and {NOT_READ}.")
        if medium.kind == "image" and medium.kind not in shown:
            reason = _IMAGE if medium.kind in read else "model.images=none ignores images"
            setting = quote(f"data.columns.images={name}")
            remedy = f"Set {'' if medium.kind in read else 'model.images=frozen and '}{setting}"
            raise ValueError(
                f"the row has the field `{name}`, which looks like an image, and {reason}. {remedy}, or remove or "
                "rename the field."
            )


def refuse_key(key: str, value: Any) -> None:
    """Raise ValueError if the unread key of a message holds a medium, by its name and its value."""
    named = kind_of_name(key)
    if named is not None and medium_of(value, named):
        raise ValueError(f"a message has the key `{key}`, and {MEDIA_FIELDS[named]}.")


def refuse_part_key(key: str, value: Any, where: str) -> None:
    """Raise ValueError if the unread key of a content part holds a medium, or its size. where: names the message."""
    named, place = kind_of_name(key), f"{where} has a content part with the key `{key}`"
    if _SIZES.search(key):
        raise ValueError(f"{place}, and {_SIZED}.")
    if key in MEDIA_FIELDS or (named is not None and medium_of(value, named)):
        raise ValueError(f"{place}. A part is one text or one image. Write a separate part of the type image.")


def content_types() -> tuple[type, ...]:
    """The types of values in rows that hold media."""
    pillow = getattr(sys.modules.get("PIL.Image"), "Image", bytes)  # without Pillow there are none
    return bytes, bytearray, memoryview, pillow


def _from_json(text: str) -> Any:
    """Parse a list or an object, which CSV stores as text; None for invalid JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text) if len(text) < _MOST_JSON else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _of_text(text: str) -> Medium | None:
    if text[:5].lower() == "data:" and (kind := text[5:20].partition("/")[0].lower()) in _WORDS:
        return Medium(kind, True)
    is_long = len(text) > 60 and text.startswith(_IMAGES_IN_BASE64)
    if is_long and re.match(r"[A-Za-z0-9+/=_-]+\Z", text[:200].strip()):
        return Medium("image", True)
    path = _FILE.fullmatch(text.strip()) if len(text) < 2048 and "." in text else None
    kind = path and next((kind for kind, suffix in _SUFFIXES.items() if re.fullmatch(suffix, path[1].lower())), None)
    return Medium(kind, False) if kind else None


def _of_bytes(beginning: bytes) -> Medium | None:
    if beginning[:4] == b"RIFF":
        return Medium(
            "image" if beginning[8:12] == b"WEBP" else "video" if beginning[8:12] == b"AVI " else "audio", True
        )
    if beginning[4:8] == b"ftyp":
        return Medium("video", True)
    return next((Medium(kind, True) for start, kind in _BEGINNINGS if beginning.startswith(start)), None)


def _of_mapping(value: Mapping[str, Any]) -> Medium | None:
    """`{"bytes", "path"}` and `{"array", "sampling_rate"}` of `datasets`, and a mapping with a path or URL."""
    if "sampling_rate" in value:
        return Medium("audio", True)
    of_path = next((found for key in ("path", "url") if (found := medium_of(value.get(key)))), None)
    if value.get("bytes") is not None:
        of_bytes = medium_of(value["bytes"])
        return of_bytes or (of_path and of_path._replace(is_content=True))
    return of_path
