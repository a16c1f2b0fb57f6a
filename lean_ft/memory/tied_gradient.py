"""One gradient for an output layer that is the embedding, and where it waits.

A tied weight has two gradients: the output layer's, (V, D), there as soon as backward begins, and the embedding's, which
has only as many rows as there are tokens, there when backward ends. Autograd makes the second a (V, D) tensor as well,
zeros for all but those rows, and adds the two. Here the embedding hands its weight to the output layer, so that the
output layer's gradient reaches the embedding's backward, which adds its rows to it: one tensor of (V, D) where there
were two. A token's rows are summed in float32 first, so a frequent token rounds once and not once an occurrence.

Between the two the gradient waits while all layers go backward: for Llama-3.2-3B 0.73 GiB. It cannot be used up
earlier, as the update of most rules is not linear in the gradient. On a GPU it can wait in pinned host memory: it
travels out during the last layer's backward and back at the end of the first one's.

Source: our own. Left out: waiting in host memory on a CPU, where that is the same memory.

Shapes: B batch, T tokens of a row, N = B * T tokens, D hidden size, V vocabulary.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.system.host_link import HostLink, Sent


def fuse_tied_gradient(model: Decoder, link: HostLink | None = None) -> None:
    """Makes the embedding's backward add to the output layer's gradient, which with a `link` waits in host memory.

    Raises:
        ValueError: when the output layer is not the embedding, or the embedding does more than look rows up.
    """
    embedding = model.model.embed_tokens
    if model.head is not None:
        raise ValueError(
            "fuse_tied_gradient expects an output layer that is the embedding, but this model has two weights, whose "
            "gradients never meet. Set memory.tied_gradient=separate."
        )
    if embedding.padding_idx is not None or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise ValueError("fuse_tied_gradient expects an embedding without padding_idx, max_norm and scale_grad_by_freq")
    output = _OutputWeight(embedding, link)
    setattr(embedding, "forward", output.look_up)  # noqa: B010  (the instance's, which no stub knows)
    model.tied_output_weight = output.hand_out
    if link is not None:
        # It comes back when the first layer's first part has its gradients: in its place lies no layer's workspace then.
        part: Any = model.layers[0].first_part
        output.awaited = {name for name, param in part.named_parameters() if param.requires_grad}
        for name, param in part.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(output.note_gradient, name))


class _OutputWeight:
    """The embedding's weight as its last forward pass handed it out, and its gradient while it waits in host memory."""

    def __init__(self, embedding: nn.Embedding, link: HostLink | None) -> None:
        self.embedding, self.link = embedding, link
        self._weight: Tensor | None = None  # (V, D), with the embedding as the node that made it
        self._waiting: list[Sent] = []
        self.awaited: set[str] = set()  # parameters whose gradients come shortly before the embedding's,
        self._seen: set[str] = set()  # and those of them that have come

    def __deepcopy__(self, memo: Any) -> "_OutputWeight":
        # What a copied model hands out, it makes in its own forward pass.
        return _OutputWeight(copy.deepcopy(self.embedding, memo), self.link)

    def look_up(self, ids: Tensor) -> Tensor:
        weight = self.embedding.weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            self._weight = None
            return F.embedding(ids, weight)
        rows, handed_out = _Embedding.apply(ids, weight, self)  # type: ignore[misc]
        self._weight = handed_out
        return rows

    def hand_out(self) -> Tensor:
        if self._weight is None:
            return self.embedding.weight
        if self.link is None or not torch.is_grad_enabled():
            return self._weight
        # Made now and not in `look_up`: of what is ready, backward takes first what was made last, and that is before
        # the layers only if it was made after them.
        return _Park.apply(self._weight, self)  # type: ignore[return-value]

    def send(self, grad: Tensor) -> Tensor:
        """Sends the gradient away; what it returns stands for it and takes no memory."""
        assert self.link is not None
        self._waiting.append(self.link.send(grad))
        return grad.new_zeros(()).expand_as(grad)

    def note_gradient(self, name: str, _: Tensor) -> None:
        self._seen.add(name)
        if self._seen == self.awaited and self.link is not None:
            for sent in self._waiting:
                self.link.prefetch(sent)

    def fetch(self) -> Tensor | None:
        """The gradient that was sent away, and no longer waits; a sum where there were several."""
        self._seen.clear()
        if not self._waiting:
            return None
        assert self.link is not None
        first, *others = (self.link.fetch(sent) for sent in self._waiting)
        self._waiting.clear()
        for other in others:
            first.add_(other)
        return first


class _Embedding(torch.autograd.Function):
    """Rows of the weight, and the weight itself: what it receives in backward are the gradients of both."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, output: _OutputWeight) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.output = weight.shape, output
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight), weight.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        grad_rows, gradient = grad_outputs
        if gradient is not None and ctx.output.link is not None:
            gradient = ctx.output.fetch()
        if grad_rows is None:
            return None, gradient, None
        if gradient is None:  # the loss did not use the output layer
            gradient = grad_rows.new_zeros(ctx.shape)
        # Written over in place: a loss makes it for this node alone. One that is no tensor of its own is copied.
        gradient = gradient.contiguous()
        _add_rows(gradient, ids.flatten(), grad_rows.flatten(0, -2))
        return None, gradient, None


class _Park(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, output: _OutputWeight) -> Tensor:
        ctx.output = output
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return ctx.output.send(grad_outputs[0]), None


def _add_rows(gradient: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds rows (N, D) to those of the gradient (V, D) that ids (N,) name; equal ids are summed in float32 first.

    Every size is known beforehand, so a GPU need not tell the host how many ids differ.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    ids, order = ids.sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[1:] = ids[1:] != ids[:-1]
    place = is_first.cumsum(0) - 1  # (N,) which of the different ids each one is
    sums = torch.zeros(rows.shape, dtype=wide, device=rows.device).index_add_(0, place, rows[order].to(wide))
    # Places beyond the last different id hold zeros, and add them to a row each: a GPU adds to one row one at a time.
    row_ids = torch.arange(len(ids), device=ids.device).remainder_(len(gradient)).scatter_(0, place, ids)
    gradient.index_add_(0, row_ids, sums.to(gradient.dtype))
