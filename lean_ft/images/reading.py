"""Open the images of rows, from paths or bytes.

A reference names an image in stored data: a path with the file's size and time, or the encoded image itself. Equal references
are equal images. Every fault of an image (missing, changed, broken, too large) is a ValueError.

Left out: URLs, which are never fetched, and an EXIF orientation stored after the pixels of a PNG file, because reading it takes
as long as decoding the image.
"""

import base64
import io
import os
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from lean_ft.images.cuts import Size
from lean_ft.system.whole_files import why_unusable

MAX_PIXELS = 1 << 28  # by the header; a larger image is refused before it is decoded
MAX_BYTES = 1 << 27  # of an encoded image; Pillow reads a WebP file and the tags of a TIFF file whole to learn its size
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # JPEG opens MPO too
_STRIP_PIXELS = 1 << 22
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # open_image has its own limit, and needs no warning
warnings.filterwarnings("ignore", module=r"PIL\.")  # broken metadata, which nothing here reads


def reference(value: Any, folder: Path) -> bytes:
    """The reference of an image in a row.

    value: a path, relative to `folder`; a data URL; encoded bytes; an image of Pillow, which is stored as PNG; or a mapping
    that has one of these as `bytes`, `path`, `url`, `image` or `image_url`, or base64 text as `base64`.

    The image is not opened. Raises ValueError for any other value, a missing file and an http URL.
    """
    while isinstance(value, Mapping):
        found = [key for key in ("bytes", "base64", "url", "path", "image", "image_url") if value.get(key) is not None]
        if not found:
            keys = _short(list(value))
            raise ValueError(f"an image is a mapping of {keys}; expected bytes, base64, url, path or image.")
        value = _from_base64(value["base64"]) if found[0] == "base64" else value[found[0]]
    if isinstance(value, Image.Image):
        value = _as_png(value)
    if isinstance(value, str) and value[:5].lower() == "data:":
        value = _from_data_url(value)
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) > MAX_BYTES:
            raise ValueError(f"an image has {len(value)} bytes; the limit is {MAX_BYTES >> 20} MiB.")
        return b"data:" + bytes(value)
    if isinstance(value, str) and value.lower().startswith(("http://", "https://")):
        raise ValueError(f"an image is the URL {_short(value)}. URLs are not fetched: download the image first.")
    if not isinstance(value, str | Path) or value == "":
        raise ValueError(f"an image is {_short(value)}; expected a path, a data URL or the bytes of an image file.")
    path = os.path.abspath(folder / str(value).removeprefix("file://"))
    status = _file_status(path)
    return b"file:%d:%d:%s" % (status.st_size, status.st_mtime_ns, os.fsencode(path))


def open_image(reference: bytes) -> Image.Image:
    """Open an image without decoding it. Close it, or use it as a context manager.

    Raises ValueError if it is unreadable or too large, or if its file changed since its reference was made.
    """
    kind, _, rest = reference.partition(b":")
    if kind == b"data":
        name, source = "the image", io.BytesIO(rest)
    else:
        size, time, path = rest.split(b":", 2)
        name = source = os.fsdecode(path)
        status = _file_status(source)
        if (status.st_size, status.st_mtime_ns) != (int(size), int(time)):
            raise ValueError(f"{name}: the image changed after the data was prepared. Prepare the data again.")
    with _plain_errors(name):
        image = Image.open(source, formats=FORMATS)
    return _checked(image, name)


def path_of(reference: bytes) -> str | None:
    """The path of an image, or None if the reference is the encoded image."""
    return os.fsdecode(reference.split(b":", 3)[3]) if reference.startswith(b"file:") else None


def size_of(image: Image.Image) -> Size:
    """The upright size, from the header alone."""
    width, height = image.size
    return Size(height, width) if _orientation(image) >= 5 else Size(width, height)


def check(image: Image.Image) -> None:
    """Raise ValueError if an image is broken behind its header, at less than the cost of decoding it. The image cannot be used then.

    A JPEG is decoded at an eighth of its size, the checksums of a PNG are compared, and any other image is decoded.
    """
    with _plain_errors(getattr(image, "filename", "") or "the image"):
        if isinstance(image, PngImageFile):
            image.verify()
        else:
            image.draft(None, (1, 1))
            image.load()


def decoded(image: Image.Image) -> Image.Image:
    """The upright image in RGB, on white where it is transparent. Raises ValueError if it is broken."""
    turn, name = _TURNS.get(_orientation(image)), getattr(image, "filename", "") or "the image"
    if isinstance(image, TiffImageFile):  # with a name, Pillow maps the file, and gets a turned image wrong
        image.filename = ""
    with _plain_errors(name):
        image.load()
        if image.has_transparency_data:
            image = _on_white(image)
        elif image.mode != "RGB":
            image = image.convert("RGB")
        return image if turn is None else image.transpose(turn)


def _on_white(image: Image.Image) -> Image.Image:
    """An RGB image without transparency. Strips of rows keep copies of a large image small."""
    opaque, height = Image.new("RGB", image.size), max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, height):
        strip = image.crop((0, top, image.width, min(top + height, image.height))).convert("RGBA")
        opaque.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip), (0, top))
    return opaque


def thumbnail(reference: bytes, side: int = 160) -> bytes:
    """A small JPEG of an image, or of a gray square if it cannot be read."""
    try:
        with open_image(reference) as image:
            small = decoded(image)
    except ValueError:
        small = Image.new("RGB", (side, side), "gray")
    small.thumbnail((side, side))
    small.save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def _orientation(image: Image.Image) -> int:
    """The orientation by EXIF, from 1 to 8."""
    if isinstance(image, TiffImageFile):  # Pillow turns these itself
        return 1
    try:
        found = Image.Image.getexif(image).get(_ORIENTATION, 1)  # PngImageFile.getexif decodes the image
        return found if found in _TURNS else 1
    except Exception:  # broken metadata raises many kinds of errors, and pixels do not need it
        return 1


def _as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    decoded(_checked(image, "the image")).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _checked(image: Image.Image, name: str) -> Image.Image:
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        image.close()
        raise ValueError(f"{name} has {width} x {height} pixels; expected between 1 and {MAX_PIXELS} pixels.")
    return image


def _file_status(path: str) -> os.stat_result:
    """The status of a regular file that is not too large."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot read the image {_short(path)}: {reason}.") from None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would never end
        raise ValueError(f"the image {_short(path)} is not a regular file.")
    if status.st_size > MAX_BYTES:
        raise ValueError(f"the image {_short(path)} has {status.st_size} bytes; the limit is {MAX_BYTES >> 20} MiB.")
    return status


def _from_data_url(url: str) -> bytes:
    kind, comma, content = url.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise ValueError(f"an image is the data URL {_short(url)}; expected data:image/png;base64,...")
    return _from_base64(content)


def _from_base64(text: Any) -> bytes:
    try:
        if len(text) > MAX_BYTES * 4 // 3 + 4:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        return base64.b64decode(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an image is not valid base64: {why_unusable(error)}.") from None


@contextmanager
def _plain_errors(name: str) -> Iterator[None]:
    """Turn whatever Pillow raises for a broken file into a ValueError."""
    try:
        yield
    except Image.UnidentifiedImageError:
        raise ValueError(f"{name} is in none of the formats {', '.join(FORMATS)}.") from None
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{name} is broken or incomplete: {_short(error)}") from None


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"
