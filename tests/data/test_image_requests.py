"""Images in requests to an engine: the ids of a rendered chat, and the pixels that the trainer sees."""

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lean_ft.data import image_requests
from lean_ft.data.collate import batch_of
from lean_ft.data.columns import Document
from lean_ft.data.documents import renderer_of
from lean_ft.data.images import ImageKind
from lean_ft.data.kinds import EnginePrompt, engine_prompt
from lean_ft.data.rows import Row
from lean_ft.images.batch import Images
from lean_ft.images.rules import image_rules
from lean_ft.settings import PromptDataConfig
from tests.data.test_images import Family, asked, image, text
from tests.data.test_images import family_of as family_of
from tests.data.test_images import qwen as qwen
from tests.images.pictures import odd_picture
from tests.images.their_processors import FAMILIES, write_folder

KEPT = ["qwen3_vl", "gemma3", "mistral3"]  # families whose processors keep resized images
CHATS = [
    [asked(image(), text("what?"))],
    [asked(text("one\n\n"), image(), text("\n"), image(), text("\n\ntwo"))],
    [asked(image(), image(), text("\nwhat?"))],
    [asked(text("no <|image_pad|>[IMG] image"))],
]


def document_of(family: Family, messages: list[Any], names: list[str], **settings: Any) -> Document:
    row = {"prompt": messages, "images": names}
    config = PromptDataConfig.model_validate({"source": family.write(row), "max_prompt_length": 4096, **settings})
    ((document,), _) = renderer_of(config.rows([]), family.tokenizer)([Row(row, "row 1", folder=family.pictures)])
    return document


def prompt_of(family: Family, messages: list[Any], **settings: Any) -> Document:
    count = sum(part["type"] == "image" for message in messages for part in message["content"])
    return document_of(family, messages, ["wide.png", "tall.png"][:count], **settings)


def pixels_of_batch(document: Document) -> list[np.ndarray]:
    """The images (height, width, 3) of a batch, put together from patches."""
    found: Any = batch_of([document], kind="padded", row_tokens=len(document), pad_id=0).inputs["images"]
    assert isinstance(found, Images)
    kind = document.kinds[0]
    assert isinstance(kind, ImageKind)
    merge, side, whole, patches = kind.rules.merge, kind.rules.patch_size, list[np.ndarray](), found.patches.numpy()
    for rows, columns in found.grids:
        own, patches = patches[: rows * columns], patches[rows * columns :]
        blocks = own.reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
        whole.append(blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3))
    return whole


def sent(prompt: EnginePrompt) -> list[np.ndarray]:
    """The images of a request."""
    assert all(
        part["type"] == "image_url" and part["url"].startswith("data:image/png;base64,") for part in prompt.parts
    )
    files = [Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2]))) for part in prompt.parts]
    assert all((file.format, file.mode, file.getexif()) == ("PNG", "RGB", Image.Exif()) for file in files)
    return [np.asarray(file) for file in files]


@pytest.mark.parametrize("messages", CHATS, ids=["one", "between", "two", "none"])
@pytest.mark.parametrize("name", KEPT)
def test_a_request_has_the_ids_of_the_rendered_chat(family_of: Callable[[str], Family], name: str, messages: list[Any]):
    """The ids of transformers, before its processor writes the images' tokens; and behind them what was sampled."""
    family = family_of(name)
    document = prompt_of(family, messages)
    written = family.theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = family.theirs(written, add_special_tokens=False)["input_ids"]
    if not any(part["type"] == "image" for part in messages[0]["content"]):
        expected = document.ids.tolist()  # transformers reads the typed tokens as control tokens
    found = engine_prompt(document, family.tokenizer)
    assert found.ids == expected
    kind = document.kinds[0]
    assert isinstance(kind, ImageKind)
    later = [65, *kind.never_trained, family.image_id, 66, family.image_id]
    assert engine_prompt(document.continued(later), family.tokenizer) == EnginePrompt(expected + later, found.parts)


