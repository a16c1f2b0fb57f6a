"""What looks like a picture, a film or a sound under a name that lean_ft does not read."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lean_ft.data.media import kind_of_name, medium_of


def png() -> bytes:
    Image.new("RGB", (40, 40), "red").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


CONTENT: list[tuple[Any, str]] = [
    (png(), "image"),
    (base64.b64encode(png()).decode(), "image"),
    ("data:video/mp4;base64,AAAA", "video"),
    ({"bytes": png(), "path": None}, "image"),
    ([{"bytes": png(), "path": "a.png"}], "image"),
    ({"array": np.zeros(9), "sampling_rate": 16_000, "path": "a.wav"}, "audio"),
    (Image.new("L", (2, 2)), "image"),
    (b"RIFF0000WAVEfmt ", "audio"),
    (b"\0\0\0\x20ftypisom", "video"),
]
FILES: list[tuple[Any, str]] = [
    ("photos/0.jpg", "image"),
    ("Photo of me.JPEG", "image"),
    ("https://example.org/a.webp?size=3", "image"),
    (["a.png", "b.png"], "image"),
    ('["a.png"]', "image"),
    ({"path": "a.gif", "bytes": None}, "image"),
    ("clip.mp4", "video"),
]
TEXTS: list[Any] = [
    "See a.png for the picture.", "1.5", "web", "main.py", "", "[]", "video transcript", 7, None, [0.1, 0.2],
    {"id": 4}, b"text",
    "/9j/ is the first word of this long sentence, which is no picture at all, as its spaces and its commas show.",
]  # fmt: skip


def test_content_and_files_are_told_from_texts():
    for value, kind in CONTENT:
        assert medium_of(value) == (kind, True), value
    for value, kind in FILES:
        assert medium_of(value) == (kind, False), value
    for value in TEXTS:
        assert medium_of(value) is None, value
    for array in ([[0.1, 0.2], [0.3, 0.4]], np.zeros((2, 2))):
        assert (medium_of(array), medium_of(array, "image")) == (None, ("image", False))
    assert (medium_of(b"raw"), medium_of(b"raw", "image")) == (None, ("image", True))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("image", "img IMG_2 images picture imagePath image_base64 pixel_values image_grid_thw photo_url screenshot"),
        ("video", "video frames frame_paths clip"),
        ("audio", "audio sound_file waveform"),
        (
            None,
            "image_id source file_name num_images video_transcript target_image imagination bbox speech_act caption",
        ),
    ],
)
def test_names_that_mean_a_medium(kind: str | None, names: str):
    assert {name: kind_of_name(name) for name in names.split()} == dict.fromkeys(names.split(), kind)
