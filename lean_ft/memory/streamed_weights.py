"""Frozen weights in pinned host memory, from which each layer's travel to the GPU ahead of its forward pass.

A model that only computes, a reference or a teacher, needs a layer's weights at one moment of a pass. So they live on the
host, and while one layer computes, those of the next are on their way. On the device are two layers, the embedding and the
output layer, however deep the model is. Each pass brings all layers once: a link of 25 GB/s moves a billion bfloat16 weights
in 80 ms, so batches of many tokens hide it and small ones wait for it.

Source: our own; the idea is ZeRO-Inference's (Aminabadi et al. 2022, arXiv:2207.00032).
"""

from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.system.host_link import HostLink, Sent


def stream_weights(model: Decoder, link: HostLink) -> None:
    """Keeps the layers of a frozen model on the host, and brings the rest of it to the link's device.

    model: loaded to the CPU, with all other techniques applied; it is not trained, saved or edited after this.
    """
    layers, model.model.layers = model.model.layers, nn.ModuleList()
    # Not `Module.to`, which swaps tensors where they are of shapes alone.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(link.device)
    following = None
    streamed: list[StreamedLayer] = []
    for layer in reversed(layers):
        following = StreamedLayer(layer, link, following)
        streamed.append(following)
    model.model.layers = nn.ModuleList(reversed(streamed))


class StreamedLayer(nn.Module):
    """A layer whose weights are on the device while it computes, and shortly before."""

    def __init__(self, layer: nn.Module, link: HostLink, following: "StreamedLayer | None") -> None:
        super().__init__()
        self.layer, self._link = layer, link
        self._following = (following,)  # not a module of this one
        self._weights: list[tuple[nn.Parameter, Sent]] = []
        for param in layer.parameters():
            self._weights.append((param, Sent(link.host_copy(param.detach()))))
            param.data = _nothing_like(param, link.device)

    def prefetch(self) -> None:
        """Has the weights on their way."""
        for _, sent in self._weights:
            self._link.prefetch(sent)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for param, sent in self._weights:
            param.data = self._link.fetch(sent)
        (following,) = self._following
        if following is not None:
            following.prefetch()
        try:
            return self.layer(*args, **kwargs)
        finally:
            for param, _ in self._weights:
                param.data = _nothing_like(param, self._link.device)


def _nothing_like(param: Tensor, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=param.dtype, device=device)
