"""Images of rows: where a row has them, and what they add to a document.

A row has images as content parts of its messages, or in the field `images` or `image`. These fill content parts without
an image, else the places of `<image>` in texts, else they come before the first user text, as in TRL. Numbers must
agree.

A chat template gets `{"type": "image"}` and writes a placeholder, which the family's text replaces before the row is
tokenized. Then the image tokens are repeated, and columns tell where the images of a document are:

| column            | values                                                                                       |
|-------------------|----------------------------------------------------------------------------------------------|
| image_row         | of a token: 1 + the number of its embedding among those of the document's images; 0 for text |
| position_shift    | of a token: its position on the time axis minus its index; only in families with M-RoPE      |
| image_grids       | of a document: rows and columns of patches of each grid                                      |
| image_tiles       | of a document: the number of grids of each image                                             |
| image_refs        | of a document: the references of all images, one after the other                             |
| image_ref_lengths | of a document: the number of bytes of each reference                                         |

All documents of a run with images have these columns. Sizes are read from headers, and the rest of a file is only
checked, so that a broken image makes a bad row now and does not end a run later. Images are decoded when their batch is
built (`lean_ft.data.image_batches`).

Prepared documents are cached by the content of their source files, and image files are separate: a reference has the
size and the time of its file. A start whose image files are not as they were prepares the rows anew, and so does every
start after rows were skipped because of an image (`lean_ft.data.prepare`). A file that changes during a run is an error
when it is decoded.

Source of the positions: Wang et al. 2024, https://arxiv.org/abs/2409.12191.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from lean_ft.data.columns import Columns, Document
from lean_ft.data.foreign_fields import is_given, refuse_part_keys
from lean_ft.data.kinds import EnginePrompt, Insert, Kind, OfBatch
from lean_ft.data.media import image_fields
from lean_ft.data.part_types import Messages, PartType, UnreadablePartError
from lean_ft.data.report import DataReport
from lean_ft.images.cuts import Size
from lean_ft.images.forms import KEYS, is_image
from lean_ft.images.rules import ImageLayout, ImageRules
from lean_ft.settings import RowsConfig
from lean_ft.system.units import counted
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.passages import Passage, Runs, with_part_texts

if TYPE_CHECKING:
    from PIL.Image import Image

    from lean_ft.data.collate import Placed
    from lean_ft.models import Decoder

IMAGE_ROW, POSITION_SHIFT = "image_row", "position_shift"  # columns of tokens
OF_IMAGES = "image_"  # prefix of the columns of images
_IMAGE_TYPES = ("image", "image_url", "input_image")
_UNTYPED_KEYS = ("image", "image_url", "path", "url", "base64", "bytes")  # of an image part without a type
Grids = tuple[tuple[int, int], ...]
BLANK = b"blank "  # begins the reference of an image of a plan, which has no pixels


class UnreadableImageError(UnreadablePartError):
    unit = "image"


class RowImage(NamedTuple):
    """An image whose size is known."""

    reference: bytes
    layout: ImageLayout


class ImageParts(PartType):
    """Images in content parts, and in the fields `images` and `image` of a row."""

    unit = "image"
    with_article = "an image"
    fields = ("images", "image")
    mark = "<image>"
    not_read = "the row has an image, and model.images=none ignores images. Set model.images=frozen."
    remedy_of_prompt = "Use a vision model with model.images=frozen."
    embedded_model = ("model.path=tiny-images", "model.images=frozen")
    feature = "Image"

    def claims(self, part: Mapping[str, Any]) -> bool:
        return part.get("type") in _IMAGE_TYPES or (
            "type" not in part and any(is_given(part.get(key)) for key in _UNTYPED_KEYS)
        )

    def read(self, part: dict[str, Any], where: str) -> dict[str, Any]:
        """Also return `index`, the image's position in the row's images, if an empty part has an index."""
        content = {key: part[key] for key in KEYS if is_given(part.get(key))}
        self._check(part, content, where)
        index = None if content else part.get("index")
        if index is not None and not (type(index) is int or (type(index) is float and index.is_integer())):
            raise ValueError(f"{where} has a content part with the `index` {index!r:.40}; expected a whole number.")
        return {"type": "image", "image": content or None} | ({} if index is None else {"index": int(index)})

    def _check(self, part: dict[str, Any], content: Mapping[str, Any], where: str) -> None:
        """Raise ValueError if a part has several images, a text, or a key that must not be dropped.

        content: the keys that hold its image.
        """
        if len(content) > 1 and content.keys() != {"bytes", "path"}:
            raise ValueError(f"{where} has a content part with the images {' and '.join(content)}. Keep one of them.")
        if is_given(part.get("text")):
            raise ValueError(f"{where} has a content part with an image and a text. Write two parts.")
        refuse_part_keys(self.further_keys(part), where)

    def further_keys(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Also those of the nested mappings that hold the image."""
        levels: list[Mapping[str, Any]] = [part]
        for level in levels:
            levels += [level[key] for key in KEYS if isinstance(level.get(key), Mapping)]
        read = {"type", "text", "media_type", *KEYS}  # the format is read from the file itself
        if not any(is_given(part.get(key)) for key in KEYS):
            read.add("index")
        return {key: value for level in levels for key, value in level.items() if key not in read and is_given(value)}

    def is_content(self, start: bytes) -> bool:
        return is_image(start)

    def take(self, messages: Messages, fields: Mapping[str, Any]) -> tuple[Messages, list[Any]]:
        listed = _listed(fields)
        if listed and not _images_in(messages):
            messages = _with_places(messages, len(listed))
        images = _images_in(messages)
        if places := _places_in(messages):
            return messages, _by_index(images, places, listed)
        if (empty := images.count(None)) != len(listed):
            raise ValueError(
                f"the row has {counted(len(listed), 'images')} in its field `images`, and "
                f"{counted(empty, 'empty content parts')} of the type image. These numbers must agree."
            )
        rest = iter(listed)
        return messages, [next(rest) if image is None else image for image in images]

    def kinds(self, tokenizer: Tokenizer, config: RowsConfig | None) -> list[Kind]:
        rules = rules_in(tokenizer)
        if config is not None and config.image_tokens is not None:
            if rules is None:
                raise ValueError(
                    f"data.image_tokens={config.image_tokens} needs images. Set model.images=frozen, or remove it."
                )
            rules = rules.limited(config.image_tokens)
        if rules is not None and config is not None:
            rules.check()
        return [] if rules is None else [ImageKind(rules)]


