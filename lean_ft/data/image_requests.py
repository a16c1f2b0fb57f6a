"""Images in requests to an inference engine.

An engine gets one placeholder per image, as in a rendered chat, and computes the image's tokens itself. Its processor
resizes images with torchvision, which rounds otherwise than Pillow. So an image is sent upright and resized, as a PNG
file whose size the engine's processor keeps: then both sides see the same pixels. Families that resize or cut such an
image again are refused.

Source: vLLM 0.32, entrypoints/scale_out/token_in_token_out/serving.py and multimodal/processing/processor.py.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np

from lean_ft.data.columns import Document
from lean_ft.data.images import Grids, grids_of, image_of_tokens, opened, references_of
from lean_ft.data.kinds import EnginePrompt
from lean_ft.images.cuts import Size
from lean_ft.images.reading import resized
from lean_ft.images.rules import ImageRules
from lean_ft.tokenizers import Tokenizer

# Model types whose images vLLM and the trainer read alike. Each of their image processors was compared with a real
# server (docs/images.md).
_READ_ALIKE = ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
_SIDES = [side for power in range(5, 13) for side in (2**power, 2**power * 11 // 8)]  # 32 to 5,632
_SHAPES = [Size(wide, high) for wide in _SIDES for high in _SIDES if max(wide, high) <= 8 * min(wide, high)]
_NUMBERS = [2**i for i in range(2, 15)]  # of tokens


def check_rules(rules: ImageRules, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless an engine sees the images of these rules as the trainer does."""
    if rules.family not in _READ_ALIKE:
        raise ValueError(
            f"generation.engine=vllm is not known to see images of the model type {rules.family} as the trainer does; "
            f"expected one of {', '.join(_READ_ALIKE)}. Set generation.engine=own, or model.images=none."
        )
    if tokenizer.token_id(rules.placeholder) is None:
        raise ValueError(
            f"the tokenizer has no token {rules.placeholder}, and requests to an engine mark images with it. Set "
            "generation.engine=own, or add the token to the tokenizer."
        )
    if not rules.states_colors:
        raise ValueError(
            "the model's preprocessor_config.json or processor_config.json names no image_mean and image_std, and vLLM "
            f"then leaves colors as they are. Add image_mean: {[*rules.mean]} and image_std: {[*rules.std]}."
        )
    if (size := _changed_size(rules)) is None:
        return
    numbers = (number for number in _NUMBERS if (limited := _limited(rules, number)) and not _changed_size(limited))
    remedy = "" if (number := next(numbers, None)) is None else f"data.image_tokens to {number} or more, or "
    raise ValueError(
        f"the model's image processor would resize an image of {size.width} x {size.height} pixels again that has been "
        f"scaled to data.image_tokens={rules.max_tokens}, so an engine would see other pixels than the trainer. Set "
        f"{remedy}generation.engine=own."
    )


def _limited(rules: ImageRules, number: int) -> ImageRules | None:
    with suppress(ValueError):
        return rules.limited(number)


def _changed_size(rules: ImageRules) -> Size | None:
    """The size of an image that an engine's processor would change after the rules; None if none of many is."""
    for size in _SHAPES:
        with suppress(ValueError):  # the family refuses the shape
            grids = rules.layout(size).grids
            if _kept_size(grids, rules) is None:
                return size
    return None


def _kept_size(grids: Grids, rules: ImageRules) -> Size | None:
    """The size in pixels of a resized image with these grids; None if an engine's processor would change it."""
    (rows, columns), side = grids[0], rules.patch_size
    size = Size(columns * side, rows * side)
    with suppress(ValueError):
        return size if len(grids) == 1 and rules.keeps(size) else None


class _Shown(NamedTuple):
    """An image of a document."""

    first: int  # token of it
    end: int
    before: str = ""  # text around it that the family writes
    behind: str = ""
    url: str = ""


