"""Frozen stacks of experts in pinned host memory, copied to the GPU for each layer's forward and backward pass.

Experts are most of a mixture's weights: 57 GiB of gpt-oss-120b in 4 bits. While a layer computes, the next layer's
stacks are copied in, so those of two layers are on the device. A layer that is recomputed for its backward pass uses
one copy for both. In evaluation mode, as in sampling, kernels read the stacks over the link: the experts of a few
tokens are a small part of them.

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
    """Keep the stacks of experts on the host, and return the number of layers that have some. All layers must be
    checkpointed. Raises ValueError if the model has no experts, or trains their stacks."""
    experts: list[Any] = list(experts_of(model).values())
    stored = [[tensor for frozen in module.stacks() for tensor in frozen.tensors] for module in experts]
    if not experts or any(tensor.requires_grad for tensors in stored for tensor in tensors):
        reason = "the model's experts are trained" if experts else "this model has none"
        raise ValueError(f"memory.experts=streamed needs frozen experts, but {reason}. Set memory.experts=device.")
    streamed = StreamedStacks(stored, link)
    for index, module in enumerate(experts):
        module.stacks = partial(streamed.stacks, module, index)
    return len(experts)


class StreamedStacks:
    """The stacks of all layers. The device has those of two layers: of the one that computes, and of the next."""

    def __init__(self, stored: Sequence[Sequence[Tensor]], link: HostLink) -> None:
        self._link = link
        self._sent = [[link.keep_on_host(tensor) for tensor in tensors] for tensors in stored]
        self._here = self._ahead = -1  # layers
        self._tensors: list[Tensor] = []

    def stacks(self, experts: Experts, index: int) -> tuple[Frozen, Frozen]:
        gate_up, down = Experts.stacks(experts)
        if not (experts.training or torch.is_grad_enabled()):
            return gate_up, down
        if index != self._here:
            self.bring(index)
        end = len(gate_up.tensors)
        return gate_up._replace(tensors=tuple(self._tensors[:end])), down._replace(tensors=tuple(self._tensors[end:]))

    def bring(self, index: int) -> None:
        """Fetch a layer's stacks, and start to copy those of the layer that follows in this direction. It turns at the
        ends."""
        self._tensors = []
        if self._ahead not in (-1, index):
            self._fetch(self._ahead)  # to free them: the pass ended early
        self._tensors = self._fetch(index)
        step = 1 if index > self._here else -1
        self._here, self._ahead = index, index + step if 0 <= index + step < len(self._sent) else index - step
        for sent in self._sent[self._ahead] if len(self._sent) > 1 else ():
            self._link.prefetch(sent)

    def _fetch(self, index: int) -> list[Tensor]:
        return [self._link.fetch(sent) for sent in self._sent[index]]
