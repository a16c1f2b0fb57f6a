"""A stand-in for the link to pinned host memory, on a machine without a GPU, whose copies are as late as they can
be."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lean_ft.system.host_link import HostLink


class LateLink(HostLink):
    """A copy's target holds NaN (or 255) until someone waits for the copy, so that what is read too early shows.

    `log` lists (`copy` | `wait`, bytes) in the order in which they were asked for.
    """

    def __init__(self, in_flight_bytes: int = 0) -> None:
        self.log: list[tuple[str, int]] = []
        self._queued: deque[tuple[object, Tensor, Tensor]] = deque()
        super().__init__(torch.device("cpu"), in_flight_bytes)

    def _open(self) -> None:
        pass

    def _host_memory(self, like: Tensor, *, new: bool = False) -> Tensor:
        return torch.empty_like(like, device="cpu")

    def seen_from_device(self, host: Tensor) -> Tensor:
        return host

    def _device_memory(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        with torch.no_grad():
            target.fill_(float("nan") if target.is_floating_point() else 255)
        event = object()
        self._queued.append((event, source.detach(), target))
        self.log.append(("copy", source.nbytes))
        return event

    def _wait(self, event: Any) -> None:
        """Copies are done in their order, up to this one."""
        self.log.append(("wait", 0))
        while any(queued is event for queued, _, _ in self._queued):
            self._do_next()

    def _finish(self) -> None:
        while self._queued:
            self._do_next()

    def _do_next(self) -> None:
        _, source, target = self._queued.popleft()
        with torch.no_grad():
            target.copy_(source)
