"""Differentiable collectives on plain tensors; the backward of each is another collective.

They wrap PyTorch's operators, which the compiler supports, and wait for the result. A group is passed by name, which is
a constant to the compiler.

Shapes: B batch, T tokens of a row, n ranks of the group, D any further dimensions.
"""

import torch
from torch import Tensor

from lean_ft.system.autograd import AutogradContext
from lean_ft.torch_private import collectives


def gather_tokens(values: Tensor, group: str, size: int) -> Tensor:
    """Gather each rank's tokens (B, T / n, D) into (B, T, D) on every rank; backward sums gradients over the ranks."""
    return _Tokens.apply(values, group, size, True)


def scatter_tokens(values: Tensor, group: str, size: int) -> Tensor:
    """Sum (B, T, D) over the ranks and return this rank's tokens (B, T / n, D); the reverse of `gather_tokens`."""
    return _Tokens.apply(values, group, size, False)


def all_to_all(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Send the next `send[i]` of the rows (M, D) to each rank i; return the `receive[i]` rows from each rank i."""
    return _AllToAll.apply(rows, receive, send, group)


def sum_over(values: Tensor, group: str) -> Tensor:
    """The sum over the ranks, on every rank; backward sums gradients over the ranks."""
    return _Sum.apply(values, group)


def _gathered(values: Tensor, group: str, size: int) -> Tensor:
    by_rank = collectives.wait_tensor(collectives.all_gather_into_tensor(values.contiguous(), size, group))
    return by_rank.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)  # from (n * B, T / n, D)


def _scattered(values: Tensor, group: str, size: int) -> Tensor:
    by_rank = values.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)  # (n * B, T / n, D)
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(by_rank.contiguous(), "sum", size, group))


def _exchanged(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(rows.contiguous(), receive, send, group))


def _summed(values: Tensor, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(values.contiguous(), "sum", group))


class _TokensContext(AutogradContext[()]):
    group: str
    size: int
    gather: bool


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _TokensContext, values: Tensor, group: str, size: int, gather: bool) -> Tensor:
        ctx.group, ctx.size, ctx.gather = group, size, gather
        return (_gathered if gather else _scattered)(values, group, size)

    @staticmethod
    def backward(ctx: _TokensContext, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return (_scattered if ctx.gather else _gathered)(grads[0], ctx.group, ctx.size), None, None, None


class _AllToAllContext(AutogradContext[()]):
    receive: list[int]
    send: list[int]
    group: str


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _AllToAllContext, rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _exchanged(rows, receive, send, group)

    @staticmethod
    def backward(ctx: _AllToAllContext, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.send, ctx.receive, ctx.group), None, None, None


class _SumContext(AutogradContext[()]):
    group: str


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SumContext, values: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None