def with_placeholders(document: Document, rules: ImageRules, tokenizer: Tokenizer) -> EnginePrompt:
    """A document with images, for an engine. Image tokens that were sampled behind the images stay text.

    Raises ValueError for an image that cannot be read or that the engine would change.
    """
    placeholder, shown = tokenizer.token_id(rules.placeholder), _shown(document, rules)
    assert placeholder is not None, "check_rules was not called"
    around = [_Shown(0, 0), *shown, _Shown(len(document), len(document))]
    texts = [
        _without(document.ids[one.end : next.first].tolist(), one.behind, next.before, tokenizer)
        for one, next in pairwise(around)
    ]
    if any(placeholder in text for text in texts[:-1]):  # the engine replaces the first ones
        raise ValueError(
            f"the text of a prompt has the image token {rules.placeholder} before its last image, and an engine would "
            "read it as an image. Remove it from the row, or set generation.engine=own."
        )
    ids = texts[0]
    for text in texts[1:]:
        ids = [*ids, placeholder, *text]
    return EnginePrompt(ids, [{"type": "image_url", "url": one.url} for one in shown])


def _shown(document: Document, rules: ImageRules) -> list[_Shown]:
    found, image = list[_Shown](), image_of_tokens(document)
    for number, (reference, grids) in enumerate(zip(references_of(document), grids_of(document), strict=True)):
        if (size := _kept_size(grids, rules)) is None:
            rows, columns = grids[0]
            raise ValueError(
                f"image {number + 1} of a prompt has {columns} x {rows} patches after resizing, and an engine would "
                "resize it again. Remove its row, or set generation.engine=own."
            )
        first, last = np.flatnonzero(image == number)[[0, -1]].tolist()
        before, *_, behind = rules.layout(size).text.split(rules.token)
        found.append(_Shown(first, last + 1, before, behind, _LATEST.url(reference, grids, rules, size)))
    return found


def _without(ids: list[int], start: str, end: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens without the texts that the family writes around images: `start`, of the image before them, and `end`,
    of the image behind them. Tokens may cross a border, as merged line breaks do."""
    num_first = next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= len(start))
    from_last = next(n for n in range(len(ids), -1, -1) if len(tokenizer.decode(ids[n:])) >= len(end))
    if num_first > from_last:
        return tokenizer.encode(tokenizer.decode(ids)[len(start) :].removesuffix(end))
    first, last = tokenizer.decode(ids[:num_first]), tokenizer.decode(ids[from_last:])
    assert first.startswith(start) and last.endswith(end), (first, last)
    inner = ids[num_first:from_last]
    return tokenizer.encode(first[len(start) :]) + inner + tokenizer.encode(last.removesuffix(end))


class _Latest:
    """The data URLs of the latest images: all completions of a prompt, and their turns, have the same ones."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._num_bytes, self._lock = most_bytes, 0, Lock()
        self._urls = OrderedDict[tuple[bytes, ImageRules], Future[str]]()

    def url(self, reference: bytes, grids: Grids, rules: ImageRules, size: Size) -> str:
        """Raises ValueError for an image that is broken, or that changed since its row was prepared."""
        key, new = (reference, rules), Future[str]()
        with self._lock:
            found = self._urls.setdefault(key, new)
            self._urls.move_to_end(key)
        if found is new:
            self._encode(key, new, grids, size)
        return found.result()

    def _encode(self, key: tuple[bytes, ImageRules], future: Future[str], grids: Grids, size: Size) -> None:
        reference, rules = key
        try:
            with opened(reference, grids, rules) as image:
                url = f"data:image/png;base64,{base64.b64encode(resized(image, rules, size)).decode()}"
        except BaseException as error:
            with self._lock:
                del self._urls[key]
            return future.set_exception(error)
        future.set_result(url)
        with self._lock:
            self._num_bytes += len(url)
            for old in [one for one, url in self._urls.items() if url.done() and one != key]:
                if self._num_bytes > self._most_bytes:
                    self._num_bytes -= len(self._urls.pop(old).result())


_LATEST = _Latest(1 << 27)
