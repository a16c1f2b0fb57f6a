"""The choice of attention's kernel on a GPU: PyTorch's flash kernels, the Triton kernels of `flash_kernels`, or blocks of eager
operations (`row_attention`), which run everywhere and are slow.

`use_attention` sets the choice for this process, because PyTorch replaces its flash kernels for a whole process, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.attention as torch_attention

from lean_ft.models.config import DecoderConfig
from lean_ft.models.grouped_matmul import HAS_TRITON
from lean_ft.system.units import counted

Kernel = Literal["flash", "own", "eager"]

_CAPABILITY = (8, 0)  # Ampere: the first cards whose kernels support documents, windows and grouped heads
_LARGEST_HEAD = {"flash": 256, "own": 512, "FA4": 128}  # features; FA4 is the limit of its backward pass
_PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}  # the modules that PyTorch imports
_CARDS = {9: "FA3", 10: "FA4"}  # major compute capability -> the fastest kernels

_choice = "auto"


def use_attention(choice: str, dtype: torch.dtype, device: torch.device) -> None:
    """Set `memory.attention` for this process. Raises ValueError if the choice cannot run."""
    global _choice
    asked = {"flash3": "FA3", "flash4": "FA4"}.get(choice)
    if choice != "auto" and (reason := _reason_against(choice, asked, dtype, device)) is not None:
        raise ValueError(f"memory.attention={choice} is not possible: {reason}. Set memory.attention=auto.")
    _choice = choice
    if _active() is not None and choice != "auto":
        torch_attention.restore_flash_attention_impl()
    if choice == "auto" and device.type == "cuda" and _active() is None:
        best = _CARDS.get(torch.cuda.get_device_capability(device)[0])
        asked = best if best is not None and _reason_against("auto", best, dtype, device) is None else None
    if asked is None:
        return
    try:
        torch_attention.activate_flash_attention_impl(asked)
    except (ImportError, OSError, RuntimeError) as error:
        if choice != "auto":
            raise ValueError(
                f"memory.attention={choice} is not possible: {error}. Set memory.attention=auto."
            ) from None


@contextmanager
def planned_attention(choice: str) -> Iterator[None]:
    """Context manager in which `choose_kernel` follows this `memory.attention`, which may be impossible on this machine."""
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
    choice: str | None = None,
) -> tuple[Kernel, str]:
    """The kernel of attention on a card, and the reason where it is not PyTorch's.

    Args:
        is_plain: without a soft cap and without queries that see later tokens.
        compiles: Triton and a C compiler are installed; default: look on this machine.
        choice: `memory.attention`; default: this process's.
    """
    choice = _choice if choice is None else choice
    compiles = HAS_TRITON if compiles is None else compiles
    reason = "a soft cap, or queries that see later tokens" if not is_plain else f"heads of {head_dim} features"
    if choice == "eager":
        return "eager", "memory.attention=eager"
    if dtype not in (torch.bfloat16, torch.float16):
        return "eager", str(dtype).removeprefix("torch.")
    if capability < _CAPABILITY:
        return "eager", f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    largest = _LARGEST_HEAD.get(_active() or "", _LARGEST_HEAD["flash"])
    is_for_flash = is_plain and head_dim <= largest and head_dim % 8 == 0
    if is_for_flash and choice != "own" and (compiles or not sinks):
        return "flash", ""
    if compiles and head_dim <= _LARGEST_HEAD["own"]:
        return "own", "memory.attention=own" if is_for_flash else reason
    missing = "" if compiles else ", and Triton or a C compiler is missing"
    return "eager", f"{'sinks' if is_for_flash else reason}{missing}"


def attention_kernel(
    config: DecoderConfig,
    layer: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    compiles: bool | None = None,
    choice: str | None = None,
) -> str:
    """Describe the kernel of one layer's attention in training on a card of this compute capability; as `choose_kernel`.
    It begins with `flash`, `own` or `blocks`. Tokens of images that see each other are not considered."""
    latent, head_dim = config.latent, config.head_dim_of(layer)
    if latent is not None:
        head_dim = max(latent.plain_dim + head_dim, latent.value_dim)
    sinks, is_plain = config.attention_sinks, config.attention_softcap is None
    kernel, reason = choose_kernel(
        head_dim, dtype, capability, is_plain=is_plain, sinks=sinks, compiles=compiles, choice=choice
    )
    if kernel == "flash":
        version = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}.get(_active() or "", "FlashAttention 2")
        return f"flash kernel ({version}){', sinks joined afterwards' if sinks else ''}"
    reason = "soft cap" if config.attention_softcap is not None and reason.startswith("a soft cap") else reason
    return f"own Triton kernel: {reason}" if kernel == "own" else f"blocks of eager operations (slow): {reason}"


def describe_kernels(config: DecoderConfig, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """The kernels of all layers, for the log: `flash kernel (FlashAttention 2) in 25 layers; ...`."""
    layers = [i for i, layer in enumerate(config.layers) if layer.has_attention]
    found = [attention_kernel(config, i, dtype, capability) for i in layers]
    kinds = list(dict.fromkeys(found))
    if len(kinds) < 2:
        return "".join(kinds)
    return "; ".join(f"{kind} in {counted(found.count(kind), 'layers')}" for kind in kinds)


def _active() -> str | None:
    """PyTorch's flash kernels other than the built-in FlashAttention 2, if they are active."""
    current = getattr(torch_attention, "current_flash_attention_impl", None)  # not in every torch
    return None if current is None else current()


def _reason_against(choice: str, asked: str | None, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a choice cannot run here; `asked`: PyTorch's name of its flash kernels."""
    if device.type != "cuda":
        return f"it needs a GPU, and device={device.type}"
    if choice == "eager":
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes in 16 bits, and model.dtype={str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
    if capability < _CAPABILITY:
        return f"the kernel needs 8.0 (Ampere) or newer, and {card}"
    if choice == "own" and not HAS_TRITON:
        return "it needs Triton and a C compiler (gcc or clang), and one is missing"
    if asked is None:
        return None
    if capability[0] not in ((9,) if asked == "FA3" else (9, 10)):
        return f"{asked} needs {'9.0 (Hopper)' if asked == 'FA3' else '9.0 or 10.0 (Hopper, Blackwell)'}, and {card}"
    if asked not in getattr(torch_attention, "list_flash_attention_impls", list)():
        return f"torch {torch.__version__} does not offer {asked}"
    try:
        is_installed = find_spec(_PACKAGES[asked]) is not None
    except ImportError:  # the package that contains the module is missing
        is_installed = False
    return None if is_installed else f"the module {_PACKAGES[asked]} is not installed"
