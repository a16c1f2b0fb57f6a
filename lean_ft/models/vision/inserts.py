"""What images change in a forward pass of the decoder. Its inputs:

| images         | `Images`, whose embeddings replace those of image tokens                                           |
| position_shift | (B, T) int32, what the rotary position of each token adds to its position, in families in which an |
|                | image takes fewer positions than tokens; an image's tokens get the image's first position          |

Shapes: B batch, T tokens of a row, D hidden size.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lean_ft.images.batch import Images
from lean_ft.models.attention.attention import Sight
from lean_ft.models.config import LayerConfig
from lean_ft.models.inserts import Inserts
from lean_ft.models.vision.places import on_axes, sight_of_images
from lean_ft.system.spelling import did_you_mean

if TYPE_CHECKING:
    from lean_ft.models.decoder import Decoder
    from lean_ft.models.vision.tower import VisionTower

_INPUTS = ("images", "position_shift")


class ImageInserts(Inserts):
    """Embeddings of images replace those of image tokens, and the tokens of an image may see each other."""

    def __init__(self, tower: "VisionTower", images: Images, position_shift: Tensor | None, has_axes: bool) -> None:
        self._tower, self._images, self._has_axes = tower, images, has_axes
        self.position_shift = position_shift

    def embedded(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        pad_id, images = self._tower.config.pad_id, self._images
        hidden, self._deep = self._tower.put(hidden, images)
        self._shape = input_ids.shape
        if pad_id is not None:
            input_ids = input_ids.flatten().index_fill(0, images.places, pad_id).view_as(input_ids)
        return hidden, input_ids

    def sights(self, sight: Sight | None, layers: Sequence[LayerConfig]) -> list[Sight | None]:
        config = self._tower.config
        if config.sees_image == "never":
            return super().sights(sight, layers)
        wider = sight_of_images(sight, self._images, config.merge, self._shape.numel())
        return [wider if config.is_seen_in(layer) else sight for layer in layers]

    def turned(self, positions: Tensor) -> Tensor:
        positions = positions.expand(self._shape)
        return on_axes(positions, self._images, self._tower.config.merge) if self._has_axes else positions

    def after(self, layer: int, hidden: Tensor) -> Tensor:
        if layer >= len(self._deep):
            return hidden
        return hidden.flatten(0, 1).index_add(0, self._images.places, self._deep[layer]).view_as(hidden)


class _Shifted(Inserts):
    """Positions of text behind images, in a pass without images."""

    def __init__(self, position_shift: Tensor | None) -> None:
        self.position_shift = position_shift


def inserts_of(model: "Decoder", inputs: Mapping[str, Any], device: torch.device, shares_rows: bool) -> Inserts:
    """The inserts of a forward pass with these inputs, of which those of None are absent.

    device: of the tokens. shares_rows: ranks share each row, whose images none of them can place.

    Raises ValueError for an input that the model does not read.
    """
    tower, inputs = model.vision, {name: value for name, value in inputs.items() if value is not None}
    if unknown := [name for name in inputs if name not in _INPUTS]:
        names = [*inspect.signature(type(model).forward).parameters, *_INPUTS]
        raise ValueError(f"the decoder has no input {unknown[0]}.{did_you_mean(unknown[0], names)}")
    if inputs and (tower is None or shares_rows):
        why = "ranks share a row" if shares_rows else "the model was loaded without its vision tower. Set model.images"
        raise ValueError(f"images are not supported: {why}.")
    images, position_shift = (inputs.get(name) for name in _INPUTS)
    if tower is None:
        return Inserts()
    if images is None and tower.is_sharded:
        images = tower.no_images(device)
    if images is None:
        return _Shifted(position_shift)
    return ImageInserts(tower, images, position_shift, any(rope.axes for rope, _ in model.rotary))
