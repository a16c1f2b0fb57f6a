"""Collectives that gradients go through, on plain tensors: each one's backward pass is another of them.

They are autograd functions around PyTorch's own operators, which the compiler knows, and which return when the result is
there. A group is given by its name, which to the compiler is a constant.

Shapes: B batch, T tokens of a row, n ranks of the group, D any further dimensions.
"""

from typing import Any

import torch
from torch import Tensor

from lean_ft.torch_private import collectives


def gather_tokens(values: Tensor, group: str, size: int) -> Tensor:
    """From each rank's tokens (B, T / n, D) those of all, (B, T, D), on each; gradients add up over the ranks."""
    return _GatherTokens.apply(values, group, size)


def scatter_tokens(values: Tensor, group: str, size: int) -> Tensor:
    """Sums (B, T, D) over the ranks, and gives each its tokens of the sum, (B, T / n, D); the reverse of the other."""
    return _ScatterTokens.apply(values, group, size)


def all_to_all(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Sends to rank i the next `send[i]` of the rows (M, D), and returns the `receive[i]` of each rank i, one after
    another."""
    return _AllToAll.apply(rows, receive, send, group)


def sum_over(values: Tensor, group: str) -> Tensor:
    """The sum over the ranks, on each; a rank's gradient is the sum of what all of them give it."""
    return _Sum.apply(values, group)


def _gathered(values: Tensor, group: str, size: int) -> Tensor:
    every = collectives.all_gather_into_tensor(values.contiguous(), size, group)
    every = collectives.wait_tensor(every)  # (n * B, T / n, D)
    return every.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def _scattered(values: Tensor, group: str, size: int) -> Tensor:
    by_rank = values.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)  # (n * B, T / n, D)
    own = collectives.reduce_scatter_tensor(by_rank.contiguous(), "sum", size, group)
    return collectives.wait_tensor(own)


def _exchanged(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    received = collectives.all_to_all_single(rows.contiguous(), receive, send, group)
    return collectives.wait_tensor(received)


def _summed(values: Tensor, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(values.contiguous(), "sum", group))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _gathered(values, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], ctx.group, ctx.size), None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _scattered(values, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.group, ctx.size), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _exchanged(rows, receive, send, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.send, ctx.receive, ctx.group), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None
