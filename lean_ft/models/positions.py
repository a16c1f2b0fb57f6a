"""The position of each token in its document, and the lengths of documents.

Shapes: B rows, T tokens of a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.models.cache import KVCache
from lean_ft.models.config import DecoderConfig
from lean_ft.torch_private import assert_on_device


def positions_of(
    rows: Tensor,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: KVCache | None,
    lengths: Tensor | None,
    prefixes: Tensor | None,
    shifts: Tensor | None = None,
) -> Tensor:
    """Each token's position in its document, (B or 1, T), plus the `shifts` (B, T) of rotary positions.

    rows: (B, T), of any values.

    Raises ValueError for invalid combinations of the arguments.
    """
    num_rows, num_tokens = rows.shape
    if cache is not None:
        if cu_seqlens is not None or positions is not None:
            raise ValueError("a cache cannot be combined with cu_seqlens or positions; it has its own positions.")
        if torch.is_grad_enabled():
            raise ValueError("a cache keeps no gradients; call the model inside torch.no_grad().")
        return cache.begin(num_tokens, lengths, shifts)
    if lengths is not None:
        raise ValueError("lengths need a cache; without a cache, padding on the right has no effect.")
    if cu_seqlens is not None:
        _check_documents(cu_seqlens, num_rows, num_tokens)
    if positions is None:
        positions = _counted(rows, cu_seqlens, prefixes)
    return positions if shifts is None else positions + shifts


def _counted(rows: Tensor, cu_seqlens: Tensor | None, prefixes: Tensor | None) -> Tensor:
    """Positions (B or 1, T) that count from 0 in each row or document, or from the end of a document's prefix."""
    num_rows, num_tokens = rows.shape
    if cu_seqlens is None:
        return torch.arange(num_tokens, device=rows.device)[None]  # (1, T) serves all rows
    indices = torch.arange(num_rows * num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = _document_of(indices, cu_seqlens)
    positions = (indices - cu_seqlens[document]).view(num_rows, num_tokens)
    return positions if prefixes is None else positions + prefixes.diff(dim=1)[document].view_as(positions)


def position_rows(positions: Tensor, config: DecoderConfig) -> Tensor:
    """The rows of positions in the learned embedding of a model. Raises ValueError for a position that has none; on a
    GPU a failure is a device-side assertion."""
    assert config.position_row is not None
    longest = config.max_positions
    message = (
        f"a text is longer than {longest} tokens, and the model has embeddings of {longest} positions. Set a lower "
        "data.max_length."
    )
    _check((positions < longest).all(), message)
    return positions + config.position_row


def lengths_of_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The length of each token's document with its prefix, (B, T)."""
    flat = positions.flatten()
    document = _document_of(torch.arange(len(flat), dtype=cu_seqlens.dtype, device=flat.device), cu_seqlens)
    last = torch.zeros(len(cu_seqlens), dtype=flat.dtype, device=flat.device)
    last = last.scatter_reduce(0, document, flat, "amax")
    return (last[document] + 1).view(positions.shape)


def text_lengths(
    input_ids: Tensor,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_token: Tensor | None = None,
    prefixes: Tensor | None = None,
    **_: object,
) -> Tensor:
    """The length of each token's text, from the arguments of a forward pass: (B, T) in packed rows, and in other rows
    (B, 1), without padding."""
    if cu_seqlens is not None:
        positions = positions_of(input_ids, positions, cu_seqlens, None, None, prefixes)
        return lengths_of_documents(positions, cu_seqlens)
    if is_token is not None:
        return is_token.sum(1, keepdim=True)
    return torch.full((len(input_ids), 1), input_ids.shape[1], device=input_ids.device)


def bounds_of_texts(is_token: Tensor) -> Tensor:
    """The documents of rows that are padded on the right, (2 B + 1,) int32 boundaries in the B * T tokens: each row's
    text and its padding. No text sees padding then, and no length is read on the host."""
    num_rows, num_tokens = is_token.shape
    starts = torch.arange(num_rows, device=is_token.device) * num_tokens
    bounds = torch.stack((starts, starts + is_token.sum(1)), 1).flatten()
    return F.pad(bounds, (0, 1), value=num_rows * num_tokens).to(torch.int32)


def _document_of(indices: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The document's number for each token index of the flattened batch."""
    return torch.bucketize(indices, cu_seqlens, right=True) - 1


def _check_documents(cu_seqlens: Tensor, num_rows: int, num_tokens: int) -> None:
    """Raise ValueError if a document is longer than a row, or documents do not end with the batch. On a GPU a failure
    is a device-side assertion, so that the host does not wait."""
    end = num_rows * num_tokens
    fits = (cu_seqlens.diff() <= num_tokens).all() & (cu_seqlens[-1] == end)
    message = (
        f"cu_seqlens has a document longer than a row of {num_tokens} tokens, or does not end with the batch, at {end}."
    )
    _check(fits, message)


def _check(holds: Tensor, message: str) -> None:
    if holds.is_cuda:
        assert_on_device(holds, message)
    elif not holds:
        raise ValueError(message)
