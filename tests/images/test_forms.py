"""The forms of an image: base64 text and paths are told apart by their content."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lean_ft.images.forms import as_url, image_in, is_base64
from lean_ft.images.reading import open_image, reference


def saved(kind: str, **settings: Any) -> bytes:
    Image.new("RGB", (90, 60), "red").save(file := io.BytesIO(), kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_base64_of_an_image_is_no_path(kind: str):
    encoded = saved(kind)
    plain, lines = base64.b64encode(encoded).decode(), base64.encodebytes(encoded).decode()
    for text in (plain, lines, "\n " + plain + "\n", base64.urlsafe_b64encode(encoded).decode()):
        assert is_base64(text)
        for value in (text, {"image": text}, {"url": text}, {"path": text}, {"image_url": {"url": text}}):
            assert image_in(value) == encoded
    sources: list[Any] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": plain}},
        {"type": "image", "data": plain, "mimeType": "image/png"},
        {"bytes": plain, "path": None},
        {"bytes": encoded, "path": "a.png"},
        {"base64": lines},
        {"source": {"type": "url", "url": f"data:;base64,{plain}"}},
    ]
    assert {image_in(value) for value in sources} == {encoded}


PATHS = [
    "/9j/a.jpg",
    "Qk1234567890123456",
    "R0lGOD.gif",
    "iVBORw0KGgo.png",
    "UklGRabcdefgh",
    "SUkq/x",
    "a" * 300,
    "a b",
    "é",
    "/",
]


def test_paths_are_no_base64(tmp_path: Path):
    assert [path for path in PATHS if is_base64(path)] == []
    (folder := tmp_path / "UklGRabc").mkdir()
    (folder / "defgh").write_bytes(saved("PNG"))  # a name of base64's alphabet, without an ending
    with open_image(reference("UklGRabc/defgh", tmp_path)) as image:
        assert image.size == (90, 60)


def test_texts_that_are_neither_name_themselves(tmp_path: Path):
    text = base64.b64encode(bytes(3000)).decode()
    with pytest.raises(
        ValueError, match=r"a text of 4000 characters, 'AAAA.*\(40.. characters\).*: neither a path nor base64"
    ):
        reference(text, tmp_path)
    cut = base64.b64encode(saved("PNG")).decode()[:-3]
    for value in (cut, {"base64": cut}, {"bytes": "photo.png"}, {"source": {"type": "base64", "data": 5}}):
        with pytest.raises(ValueError, match="not valid base64"):
            reference(value, tmp_path)
    with pytest.raises(ValueError, match=r"an object of \['type', 'file_id'\]; expected bytes, base64"):
        reference({"type": "image", "source": {"type": "file", "file_id": "f"}}, tmp_path)


def test_images_of_requests_become_data_urls():
    assert as_url({"source": {"type": "base64", "data": "AAAA"}}) == "data:;base64,AAAA"
    assert as_url({"source": {"type": "url", "url": "https://x/a.png"}}) == "https://x/a.png"
    assert as_url("/etc/passwd") == "/etc/passwd"
    with pytest.raises(ValueError, match=r"an image is b'GIF'; expected a text"):
        as_url({"bytes": b"GIF"})
