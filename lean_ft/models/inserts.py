"""What inputs beside tokens change in a forward pass of the decoder.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from collections.abc import Sequence

from torch import Tensor

from lean_ft.models.attention.attention import Sight
from lean_ft.models.config import LayerConfig


class Inserts:
    """What the inputs of one forward pass change, where the decoder asks; this class: nothing.

    The part of the model that reads such inputs, as `VisionTower` reads images, makes one for each pass.
    """

    position_shift: Tensor | None = None  # (B, T), what the rotary position of each token adds to its position

    def embedded(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings (B, T, D) with those of inserts, and the ids (B, T) that further embeddings read."""
        return hidden, input_ids

    def sights(self, sight: Sight | None, layers: Sequence[LayerConfig]) -> list[Sight | None]:
        """What each layer's queries see beside the earlier tokens of their document. Called after `embedded`."""
        return [sight] * len(layers)

    def turned(self, positions: Tensor) -> Tensor:
        """The positions of rotations, (B or 1, T) or on three axes (3, B, T), from (B or 1, T)."""
        return positions

    def after(self, layer: int, hidden: Tensor) -> Tensor:
        """The hidden states (B, T, D) after a layer."""
        return hidden
