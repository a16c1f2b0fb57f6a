"""Frozen stacks of experts in pinned host memory, copied to the GPU for each layer's forward and backward pass.

A mixture's experts are most of its weights: 57 of the 60 GiB of gpt-oss-120b in 4 bits. While one layer computes, the stacks of the
next layer are copied in, so the stacks of two layers are on the device. They are copied as they are stored, and a layer that is
recomputed for its backward pass uses one copy for both. A training step thus copies all stacks twice per micro-batch.

Without gradients, as in sampling, kernels read the stacks over the link: the experts of a few tokens are a small part of a stack.

Source: our own; the idea is from ZeRO-Inference (Aminabadi et al. 2022, arXiv:2207.00032).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.models.frozen_weight import Frozen
from lean_ft.models.moe import Experts, experts_of
from lean_ft.system.host_link import HostLink


def stream_experts(model: nn.Module, link: HostLink) -> int:
    """Keep the stacks of experts on the host, and return the number of layers that have some. Their layers must be recomputed in
    backward. Raises ValueError if the model has no experts, or trains their stacks."""
    experts: list[Any] = list(experts_of(model).values())
    instead = "Set memory.experts=device."
    if not experts:
        raise ValueError(f"memory.experts=streamed needs a mixture of experts, and this model has none. {instead}")
    if any(tensor.requires_grad for own in experts for frozen in own.stacks() for tensor in frozen.tensors):
        raise ValueError(
            f"memory.experts=streamed needs frozen experts, but the model's are trained. Set lora.rank, or {instead}"
        )
    streamed = StreamedStacks(experts, link)
    for index, own in enumerate(experts):
        own.stacks = partial(streamed.stacks, index)
    return len(experts)


class StreamedStacks:
    """The stacks of all layers. Those of the last layer that computed and of the one that follows it are on the device."""

    def __init__(self, experts: Sequence[Experts], link: HostLink) -> None:
        self._experts, self._link = experts, link
        self._sent = [
            [link.keep_on_host(tensor) for frozen in own.stacks() for tensor in frozen.tensors] for own in experts
        ]
        self._here = self._ahead = -1  # layers
        self._tensors: list[Tensor] = []

    def stacks(self, index: int) -> tuple[Frozen, Frozen]:
        gate_up, down = Experts.stacks(self._experts[index])
        if not torch.is_grad_enabled():
            return gate_up, down
        if index != self._here:
            self.bring(index)
        end = len(gate_up.tensors)
        return gate_up._replace(tensors=tuple(self._tensors[:end])), down._replace(tensors=tuple(self._tensors[end:]))

    def bring(self, index: int) -> None:
        """Fetch a layer's stacks, free the last layer's, and start copying those of the layer that follows in this direction, or in
        the other one from the first or last layer."""
        self._tensors = []
        if self._ahead not in (-1, index):
            self._fetch(self._ahead)  # and free them
        self._tensors = self._fetch(index)
        step = 1 if index > self._here else -1
        self._here, self._ahead = index, index + step if 0 <= index + step < len(self._sent) else index - step
        for sent in self._sent[self._ahead] if len(self._sent) > 1 else ():
            self._link.prefetch(sent)

    def _fetch(self, index: int) -> list[Tensor]:
        return [self._link.fetch(sent) for sent in self._sent[index]]
