"""Images of a batch: each distinct image is read once, in threads, since Pillow and NumPy do most of the work without
the GIL.

Legend: K image tokens of a batch, P patches, p pixels of a patch's side.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from lean_ft.data.images import BLANK, IMAGE_ROW, Grids, grids_of, num_embeddings, opened, references_of
from lean_ft.data.kinds import OfBatch
from lean_ft.images.batch import Images
from lean_ft.images.rules import ImageRules
from lean_ft.system.environment import usable_cores

if TYPE_CHECKING:
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns


@dataclass(frozen=True)
class ImagesOfBatch(OfBatch):
    """The distinct images that tokens of a batch show, before they are read."""

    grids: dict[bytes, Grids]
    """Grids of each distinct image by its reference."""
    places: np.ndarray  # (K,) int64: position of each image token in the flattened batch
    rows: np.ndarray  # (K,) int64: row of the tower's output that the token gets
    num_images: int
    """Number of images, with repeats."""
    rules: ImageRules

    @cached_property
    def counts(self) -> dict[str, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of images, with repeats, and of patches of the distinct images."""
        return {"images": self.num_images, "patches": sum(map(_num_patches, self.grids.values()))}

    def inputs(self) -> dict[str, Images]:
        """Decode the images. Raises ValueError for an image that is broken, or that changed since its row was
        prepared."""
        if not self.num_images:
            return {}
        rules = self.rules
        side = rules.patch_size
        patches = np.empty((self.counts["patches"], 3, side, side), dtype=np.uint8)
        ends = np.cumsum([_num_patches(grids) for grids in self.grids.values()])
        parts = np.split(patches, ends[:-1])

        def read(reference: bytes, part: np.ndarray) -> None:
            _read(reference, self.grids[reference], part, rules)

        list(_threads().map(read, self.grids, parts))  # raises the first error
        flat = tuple(grid for grids in self.grids.values() for grid in grids)
        places, rows = torch.from_numpy(self.places), torch.from_numpy(self.rows)
        return {"images": Images(torch.from_numpy(patches), flat, places, rows)}


def images_of_batch(columns: Columns, placed: Placed, rules: ImageRules) -> ImagesOfBatch:
    """Return the images of a batch. An image of a shared prompt counts once."""
    of_tokens = placed.of_tokens(IMAGE_ROW)
    tokens = np.flatnonzero(placed.is_own & (of_tokens > 0))
    firsts, grids, num_rows, num_images = dict[bytes, int](), dict[bytes, Grids](), 0, 0
    shown = np.empty(len(tokens), dtype=np.int64)
    texts, begins = np.unique(placed.text[tokens], return_index=True)
    for text, begin, end in zip(texts, begins, np.append(begins, len(tokens))[1:], strict=True):
        document = columns[int(placed.documents[text])]
        ends = np.cumsum(lengths := num_embeddings(document.per_document, rules.merge))
        embedding = of_tokens[tokens[begin:end]] - 1
        image = np.searchsorted(ends, embedding, side="right")
        starts, references, of_images = np.zeros(len(ends), dtype=np.int64), references_of(document), grids_of(document)
        for i in np.unique(image).tolist():
            reference = references[i]
            if reference not in firsts:
                firsts[reference], grids[reference] = num_rows, of_images[i]
                num_rows += int(lengths[i])
            starts[i], num_images = firsts[reference], num_images + 1
        shown[begin:end] = starts[image] + embedding - (ends - lengths)[image]
    return ImagesOfBatch(grids, placed.place[tokens], shown, num_images, rules)


def _num_patches(grids: Grids) -> int:
    return sum(rows * wide for rows, wide in grids)


def _read(reference: bytes, grids: Grids, patches: np.ndarray, rules: ImageRules) -> None:
    if reference.startswith(BLANK):
        return
    from lean_ft.images.reading import read_patches  # here, since texts do not need Pillow

    with opened(reference, grids, rules) as image:
        read_patches(image, rules, patches)


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads that decode images."""
    return ThreadPoolExecutor(min(8, usable_cores()), "image")  # each holds a decoded image
