"""The number of target tokens per chunk of logits with `memory.loss_chunk_tokens=auto`.

A chunk has C * V logits. Small chunks make narrow matrix products and add the output weight's gradient often; large
chunks take memory while everything that backward needs is alive. A chunk gets a fixed share of the memory that the
weights leave on the device, rounded to a power of two within bounds.

The share is of the device's total memory, not of its free memory: the chunk size decides how sums are rounded, and a
resumed run must choose the same.
"""

import math
from typing import Literal

from torch import Tensor, nn

from lean_ft.system.environment import memory_bytes
from lean_ft.system.shards import whole_numel

SHARE = 64  # a chunk takes at most 1 / SHARE of the memory that the weights leave
FEWEST_TOKENS, MOST_TOKENS = 256, 4096
UNKNOWN_MEMORY_TOKENS = 1024  # if the memory size is unknown


def loss_chunk_tokens(model: nn.Module, chosen: int | Literal["auto"]) -> int:
    """Return `chosen`, or for `auto` the chunk size for this model (with an `output_weight` (V, D)) and its device."""
    if chosen != "auto":
        return chosen
    weight = model.output_weight
    assert isinstance(weight, Tensor)
    total_bytes = memory_bytes(weight.device)
    if total_bytes is None:
        return UNKNOWN_MEMORY_TOKENS
    room_bytes = total_bytes - sum(whole_numel(param) * param.element_size() for param in model.parameters())
    tokens = max(1, room_bytes // SHARE // (weight.shape[0] * weight.element_size()))
    return min(max(2 ** math.floor(math.log2(tokens)), FEWEST_TOKENS), MOST_TOKENS)
