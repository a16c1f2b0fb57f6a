"""Lengths of the texts in a forward pass, from its arguments."""

from typing import Any

import torch
from torch import Tensor


def text_lengths(
    input_ids: Tensor,
    cu_seqlens: Tensor | None = None,
    is_token: Tensor | None = None,
    prefixes: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the tokens of each position's text: of the document in packed rows (B, T), without padding in other rows (B, 1)."""
    if cu_seqlens is not None:
        documents = cu_seqlens.diff()
        texts = documents if prefixes is None else documents + prefixes.diff(dim=1)[:, 0]
        return texts.repeat_interleave(documents, output_size=input_ids.numel()).view(input_ids.shape)
    if is_token is not None:
        return is_token.sum(1, keepdim=True)
    return torch.full((len(input_ids), 1), input_ids.shape[1], device=input_ids.device)