IMAGES = ImageParts()


def rules_in(tokenizer: Tokenizer) -> ImageRules | None:
    """How images become tokens; None if the tokenizer reads none."""
    return next((media for media in tokenizer.media if isinstance(media, ImageRules)), None)


def _listed(fields: Mapping[str, Any]) -> list[Any]:
    """The images in a row's fields."""
    names = [name for name in IMAGES.fields if is_given(fields.get(name))]
    if len(names) > 1:
        raise ValueError("the row has the fields `images` and `image`. Keep one of them.")
    value = fields[names[0]] if names else []
    return value if isinstance(value, list) else [value]


def _images_in(messages: Messages) -> list[dict[str, Any] | None]:
    """The image of each content part that is one; None if the part marks its place only."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["image"] for parts in lists for part in parts if part["type"] == "image"]


def _places_in(messages: Messages) -> list[Any]:
    """The `index` of each content part that has one."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["index"] for parts in lists for part in parts if "index" in part]


def _by_index(images: Sequence[Any], places: Sequence[Any], listed: Sequence[Any]) -> list[Any]:
    """Return a row's images in order. Those of empty parts are taken from `listed` by their `index`, counted from 0.

    Raises ValueError unless every empty part has an index, and every image a part.
    """
    if len(places) != images.count(None) or {*places} != {*range(len(listed))}:
        raise ValueError(
            f"the row has {counted(len(listed), 'images')} in its field `images`, and its content parts of the type "
            f"image have the `index` {', '.join(map(str, places))}. Give each empty part an index from 0 to "
            f"{max(0, len(listed) - 1)}, and each image a part; or remove `index`."
        )
    rest = iter(places)
    return [listed[next(rest)] if image is None else image for image in images]


def _with_places(messages: Messages, number: int) -> Messages:
    """Add content parts for `number` images: where texts have `<image>`, or else before the first user text."""
    place: dict[str, Any] = {"type": "image", "image": None}
    texts = ["" if message["role"] == "assistant" else message["content"] or "" for message in messages]
    marks = sum(text.count(IMAGES.mark) for text in texts)
    if not marks:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ValueError("the row has an image and no user message. Mark the image's place as a content part.")
        text = {"type": "text", "text": messages[first]["content"]}
        return [*messages[:first], {**messages[first], "content": [place] * number + [text]}, *messages[first + 1 :]]
    if marks != number:
        raise ValueError(
            f"the row has {counted(number, 'images')} in its field `images`, and its texts have {IMAGES.mark} {marks} "
            "times. These numbers must agree."
        )
    placed = Messages()
    for message, text in zip(messages, texts, strict=True):
        if IMAGES.mark in text:
            first, *others = ({"type": "text", "text": part} for part in text.split(IMAGES.mark))
            parts = [first, *(part for other in others for part in (place, other))]
            message = {**message, "content": [part for part in parts if part.get("text") != ""]}
        placed.append(message)
    return placed


