"""Frozen weights in pinned host memory, copied to the GPU layer by layer before each layer's forward pass.

A frozen model, such as a reference or a teacher, needs a layer's weights at one moment of a pass. While one layer
computes, the weights of the next one are copied in. Two layers, the embedding and the output layer are on the device,
however deep the model is. Each pass copies all layers once. A 25 GB/s link copies a billion bfloat16 weights in 80 ms,
so large batches hide the copies and small batches wait for them.

Source: our own; the idea is from ZeRO-Inference (Aminabadi et al. 2022, arXiv:2207.00032).
"""

from typing import Any

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.system.host_link import HostLink, Sent


def stream_weights(model: Decoder, link: HostLink) -> None:
    """Keep the layers of a frozen model on the host, and move the rest of it to the link's device.

    Load the model on the CPU and apply all other techniques first. Do not train, save or edit it afterwards.
    """
    layers, model.model.layers = model.model.layers, nn.ModuleList()
    # Not `Module.to`, which replaces meta tensors.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(link.device)
    following = None
    streamed: list[StreamedLayer] = []
    for layer in reversed(layers):
        following = StreamedLayer(layer, link, following)
        streamed.append(following)
    model.model.layers = nn.ModuleList(reversed(streamed))


class StreamedLayer(nn.Module):
    """A layer whose weights are on the device only while it computes and shortly before."""

    def __init__(self, layer: nn.Module, link: HostLink, following: "StreamedLayer | None") -> None:
        super().__init__()
        self.layer, self._link = layer, link
        self._following = (following,)  # in a tuple, so that it is not a submodule
        self._weights: list[tuple[nn.Parameter, Sent]] = []
        for param in layer.parameters():
            self._weights.append((param, Sent(link.host_copy(param.detach()))))
            param.data = _empty_like(param, link.device)

    def prefetch(self) -> None:
        for _, sent in self._weights:
            self._link.prefetch(sent)

    def forward(self, *args: object, **kwargs: object) -> Any:
        for param, sent in self._weights:
            param.data = self._link.fetch(sent)
        (following,) = self._following
        if following is not None:
            following.prefetch()
        try:
            return self.layer(*args, **kwargs)
        finally:
            for param, _ in self._weights:
                param.data = _empty_like(param, self._link.device)


def _empty_like(param: Tensor, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=param.dtype, device=device)