@pytest.mark.parametrize("name", KEPT)
def test_a_request_has_the_pixels_that_the_trainer_sees(family_of: Callable[[str], Family], name: str, tmp_path: Path):
    """Turned, transparent, gray, animated and flat images in several formats and modes."""
    family = family_of(name)
    for number in (14, 21, 23, 35, 40, 63, 70):
        (family.pictures / "odd").write_bytes(odd_picture(number))
        for settings in ({}, {"image_tokens": 20} if name != "gemma3" else {}):
            document = document_of(family, CHATS[0], ["odd"], **settings)
            (found,), (expected,) = sent(engine_prompt(document, family.tokenizer)), pixels_of_batch(document)
            assert np.array_equal(found, expected), (number, settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_rules_that_an_engine_would_apply_otherwise_are_refused(tmp_path: Path, qwen: Family, name: str):
    rules = replace(image_rules(write_folder(tmp_path, name)), placeholder="<|image_pad|>")  # a token of the tokenizer
    if not name.startswith("qwen") and name not in KEPT:
        with pytest.raises(ValueError, match=f"images of the model type {name} as the trainer does"):
            ImageKind(rules).check_engine(qwen.tokenizer)
        return
    assert rules.states_colors == ("image_mean" in FAMILIES[name][1])
    with pytest.raises(ValueError, match="names no image_mean and image_std"):
        ImageKind(replace(rules, states_colors=False)).check_engine(qwen.tokenizer)
    rules = replace(rules, states_colors=True)
    with pytest.raises(ValueError, match="the tokenizer has no token"):
        ImageKind(replace(rules, placeholder="<none>")).check_engine(qwen.tokenizer)
    if name.startswith("qwen"):
        for kept in (8, 100, None):
            ImageKind(rules.limited(kept)).check_engine(qwen.tokenizer)
        with pytest.raises(ValueError, match=r"scaled to data\.image_tokens=2, .* Set data\.image_tokens to 8 or more"):
            ImageKind(rules.limited(2)).check_engine(qwen.tokenizer)


def test_an_image_that_the_engine_would_change_is_refused_by_itself(qwen: Family):
    """Qwen's processor refuses sides that differ by more than 200 times, and rounding gives such sides."""
    Image.new("RGB", (7999, 40)).save(qwen.pictures / "flat.png")
    document = document_of(qwen, CHATS[0], ["flat.png"])
    with pytest.raises(ValueError, match="image 1 of a prompt has 500 x 2 patches after resizing, and an engine would"):
        engine_prompt(document, qwen.tokenizer)


def test_a_placeholder_before_an_image_is_refused(qwen: Family):
    document = prompt_of(qwen, CHATS[0])
    before = Document.of([65, qwen.image_id])
    ids, trained = (np.concatenate([getattr(part, n) for part in (before, document)]) for n in ("ids", "trained"))
    per_token = {n: np.concatenate([np.zeros(2, values.dtype), values]) for n, values in document.per_token.items()}
    with pytest.raises(ValueError, match="before its last image, and an engine would read it as an image"):
        engine_prompt(replace(document, ids=ids, trained=trained, per_token=per_token), qwen.tokenizer)


def test_an_image_is_encoded_once_and_the_latest_are_kept(qwen: Family, monkeypatch: pytest.MonkeyPatch):
    def encode(*args: Any) -> bytes:
        encoded.append(args)
        return bytes(30_000)

    encoded = list[Any]()
    monkeypatch.setattr(image_requests, "resized", encode)
    monkeypatch.setattr(image_requests, "_LATEST", image_requests._Latest(100_000))
    documents = [prompt_of(qwen, CHATS[0], image_tokens=number) for number in (8, 9, 10)]
    asked_for = [0, 0, 1, 0, 2, 0, 1, 0, 2]  # two fit; the longest unused one leaves
    for number in asked_for:
        engine_prompt(documents[number], qwen.tokenizer)
    assert len(encoded) == 5


def test_a_changed_image_is_an_error_that_is_not_kept(qwen: Family):
    Image.new("RGB", (50, 50), "red").save(qwen.pictures / "changing.png")
    document = document_of(qwen, CHATS[0], ["changing.png"])
    whole = (qwen.pictures / "changing.png").read_bytes()
    (qwen.pictures / "changing.png").write_bytes(whole + b" ")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"changing\.png: the image changed after the data was prepared"):
            engine_prompt(document, qwen.tokenizer)
