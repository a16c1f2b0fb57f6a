"""How many target tokens have their logits at a time, where `memory.loss_chunk_tokens` is `auto`.

A chunk of logits is C * V elements. Few tokens make narrow matrix products, and add the output weight's whole gradient
up once a chunk; many take memory while everything that backward needs is alive. So a chunk gets a fixed share of the
memory that the weights leave on the device, as a power of two between bounds beyond which either cost is nothing.

It is chosen from the device's size, and not from what is free at the moment: the chunk decides how sums are rounded,
and a run that is resumed must choose as it did before.
"""

import math
from typing import Literal

from torch import Tensor, nn

from lean_ft.system.environment import memory_bytes
from lean_ft.system.shards import whole_numel

SHARE = 64  # a chunk of logits takes at most this part of the memory beside the weights
FEWEST_TOKENS, MOST_TOKENS = 256, 4096
UNKNOWN_MEMORY_TOKENS = 1024  # where the system does not tell its size


def loss_chunk_tokens(model: nn.Module, chosen: int | Literal["auto"]) -> int:
    """Returns `chosen`, or for `auto` the target tokens a chunk for this model, with an `output_weight` (V, D), and the
    device that it is on. Waits for nothing, and is the same whenever it is asked."""
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