# Documents ------------------------------------------------------------------------------------------------------------


def read_image(value: Any, folder: Path, rules: ImageRules) -> RowImage:
    """Read the size of a row's image. Raises UnreadableImageError if it is missing or broken, or if the family refuses
    it."""
    from lean_ft.images.reading import path_of, reference

    try:
        found = reference(value, folder)
        size = _read_size(found, rules) if path_of(found) is None else _known_size(found, rules)
        if isinstance(size, str):
            raise ValueError(size)
        return RowImage(found, rules.layout(size))
    except ValueError as error:
        raise UnreadableImageError(str(error)) from None


def _read_size(reference: bytes, rules: ImageRules) -> Size | str:
    """Check an image. Return its size, or an error message."""
    from lean_ft.images.reading import check, open_image, size_of

    try:
        with open_image(reference, rules) as image:
            size = size_of(image)
            check(image)
            return size
    except ValueError as error:
        return str(error)


@lru_cache(1 << 12)
def _known_size(reference: bytes, rules: ImageRules) -> Size | str:
    """`_read_size`, cached for files that several rows show."""
    return _read_size(reference, rules)


def with_columns(document: Document, images: Sequence[RowImage], rules: ImageRules, image_id: int | None) -> Document:
    """Add the columns of `images` to a document.

    Tokens in and around an image are not trained, because no image can follow a token that the model samples. Raises
    ValueError if the document has another number of image tokens.
    """
    is_image = document.ids == image_id
    grids = [grid for image in images for grid in image.layout.grids]
    runs = [run for image in images for run in image.layout.runs]
    if is_image.sum() != sum(runs):
        raise ValueError(
            f"the text has {int(is_image.sum()):,} image tokens {rules.token}, and its images need {sum(runs):,}. Put "
            "images into content parts or the field `images` of chats; texts and ids have none."
        )
    per_token = {IMAGE_ROW: np.where(is_image, np.cumsum(is_image), 0).astype(np.int32)}
    if rules.shifts_positions:
        per_token[POSITION_SHIFT] = _shifts(is_image, np.array(grids, dtype=np.int64).reshape(-1, 2) // rules.merge)
    references = [np.frombuffer(image.reference, dtype=np.uint8) for image in images]
    per_document = {
        "image_grids": np.array(grids, dtype=np.int32).ravel(),
        "image_tiles": np.array([len(image.layout.grids) for image in images], dtype=np.int32),
        "image_refs": np.concatenate([np.empty(0, dtype=np.uint8), *references]),
        "image_ref_lengths": np.array(list(map(len, references)), dtype=np.int64),
    }
    return Document(
        document.ids,
        document.trained & ~np.isin(document.ids, list(rules.marks)),
        {**document.per_token, **per_token},
        {**document.per_document, **per_document},
        (*document.kinds, ImageKind(rules)),
    )


def _shifts(is_image: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """The column `position_shift` (T,); grids: (I, 2) rows and columns of tokens of each image, whose tokens are
    consecutive.

    An image takes one step of time, and the text behind it continues at its start + its longer side.
    """
    shifts, firsts = np.zeros(len(is_image), dtype=np.int32), np.flatnonzero(is_image)
    lengths = grids.prod(1)
    for first, length, longer in zip(
        firsts[np.cumsum(lengths) - lengths], lengths, grids.max(1, initial=0), strict=True
    ):
        before, end = shifts[first], first + length
        shifts[first:end] = before - np.arange(length)
        shifts[end:] = before + longer - length
    return shifts


def num_embeddings(columns: Mapping[str, np.ndarray], merge: int) -> np.ndarray:
    """(I,) number of embeddings of each image of a document, or of all stored documents."""
    of_grids = np.append(0, np.cumsum(columns["image_grids"].reshape(-1, 2).prod(1) // merge**2))
    return np.diff(of_grids[np.append(0, np.cumsum(columns["image_tiles"]))])


def image_of_tokens(document: Document) -> np.ndarray:
    """(T,) number of the image that each token shows, -1 for text."""
    if not has_images(document):
        return np.full(len(document), -1)
    rows = document.per_token[IMAGE_ROW]
    ends = np.cumsum(num_embeddings(document.per_document, rules_of(document).merge))
    return np.where(rows > 0, np.searchsorted(ends, rows - 1, side="right"), -1)


def has_images(document: Document) -> bool:
    return len(document.per_document.get("image_tiles", ())) > 0


def references_of(document: Document) -> list[bytes]:
    """The reference of each image of a document."""
    if not has_images(document):
        return []
    references = document.per_document["image_refs"].tobytes()
    ends = np.cumsum(document.per_document["image_ref_lengths"]).tolist()
    return [references[start:end] for start, end in pairwise([0, *ends])]


def grids_of(document: Document) -> list[Grids]:
    """The grids of each image of a document."""
    columns = document.per_document
    of_images = np.split(columns["image_grids"].reshape(-1, 2), np.cumsum(columns["image_tiles"])[:-1])
    return [tuple((int(rows), int(wide)) for rows, wide in some) for some in of_images]


@contextmanager
def opened(reference: bytes, grids: Grids, rules: ImageRules) -> Iterator[Image]:
    """Open an image of a document, which has these grids. Raises ValueError if it is unreadable, or if its size is not
    what it was when its row was prepared."""
    from lean_ft.images.reading import open_image, size_of  # here, since texts do not need Pillow

    with open_image(reference, rules) as image:
        if rules.layout(size_of(image)).grids != grids:
            raise ValueError(
                f"{getattr(image, 'filename', '') or 'an image'} now has {image.width} x {image.height} pixels, "
                "another size than when its row was prepared. Start the run again."
            )
        yield image


def rules_of(document: Document) -> ImageRules:
    """How the images of a document are read. It has columns of images."""
    return next(kind.rules for kind in document.kinds if isinstance(kind, ImageKind))


@dataclass(frozen=True)
class ImageKind(Kind):
    """The columns of images."""

    rules: ImageRules
    replaced: ClassVar[tuple[str, ...]] = (IMAGE_ROW,)
    unit: ClassVar[str] = "image"
    reader: ClassVar[str] = "a vision tower"
    counts: ClassVar[tuple[str, ...]] = ("images", "patches")

    def measured(self, passage: Passage, folder: Path) -> Passage:
        images = [read_image(value, folder, self.rules) for value in passage.parts[self.unit]]
        runs = Runs(self.unit, self.rules.token, [run for image in images for run in image.layout.runs])
        measured = with_part_texts(passage, self.rules.placeholder, [image.layout.text for image in images], runs)
        return replace(measured, parts={**passage.parts, self.unit: images})

    def with_columns(self, document: Document, parts: Sequence[RowImage], tokenizer: Tokenizer) -> Document:
        return with_columns(document, parts, self.rules, tokenizer.token_id(self.rules.token))

    def unseen(self, fields: Mapping[str, Any]) -> list[str]:
        return image_fields(fields)

    def check(self, report: DataReport) -> None:
        """Places of images are unread fields that look like images, and marks in texts."""
        unseen, marked = report.unseen.get(self.unit), report.unread.get(f"{IMAGES.mark} in texts", 0)
        if self.unit in report.shown or self.unit in report.unreadable or not (unseen or marked):
            return
        reason = f"and {counted(marked, 'rows')} {'has' if marked == 1 else 'have'} {IMAGES.mark} in texts"
        if unseen:
            name, number = max(unseen.items(), key=lambda item: item[1])
            reason = f"while the field `{name}` of {counted(number, 'rows')} looks like paths of images"
            remedy = f"{quote(f'data.columns.images={name}')} to read it, or "
        else:
            remedy = "data.columns.images=FIELD to read the images of a field, or "
        raise ValueError(f"no row shows an image, {reason}. Set {remedy}model.images=none to train on the texts alone.")

    @property
    def never_trained(self) -> frozenset[int]:
        """The ids that open and close an image: no image can follow a sampled one."""
        return self.rules.marks

    def behind(self, before: Document, document: Document) -> Document:
        """A text without images: those of `before` are the images of both, and positions continue."""
        theirs = dict(document.per_token)
        if POSITION_SHIFT in theirs and len(before):
            theirs[POSITION_SHIFT] = np.full_like(theirs[POSITION_SHIFT], before.per_token[POSITION_SHIFT][-1])
        images = {name: values for name, values in before.per_document.items() if name.startswith(OF_IMAGES)}
        return replace(document, per_token=theirs, per_document={**document.per_document, **images})

    def is_in(self, document: Document) -> bool:
        return has_images(document)

    def is_read_by(self, model: Decoder) -> bool:
        return model.vision is not None

    def next_cut(self, document: Document, place: int) -> int:
        """Behind the image whose tokens would be cut."""
        image = image_of_tokens(document)
        last = image[:place].max(initial=-1)
        return place if last < 0 else max(place, int(np.flatnonzero(image == last)[-1]) + 1)

    def of_batch(self, columns: Columns, placed: Placed) -> OfBatch:
        from lean_ft.data.image_batches import images_of_batch  # loads torch

        return images_of_batch(columns, placed, self.rules)

    def work(self, columns: Columns) -> np.ndarray:
        """(N,) patches of the images of each document."""
        sums = np.append(0, np.cumsum(columns.values["image_grids"].reshape(-1, 2).prod(1)))
        return np.diff(sums[columns.offsets["image_grids"] // 2])[columns.rows]

    def fill(self, document: Document, number: int) -> Document:
        """Images of the size that leaves the fewest tokens over, and the largest of such sizes. They are never read."""
        rules, length = self.rules, len(document)
        sides = [n * rules.patch_size * rules.merge for n in range(math.isqrt(length), 0, -1)]
        layouts = [rules.layout(Size(side, side * eighths // 8)) for side in sides for eighths in range(8, 0, -1)]
        layout = max(layouts, key=lambda one: length - length % sum(one.runs))  # 0 if it does not fit
        count = length // sum(layout.runs)
        ids = np.zeros_like(document.ids)
        ids[: count * sum(layout.runs)] = 1
        images = [RowImage(BLANK + b"%d %d" % (number, i), layout) for i in range(count)]
        return with_columns(replace(document, ids=ids), images, rules, image_id=1)

    def fingerprint(self, columns: Columns) -> str:
        """Hash of the sizes of images: their files are no part of the source's content."""
        arrays = [columns.lengths, *(columns.values[name] for name in ("image_grids", "image_tiles"))]
        return hashlib.blake2b(b"".join(array.tobytes() for array in arrays)).hexdigest()

    def changed(self, columns: Columns) -> str:
        from lean_ft.images.reading import path_of, reference

        digest, changed = hashlib.blake2b(digest_size=16), False
        for document in columns:
            for known in references_of(document):
                if (path := path_of(known)) is not None:
                    found = b""
                    with suppress(ValueError):
                        found = reference(path, Path())
                    digest.update(found)
                    changed |= found != known
        return digest.hexdigest() if changed else ""

    def describe(self, columns: Columns, report: DataReport, sides: int) -> None:
        numbers = np.diff(columns.offsets["image_tiles"])[columns.rows]
        tokens = int(self.work(columns).sum()) // self.rules.merge**2
        report.of_kinds[self.unit] = [int(numbers[::sides].sum()), tokens]

    def num_tokens(self, columns: Columns) -> np.ndarray:
        return num_embeddings(columns.values, self.rules.merge)

    def inserts(self, document: Document) -> list[Insert]:
        """Each image that a document shows, with its size in pixels. Raises ValueError for one that cannot be
        opened."""
        from lean_ft.images.reading import open_image, size_of, thumbnail_url

        image, references, shown = image_of_tokens(document), references_of(document), []
        for number in np.unique(image[image >= 0]).tolist():
            first, last = np.flatnonzero(image == number)[[0, -1]].tolist()
            with open_image(references[number]) as opened:
                size = size_of(opened)
            text = f"[image {size.width}x{size.height}, {last + 1 - first:,} tokens]"
            shown.append(Insert(first, last + 1, text, partial(thumbnail_url, references[number])))
        return shown

    def check_engine(self, tokenizer: Tokenizer) -> None:
        from lean_ft.data.image_requests import check_rules  # loads Pillow

        check_rules(self.rules, tokenizer)

    def engine_prompt(self, document: Document, tokenizer: Tokenizer) -> EnginePrompt:
        from lean_ft.data.image_requests import with_placeholders

        return with_placeholders(document, self.rules, tokenizer)


def image_part(path: str, tokenizer: Tokenizer) -> tuple[dict[str, Any], int]:
    """Return an image file as a content part of a message, and its number of tokens. Raises ValueError if it cannot be
    read."""
    if (rules := rules_in(tokenizer)) is None:
        raise ValueError("the model reads texts alone, or was loaded with model.images=none.")
    file = str(Path(path.strip("'\"")).expanduser().resolve())  # terminals write dropped files in quotes
    return {"type": "image", "path": file}, sum(read_image(file, Path(), rules).layout.runs)
