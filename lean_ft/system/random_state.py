"""The state of all random number generators, as JSON values."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

RandomState = dict[str, Any]


def capture_random_state(device: torch.device) -> RandomState:
    """The states of Python's, numpy's (global), torch's and the device's random number generators, as JSON values."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    state: RandomState = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(key).tolist(), int(position), int(has_gauss), float(cached_gaussian)],
        "torch": _to_hex(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_hex(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        state["mps"] = _to_hex(torch.mps.get_rng_state())
    return state


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Restore the generators that are in `state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_from_hex(state["cuda"]), device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(_from_hex(state["mps"]))


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
