"""Undo what calls of a user's functions change in this process."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lean_ft.system.log import say, slow_calls_reported
from lean_ft.system.random_state import capture_random_state, restore_random_state

PROCESS_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # Setting a default device, even "cpu", activates a mode that torch.compile cannot trace. None removes it.
    "torch's default device": (
        torch.get_default_device,
        lambda was: torch.set_default_device(None if was.type == "cpu" else was),
    ),
}
"""What a function must not change for the rest of the run: how to read it, and how to restore it. The current folder is
restored by `user_code`."""


class UnchangedProcess:
    """Context managers around calls of functions that must not change the rest of the run."""

    def __init__(self, device: torch.device) -> None:
        """device: whose random generator is restored too."""
        self._device, self._warned = device, set[str]()

    @contextmanager
    def __call__(self, name: str, seed: int) -> Iterator[None]:
        """Report that the function `name`, unless it is empty, is still running. Seed the random generators for it, and
        undo its changes of them and of the process."""
        before, random_state = [read() for read, _ in PROCESS_STATE.values()], capture_random_state(self._device)
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
            seed_generator(seed)
        try:
            with slow_calls_reported(name) if name else nullcontext():
                yield
        finally:
            restore_random_state(random_state, self._device)
        for (what, (read, restore)), value in zip(PROCESS_STATE.items(), before, strict=True):
            if read() != value:
                restore(value)
                if (text := f"{name or 'a tool'} changes {what}, which is undone after each call.") not in self._warned:
                    self._warned.add(text)
                    say("WARNING", text)
