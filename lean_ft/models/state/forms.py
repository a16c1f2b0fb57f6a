"""How recurrent layers are computed on a device: by Triton kernels, or by PyTorch operations."""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from lean_ft.system.log import say
from lean_ft.system.triton_compiler import HAS_TRITON

Form = Literal["kernels", "segments", "chunks"]
"""Of linear attention: Triton kernels; PyTorch operations on all chunks of a segment; or chunk by chunk, on a CPU."""

Capability = tuple[int, int]

_CAPABILITY = (8, 0)  # Ampere: the first cards that compute products in TensorFloat-32
_LARGEST = 256  # features of a head
MOST_TAPS = 8  # of a convolution's kernel


def choose_form(key: Tensor, value: Tensor, capability: Capability | None, *, compiles: bool) -> tuple[Form, str]:
    """The form of linear attention with keys (B, T, G, K) and values (B, T, H, V) on a card, or on a CPU for None; and
    the reason where a card does not run the kernels.

    Args:
        compiles: Triton and a C compiler are installed.
    """
    if capability is None:
        return "chunks", ""
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if value.itemsize != 2:
        return "segments", str(value.dtype).removeprefix("torch.")
    if capability < _CAPABILITY:
        return "segments", f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if not (is_a_size(key_dim) and value_dim % 16 == 0):
        return "segments", f"heads with {key_dim} features of keys and {value_dim} of values"
    return ("kernels", "") if compiles else ("segments", "Triton or a C compiler is missing")


def is_a_size(key_dim: int) -> bool:
    """Whether the kernels support keys of this many features."""
    return 16 <= key_dim <= _LARGEST and key_dim & (key_dim - 1) == 0


def form_of(key: Tensor, value: Tensor) -> Form:
    """`choose_form` on the tensors' device, which logs once why a card does not run the kernels."""
    form, why = choose_form(key, value, _capability_of(value), compiles=HAS_TRITON)
    if why:
        _warn(why)
    return form


def why_no_convolution(x: Tensor, num_taps: int, activation: str | None, *, compiles: bool) -> str:
    """The reason why a card does not run the kernels of the convolution; empty if it does."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return str(x.dtype).removeprefix("torch.")
    if activation not in (None, "silu") or num_taps > MOST_TAPS:
        return f"a convolution with {num_taps} taps and the activation {activation}"
    return "" if compiles else "Triton or a C compiler is missing"


def has_convolution(x: Tensor, num_taps: int, activation: str | None) -> bool:
    """Whether the tensor's device runs the kernels of the convolution; logs once why a card does not."""
    if not x.is_cuda:
        return False
    if why := why_no_convolution(x, num_taps, activation, compiles=HAS_TRITON):
        _warn(why)
    return not why


def slow(why: str) -> str:
    """The sentence for logs and plans."""
    return f"recurrent layers run in PyTorch operations, without kernels (slow): {why}"


def _capability_of(x: Tensor) -> Capability | None:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


@cache
def _warn(why: str) -> None:
    say("WARNING", slow(why))
