"""Gradient caching: a loss over all texts of a step with the memory of one micro-batch.

A contrastive loss compares every text of a step with every other, so it cannot be summed over micro-batches. But its
gradient reaches the weights only through the texts' vectors. The first pass computes the vectors of all micro-batches
and keeps nothing else. Backward on the loss gives the gradient of each vector. The second pass computes each
micro-batch again, now with gradients, and continues backward from there.

Both passes compute the same bits: they draw the same random numbers, and the model is in training mode in both. The
first pass ends with the micro-batch that the second begins with, and keeps its graph. So G micro-batches take 2 G - 1
forward passes, and a step of one micro-batch computes nothing twice. If layers are compiled again during the first
pass, for another length, the vectors from before come from other code, so they are computed again.

Source: GradCache, Gao et al. 2021, https://arxiv.org/abs/2101.06983. The kept graph is our own.

Shapes: P rows of data in a step, S texts of a row, D features of a vector.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain, islice
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from lean_ft.system.passes import first_pass
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.world import in_chunks
from lean_ft.torch_private import num_compiled_graphs


class RowBatch(Protocol):
    """A micro-batch of `num_rows` rows of data."""

    @property
    def num_rows(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


BatchT = TypeVar("BatchT", bound=RowBatch)


class StepVectors(Generic[BatchT]):
    """The vectors of a step's micro-batches, computed in two passes.

        vectors = StepVectors(embed, micro_batches, device, ranks, compiled=cfg.compile)
        loss(vectors.all).backward()
        for product, is_last in vectors.again():
            optimizer.scale(product, last=is_last).backward()

    The weights must not change before the last backward pass. With `optimizer.in_backward` they change in it.
    """

    all: Tensor
    """(P, S, D) of all rows of the step, on every rank. Call backward on their loss."""

    def __init__(
        self,
        embed: Callable[[BatchT], Tensor],
        micro_batches: Sequence[BatchT],
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        compiled: bool = False,
    ) -> None:
        """embed: returns the vectors (rows, S, D) of a micro-batch on the device; micro_batches: of all ranks;
        compiled: whether the model's layers are compiled."""
        self._embed, self._micro_batches, self._device, self._ranks = embed, micro_batches, device, ranks
        ends = list(accumulate((batch.num_rows for batch in micro_batches), initial=0))
        ends.append(ends[-1])
        # A rank with fewer micro-batches than others ends with one that has no rows.
        places = (min(place, len(micro_batches)) for place in ranks.places(len(micro_batches)))
        self._rows = [slice(ends[place], ends[place + 1]) for place in places]
        own = [batch for batch, _ in ranks.share(micro_batches)]
        self._random_states = [_random_state(device)] * len(own)
        whole: Tensor | None = None
        num_graphs = list[int]()  # compiled so far, after each micro-batch
        # From the last to the first, whose graph is kept. A plan runs one of those that keep nothing.
        for i in chain((len(own) - one.stop for one in in_chunks(len(own) - 1, 1)), [0]):
            self._random_states[i] = _random_state(device)
            with first_pass(compiled=compiled) if i else nullcontext():
                vectors = embed(own[i].to(device))
            if whole is None:
                whole = vectors.new_zeros(ends[-1], *vectors.shape[1:], requires_grad=False)
            whole[self._rows[i]] = vectors.detach()
            num_graphs.append(num_compiled_graphs() if compiled else 0)
            self._kept = vectors
        assert whole is not None, "a step has at least one micro-batch"
        if compiled and ranks.highest(num_graphs[-1] - num_graphs[0])[0]:
            self._compute_again(own, whole)
        if ranks.rank % ranks.num_sharing != 0:  # another rank has the same rows
            whole.zero_()
        self.all = ranks.sum(whole).requires_grad_()

    def _compute_again(self, own: Sequence[BatchT], whole: Tensor) -> None:
        """Compute the vectors again that the first pass does not keep a graph for."""
        after = _random_state(self._device)
        for i in range(len(own) - 1, 0, -1):
            _set_random_state(self._random_states[i], self._device)
            with first_pass(compiled=True):
                whole[self._rows[i]] = self._embed(own[i].to(self._device)).detach()
        _set_random_state(after, self._device)

    def again(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield a scalar for each of this rank's micro-batches, and whether it is the last. Its gradient by the weights
        is the micro-batch's part of the loss's.

        Each must have run backward before the next is computed. The random state afterwards is that before.
        """
        gradients = self.all.grad
        assert gradients is not None, "call backward on the loss of `all` first"
        after = _random_state(self._device)
        for i, (batch, is_last) in self._parts():
            if i == 0:
                vectors = self._kept
                del self._kept
            else:
                _set_random_state(self._random_states[i], self._device)
                vectors = self._embed(batch.to(self._device))
            # Each of the ranks that share rows computes all vectors of these.
            yield (vectors * gradients[self._rows[i]]).sum() / self._ranks.num_sharing, is_last
        _set_random_state(after, self._device)

    def _parts(self) -> Iterator[tuple[int, tuple[BatchT, bool]]]:
        """This rank's micro-batches with their numbers, and whether each is the last. A plan runs the first, the second
        and the last."""
        parts = enumerate(self._ranks.share(self._micro_batches))
        yield from islice(parts, 1)
        for _ in in_chunks(len(self._rows) - 2, 1):
            yield next(parts)
        yield from deque(parts, 1)


def _random_state(device: torch.device) -> list[Tensor]:
    """The states of the generators that a forward pass draws from: the host's and the device's."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state()]


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1])
