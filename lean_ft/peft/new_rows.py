"""Trained rows of new tokens in a frozen embedding, and in an output layer with its own weight.

Losses and generation take the output layer as one matrix. So the trained rows are written into the frozen matrix,
without copying it, and only their rows of its gradient are kept. The original rows are stored for when the adapter is
off. The file format is PEFT's `trainable_token_indices`, which stores the rows themselves.

Shapes: V vocabulary, D hidden size, N trained rows.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import Frozen, as_frozen
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.shards import local

EMBEDDING = "model.embed_tokens"
ENDING = ".token_adapter.trainable_tokens_delta"  # suffix of the tensor's name in PEFT's files


class TrainedRows(nn.Module):
    """A frozen embedding or output layer in which the rows of the tokens `ids` are trained."""

    is_on = True  # `adapter_off` sets False: the layer then uses the original rows

    def __init__(self, base_layer: nn.Embedding | nn.Linear, ids: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight = base_layer.weight.detach()
        self.register_buffer("ids", torch.tensor(sorted(ids), device=weight.device), persistent=False)
        self.register_buffer("start", weight[self.ids].clone(), persistent=False)
        self.rows = nn.Parameter(self.start.to(dtype, copy=True))  # (N, D)

    ids: Tensor
    start: Tensor

    @property
    def frozen(self) -> Frozen:
        return as_frozen(self.base_layer.weight)

    @property
    def weight(self) -> Tensor:
        """The matrix (V, D) with the trained rows, in the frozen weight's dtype; passes on their gradient."""
        weight = self.base_layer.weight
        if local(weight) is not weight:  # sharded: callers read only its shape and dtype
            return weight
        if not self.is_on:  # a copy: an earlier pass may still need the matrix for its backward
            return weight.detach().index_copy(0, self.ids, self.start)
        return _WithRows.apply(weight, self.rows, self.ids)

    def merged_weight(self) -> Tensor:
        return self.base_layer.weight.detach().index_copy(0, self.ids, self.rows.detach().to(self.start.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """ids (B, T) of an embedding, to (B, T, D); hidden states (B, T, D) of an output layer, to (B, T, V)."""
        if isinstance(self.base_layer, nn.Linear):
            return F.linear(x, self.weight)
        place = torch.searchsorted(self.ids, x).clamp(max=len(self.ids) - 1)
        is_row = self.ids[place] == x
        rows = F.embedding(place, self.rows if self.is_on else self.start)
        return torch.where(is_row[..., None], rows.to(self.start.dtype), self.base_layer(x))


class _RowsContext(AutogradContext[Tensor]):  # ids
    dtype: torch.dtype


class _WithRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RowsContext, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.dtype = rows.dtype
        weight = weight.detach()
        # Safe in place: all passes between two updates write the same rows.
        weight.data.index_copy_(0, ids, rows.to(weight.dtype))
        return weight

    @staticmethod
    def backward(ctx: _RowsContext, *grads: Tensor) -> tuple[None, Tensor, None]:
        (grad,) = grads
        (ids,) = ctx.saved_tensors
        return None, grad.index_select(0, ids).to(ctx.dtype), None


def put_rows(model: Decoder, ids: Sequence[int], dtype: torch.dtype) -> None:
    """Train these tokens' rows, in `dtype`, in the embedding and in an output layer with its own weight."""
    for name in (EMBEDDING, *(["lm_head"] if model.lm_head is not None else [])):
        base = model.get_submodule(name)
        assert isinstance(base, nn.Embedding | nn.Linear)
        model.set_submodule(name, TrainedRows(base, ids, dtype))


def trained_rows(model: nn.Module) -> dict[str, TrainedRows]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TrainedRows)}
