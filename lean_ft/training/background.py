"""Save from a host copy while training goes on: a thread writes, and its error is the run's.

The copy holds the trained weights and the optimizer's state until they are written; what is frozen is shared. On a GPU
it lies in host memory; on a CPU it doubles weights and state for that time.
"""

import copy
import threading
from collections.abc import Callable, Mapping

from torch import Tensor, nn


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


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class BackgroundWriter:
    """One thing is written at a time; whoever starts the next waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Wait for what is being written, then write this. Raises what the former raised."""
        self.wait()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint writer")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a write that has failed; wait for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what the write raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
