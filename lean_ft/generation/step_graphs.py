"""Generation steps as CUDA graphs: one launch per token, from the embedding to the chosen token.

The first step of a shape runs as written, which also prepares libraries, and is then recorded; later steps replay the
record. A shape is the number of rows and the number of cache positions that attention reads: the longest row's, rounded
up to `POSITIONS`. Each row's mask hides the positions behind its own. Everything that changes between two steps is in
tensors whose memory stays.

Shapes: B running rows, N rows of the cache.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from lean_ft.models import Decoder, KVCache
from lean_ft.system.log import say

POSITIONS = 256
FEWEST_ROWS = 8

Step = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def can_record(model: Decoder) -> bool:
    """Whether steps of the model can be recorded: on one CUDA device, with rotary frequencies that do not depend on the
    length."""
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return model.device.type == "cuda" and is_alone and not any(rope.depends_on_length for rope, _ in model.rotary)


def should_shrink(num_left: int, num_rows: int) -> bool:
    """Whether ended rows leave a recorded batch. Another number of rows is another graph, so they leave when half have
    ended."""
    return num_left == 0 or (num_rows > FEWEST_ROWS and 2 * num_left <= num_rows)


class StepGraphs:
    """Runs steps that compute the next ids (B,) and draws (B, 2) from ids (B,) and the draws' keys (B, 2), with the
    cache."""

    def __init__(self, step: Step, cache: KVCache) -> None:
        rows, device = len(cache.lengths), cache.lengths.device
        self._step, self._cache = step, cache
        self._ids, self._lengths = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        self._shifts = None if cache.shifts is None else torch.zeros_like(self._lengths)
        self._keys = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._draws = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._fails = False

    def __call__(self, ids: Tensor, keys: Tensor | None, longest: int) -> tuple[Tensor, Tensor]:
        """longest: the number of positions of the longest row, including this step's. The results are overwritten by
        the next step."""
        rows, cache = len(ids), self._cache
        filled = min(cache.capacity, -(-longest // POSITIONS) * POSITIONS)
        # Copies onto themselves, which do nothing, unless rows have left.
        self._ids[:rows].copy_(ids)
        self._lengths[:rows].copy_(cache.lengths)
        if self._shifts is not None and cache.shifts is not None:
            self._shifts[:rows].copy_(cache.shifts)
            cache.shifts = self._shifts[:rows]
        if keys is not None:
            self._keys[:rows].copy_(keys, non_blocking=True)
        shape = rows, filled, keys is not None
        if (graph := self._graphs.get((rows, filled))) is not None:
            graph.replay()
        elif self._fails:
            self._run(*shape)
        else:
            self._record(*shape)
        cache.lengths = cache.next_lengths = self._lengths[:rows]
        cache.filled = filled
        return self._ids[:rows], self._draws[:rows]

    def _record(self, rows: int, filled: int, has_keys: bool) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(rows, filled, has_keys)
            try:
                self._graphs[rows, filled] = self._captured(rows, filled, has_keys)
            except RuntimeError as error:
                self._fails = True
                cause = str(error.__context__ or error).splitlines()[0]
                say("WARNING", f"generation without CUDA graphs, which is slower: {cause}")
        current.wait_stream(self._stream)

    def _captured(self, rows: int, filled: int, has_keys: bool) -> torch.cuda.CUDAGraph:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # a finalizer could wait for the device, which ends a capture
        try:
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                self._run(rows, filled, has_keys)
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph

    def _run(self, rows: int, filled: int, has_keys: bool) -> None:
        cache = self._cache
        # As rows of different lengths, which store at their positions. Rows that have ended go on, and stay at the last
        # position.
        cache.lengths, cache.filled, cache.shortest = self._lengths[:rows].clamp(max=filled - 1), filled - 1, -1
        ids, draws = self._step(self._ids[:rows], self._keys[:rows] if has_keys else None)
        self._ids[:rows], self._draws[:rows], self._lengths[:rows] = ids, draws, cache.lengths
