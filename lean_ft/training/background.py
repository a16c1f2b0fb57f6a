"""Save from a host copy while training goes on: a thread writes, and its error is the run's.

The copy holds the trained weights and the optimizer's state until they are written; what is frozen is shared. On a GPU
it lies in host memory; on a CPU it doubles weights and state for that time.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from torch import nn

from lean_ft.system.shards import Part


def host_copy(model: nn.Module) -> nn.Module:
    """A model that holds the same weights on the CPU, for saving. Parameters that are not trained, and buffers, are shared.

    Hooks of parameters and compiled code are not copied.
    """
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        kept = parameter
        if parameter.requires_grad:
            kept = nn.Parameter(parameter.detach().to("cpu", copy=True))
        memo[id(parameter)] = kept
    return copy.deepcopy(model, memo)


def host_copies(parts: Mapping[str, Part]) -> dict[str, Part]:
    return {name: replace(part, values=part.values.to("cpu", copy=True)) for name, part in parts.items()}


class BackgroundWriter:
    """One thing is written at a time; whoever starts the next waits for it."""

    def __init__(self) -> None:
        self._written: Future[object] | None = None

    @property
    def is_writing(self) -> bool:
        return self._written is not None and not self._written.done()

    def start(self, write: Callable[[], object]) -> None:
        """Wait for what is being written, then write this. Raises what the former raised."""
        self.wait()
        thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)  # it ends when this is written

    def check(self) -> None:
        """Raise the error of a write that has failed; wait for nothing."""
        if not self.is_writing:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what the write raised."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
