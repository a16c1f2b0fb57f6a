"""The images of a batch, as an argument of the decoder's forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:  # processes that tokenize load this file, and not torch
    from torch import Tensor


class Images(NamedTuple):
    """Patches of all distinct images of a batch, one image after the other, and where their embeddings go.

    Patches of one image are in blocks of `merge` x `merge`, row by row, so that a token's patches are consecutive. Some
    families cut an image into tiles. Each tile has its own grid, and its patches see no other tile.
    """

    patches: Tensor  # (P, C, p, p) uint8
    grids: tuple[tuple[int, int], ...]  # rows and columns of patches of each image; on the host, where sizes are needed
    places: Tensor  # (K,) int64, positions of image tokens in the flattened batch
    rows: Tensor  # (K,) int64, the row of the tower's output that each place gets; several places may get the same row
    embedded: list[Tensor] | None = None  # an empty list: keep the tower's output here for the next passes

    def encoded_once(self, model: Any) -> Self:
        """The same images. If the tower of `model` is not trained, the first pass keeps its output for later ones."""
        tower = model.vision
        is_trained = tower is None or any(parameter.requires_grad for parameter in tower.parameters())
        return self if is_trained or self.embedded is not None else self._replace(embedded=[])
