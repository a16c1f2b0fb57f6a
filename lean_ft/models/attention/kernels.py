"""The choice of attention's kernel on a GPU: PyTorch's flash kernels, the Triton kernels of `flash_kernels`, or blocks
of eager operations (`row_attention`), which run everywhere and are slow.

`use_attention` sets the choice for this process, because PyTorch replaces its flash kernels for a whole process, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.attention as torch_attention
from torch import Tensor

from lean_ft.system.triton_compiler import HAS_TRITON
from lean_ft.system.units import counted

if TYPE_CHECKING:
    from lean_ft.models.attention.attention import Scoring
    from lean_ft.models.decoder import Decoder

Kernel = Literal["flash", "own", "eager"]

_CAPABILITY = (8, 0)  # Ampere: the first cards whose kernels support documents, windows and grouped heads
_LARGEST_HEAD = {"flash": 256, "own": 512, "FA4": 128}  # features; FA4 is the limit of its backward pass
_FASTEST = {9: "FA3", 10: "FA4"}  # PyTorch's name of the newest kernels, by major compute capability

_choice = "auto"


def use_attention(choice: str, dtype: torch.dtype, device: torch.device) -> None:
    """Set `memory.attention` for this process. Raises ValueError if the choice cannot run."""
    global _choice
    if choice != "auto" and (reason := _reason_against(choice, dtype, device)) is not None:
        raise ValueError(f"memory.attention={choice} is not possible: {reason}. Set memory.attention=auto.")
    _choice = choice
    if choice != "auto":
        if _active() is not None:
            torch_attention.restore_flash_attention_impl()
    elif device.type == "cuda" and dtype.itemsize == 2 and _active() is None:
        name = _FASTEST.get(torch.cuda.get_device_capability(device)[0])
        # This torch has no such kernels, or their package is missing or damaged.
        with suppress(AttributeError, ImportError, OSError, RuntimeError, ValueError):
            if name is not None:
                torch_attention.activate_flash_attention_impl(name)


def kernel_of(query: Tensor, *, is_plain: bool, sinks: bool = False) -> Kernel | None:
    """The kernel for a query (..., D) as `choose_kernel`; None on a CPU."""
    if not query.is_cuda:
        return None
    capability = torch.cuda.get_device_capability(query.device)
    return choose_kernel(query.shape[-1], query.dtype, capability, is_plain=is_plain, sinks=sinks)[0]


@contextmanager
def planned_attention(choice: str) -> Iterator[None]:
    """Context manager in which `choose_kernel` follows this `memory.attention`, which may be impossible on this
    machine."""
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def choose_kernel(
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    is_plain: bool = True,
    sinks: bool = False,
    compiles: bool | None = None,
) -> tuple[Kernel, str]:
    """The kernel of attention on a card, and the reason where it is not PyTorch's.

    Args:
        is_plain: PyTorch's kernel can compute the scores: there is no soft cap, and queries see no later tokens, or all
            of them see as far ahead as behind. With sinks, no query may see later tokens.
        compiles: Triton and a C compiler are installed; default: look on this machine.
    """
    compiles = HAS_TRITON if compiles is None else compiles
    reason = "a soft cap, or queries that see later tokens" if not is_plain else f"heads of {head_dim} features"
    if _choice == "eager":
        return "eager", "memory.attention=eager"
    if dtype.itemsize != 2:
        return "eager", str(dtype).removeprefix("torch.")
    if capability < _CAPABILITY:
        return "eager", f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    largest = _LARGEST_HEAD.get(_active() or "", _LARGEST_HEAD["flash"])
    is_for_flash = is_plain and head_dim <= largest and head_dim % 8 == 0
    if is_for_flash and _choice != "own" and (compiles or not sinks):
        return "flash", ""
    if compiles and head_dim <= _LARGEST_HEAD["own"]:
        return "own", "memory.attention=own" if is_for_flash else reason
    missing = "" if compiles else ", and Triton or a C compiler is missing"
    return "eager", f"{'sinks' if is_for_flash else reason}{missing}"


def any_in_blocks(model: "Decoder", dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a layer has no kernel in training: its attention goes over whole rows in blocks, whatever documents they
    hold."""
    return any(_kernel_of(layer, dtype, capability)[0] == "eager" for layer in _attention_layers(model))


def describe_kernels(model: "Decoder", dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """The kernels of all layers in training, for the log: `flash kernel (FlashAttention 2) in 25 layers; ...`. Tokens
    of images that see each other are not considered."""
    by_layer = [_describe(layer, dtype, capability) for layer in _attention_layers(model)]
    kernels = list(dict.fromkeys(by_layer))
    if len(kernels) < 2:
        return "".join(kernels)
    return "; ".join(f"{kernel} in {counted(by_layer.count(kernel), 'layers')}" for kernel in kernels)


class _AttentionLayer(NamedTuple):
    head_dim: int
    scoring: "Scoring"
    has_sinks: bool


def _attention_layers(model: "Decoder") -> Iterator[_AttentionLayer]:
    latent = model.config.latent
    for i, layer in enumerate(model.config.layers):
        if not layer.has_attention:
            continue
        attention: Any = model.layers[i].self_attn
        head_dim = model.config.head_dim_of(i)
        if latent is not None:
            head_dim = max(latent.plain_dim + head_dim, latent.value_dim)
        has_sinks = getattr(attention, "sinks", None) is not None
        yield _AttentionLayer(head_dim, attention.scoring, has_sinks)


def _kernel_of(layer: _AttentionLayer, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Kernel, str]:
    is_plain, sinks = layer.scoring.is_plain(sinks=layer.has_sinks), layer.has_sinks
    return choose_kernel(layer.head_dim, dtype, capability, is_plain=is_plain, sinks=sinks)


def _describe(layer: _AttentionLayer, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    kernel, reason = _kernel_of(layer, dtype, capability)
    if kernel == "flash":
        version = (_active() or "FA2").removeprefix("FA")
        remark = (
            ", to both sides" if layer.scoring.sees_later else ", sinks joined afterwards" if layer.has_sinks else ""
        )
        return f"flash kernel (FlashAttention {version}){remark}"
    reason = "soft cap" if layer.scoring.softcap is not None and reason.startswith("a soft cap") else reason
    return f"own Triton kernel: {reason}" if kernel == "own" else f"blocks of eager operations (slow): {reason}"


def _active() -> str | None:
    """PyTorch's flash kernels other than the built-in FlashAttention 2, if they are active."""
    current = getattr(torch_attention, "current_flash_attention_impl", None)  # not in every torch
    return None if current is None else current()


def _reason_against(choice: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a choice cannot run here, as far as the card decides."""
    if device.type != "cuda":
        return f"it needs a GPU, and device={device.type}"
    if choice == "eager":
        return None
    if dtype.itemsize != 2:
        return f"the kernel computes in 16 bits, and model.dtype={str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
    if capability < _CAPABILITY:
        return f"the kernel needs 8.0 (Ampere) or newer, and {card}"
    needs_triton = choice == "own" and not HAS_TRITON
    return "it needs Triton and a C compiler (gcc or clang), and one is missing" if needs_triton else None
