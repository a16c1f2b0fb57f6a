"""Frozen embeddings in pinned host memory, which the GPU reads row by row.

Training with an adapter leaves the embedding as it is: 0.73 GiB for Llama 3.2 3B, 0.98 GiB for Llama 3.1 8B, 4.4 GiB of
per-layer embeddings for Gemma 4 E2B, in bfloat16. A batch needs one row per token. The kernel that looks rows up reads
them over the link, 50 MB for 8,192 tokens of 3,072 features. The device holds no copy, and the host does not wait.

An output layer that shares the weight needs all of it. It is copied to the device for each loss and freed after it: the
loss needs less other memory than a layer's backward pass.

Source: our own; CUDA documents that kernels can use the address of pinned host memory (unified virtual addressing).
"""

from typing import Any

from torch import Tensor, nn

from lean_ft.system.host_link import HostLink, Sent


def keep_embeddings_on_host(model: Any, link: HostLink) -> None:
    """Move the frozen weights of a `Decoder`'s embeddings to the host. Raises ValueError if the token embedding is
    trained."""
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        embedding = getattr(model.model, name, None)
        if embedding is None:
            continue
        if not isinstance(embedding, nn.Embedding) or embedding.weight.requires_grad:
            raise ValueError(
                f"memory.frozen_embeddings=host needs a frozen embedding, but model.{name} is trained. Set "
                "memory.frozen_embeddings=device."
            )
        sent = link.keep_on_host(embedding.weight)
        if name == "embed_tokens" and model.ties_output:
            model.tied_output_weight = lambda sent=sent: whole_weight(link, sent)


def whole_weight(link: HostLink, sent: Sent) -> Tensor:
    """Copy the weight (V, D) to the device."""
    return link.fetch(sent)
