"""The random bits of the Triton kernel of 8-bit AdamW, computed by torch."""

import torch
from torch import Tensor


class HashedNoise:
    """Draws 16 bits per element, in the place of `RoundingNoise`."""

    def __init__(self, keys: tuple[int, int]) -> None:
        self._keys, self._drawn = keys, 0

    def draw(self, num_elements: int) -> Tensor:
        """int16 (num_elements,) of the next elements."""
        element = torch.arange(self._drawn, self._drawn + num_elements)
        self._drawn += num_elements
        word = (element // 2 + self._keys[0]) % 2**32
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15 ^ self._keys[1] % 2**32) * 0x846CA68B % 2**32
        bits = torch.where(element % 2 == 0, word ^ word >> 16, word >> 16)
        return bits.to(torch.int16)
