"""One gradient tensor for tied embeddings, optionally kept in host memory during the layers' backward passes.

A tied weight has two gradients: the output layer's (V, D), available when backward begins, and the embedding's, which
has one row per token and is available when backward ends. Autograd makes the second one a (V, D) tensor of mostly zeros
and adds the two. Here the output layer gets its weight from the embedding's autograd node. Its gradient thus reaches
the embedding's backward, which adds the rows in place: one (V, D) tensor instead of two. The rows of a token are summed
in float32 first, so that a frequent token is rounded once.

In between, the gradient waits while all layers run backward (0.73 GiB for Llama-3.2-3B). It cannot be used earlier,
because most update rules are not linear in the gradient. On a GPU it can wait in pinned host memory: it is copied out
during the last layer's backward and copied back at the end of the first layer's.

Source: our own.

Shapes: B batch, T tokens of a row, N = B * T tokens, D hidden size, V vocabulary.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.system.autograd import AutogradContext
from lean_ft.system.host_link import HostLink, Sent


def fuse_tied_gradient(model: Decoder, link: HostLink | None = None) -> None:
    """Make the embedding's backward add to the output layer's gradient, which waits in host memory if there is a
    `link`.

    Raises ValueError if the embeddings are not tied.
    """
    embedding = model.model.embed_tokens
    if not model.ties_output:
        raise ValueError(
            "tied embeddings are needed, but the output layer of this model has its own weight, or there is none."
        )
    output = _OutputWeight(embedding, link)
    setattr(embedding, "forward", output.look_up)  # noqa: B010  (pyright: an attribute of the instance)
    model.tied_output_weight = output.hand_out
    if link is not None:
        # Copy it back once the first layer's first part has its gradients, when no layer's workspace takes memory.
        first: Any = model.layers[0]
        part = getattr(first, next(iter(first.mixer_names), "mlp"))
        output.awaited = {name for name, param in part.named_parameters() if param.requires_grad}
        for name, param in part.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(output.note_gradient, name))


class _OutputWeight:
    """The output weight that the embedding's last forward pass made, and its gradient while that is in host memory."""

    def __init__(self, embedding: nn.Embedding, link: HostLink | None) -> None:
        self.embedding, self.link = embedding, link
        self._weight: Tensor | None = None  # (V, D), an output of the embedding's autograd node
        self._waiting: list[Sent] = []
        self.awaited: set[str] = set()  # parameters whose gradients come shortly before the embedding's
        self._seen: set[str] = set()  # those of them whose gradients have come

    def __deepcopy__(self, memo: dict[int, object]) -> "_OutputWeight":
        # A copied model makes its output weight in its own forward pass.
        return _OutputWeight(copy.deepcopy(self.embedding, memo), self.link)

    def look_up(self, ids: Tensor) -> Tensor:
        weight = self.embedding.weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            self._weight = None
            return F.embedding(ids, weight)
        rows, handed_out = _Embedding.apply(ids, weight, self)
        self._weight = handed_out
        return rows

    def hand_out(self) -> Tensor:
        if self._weight is None:
            return self.embedding.weight
        if self.link is None or not torch.is_grad_enabled():
            return self._weight
        # Created here, not in `look_up`: backward runs the most recently created node first, so this one must be
        # created after the layers to run before them.
        return _Park.apply(self._weight, self)

    def send(self, grad: Tensor) -> Tensor:
        """Copy the gradient to the host; return a placeholder that takes no memory."""
        assert self.link is not None
        self._waiting.append(self.link.send(grad))
        return grad.new_zeros(()).expand_as(grad)

    def note_gradient(self, name: str, _: Tensor) -> None:
        self._seen.add(name)
        if self._seen == self.awaited and self.link is not None:
            for sent in self._waiting:
                self.link.prefetch(sent)

    def fetch(self) -> Tensor | None:
        """Copy the gradient back, or the sum if there were several; None if there was none."""
        self._seen.clear()
        if not self._waiting:
            return None
        assert self.link is not None
        first, *further = (self.link.fetch(sent) for sent in self._waiting)
        self._waiting.clear()
        for other in further:
            first.add_(other)
        return first


class _EmbeddingContext(AutogradContext[Tensor]):  # ids
    shape: torch.Size  # of the weight
    output: _OutputWeight


class _Embedding(torch.autograd.Function):
    """Returns rows of the weight and the weight itself, so that backward receives the gradients of both."""

    @staticmethod
    def forward(ctx: _EmbeddingContext, ids: Tensor, weight: Tensor, output: _OutputWeight) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.output = weight.shape, output
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight), weight.detach()

    @staticmethod
    def backward(ctx: _EmbeddingContext, *grad_outputs: Tensor | None) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        grad_rows, gradient = grad_outputs
        if gradient is not None and ctx.output.link is not None:
            gradient = ctx.output.fetch()
        if grad_rows is None:
            return None, gradient, None
        if gradient is None:  # the loss did not use the output layer
            gradient = grad_rows.new_zeros(ctx.shape)
        # In place: the loss made this gradient for this node alone. An expanded one is copied.
        gradient = gradient.contiguous()
        _add_rows(gradient, ids.flatten(), grad_rows.flatten(0, -2))
        return None, gradient, None


class _ParkContext(AutogradContext[()]):
    output: _OutputWeight


class _Park(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ParkContext, weight: Tensor, output: _OutputWeight) -> Tensor:
        ctx.output = output
        return weight.detach()

    @staticmethod
    def backward(ctx: _ParkContext, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.output.send(grad_outputs[0]), None


def _add_rows(gradient: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add rows (N, D) to the rows `ids` (N,) of the gradient (V, D); rows of equal ids are summed in float32 first.

    All sizes are known beforehand, so the host does not wait for a GPU.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    ids, order = ids.sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    place = is_first.cumsum(0) - 1  # (N,) index among the distinct ids
    sums = torch.zeros(rows.shape, dtype=wide, device=rows.device).index_add_(0, place, rows[order].to(wide))
    # Entries beyond the last distinct id are zeros; each goes to another row, because a GPU serializes adds to one row.
    row_ids = torch.arange(len(ids), device=ids.device).remainder_(len(gradient)).scatter_(0, place, ids)
    gradient.index_add_(0, row_ids, sums.to(gradient.dtype))
