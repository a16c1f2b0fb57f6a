"""The device that a model computes on: find it by name, check that it can compute in a dtype, and describe it."""

import torch

from lean_ft.models.float32_products import slow_dtypes
from lean_ft.settings import spelled_out
from lean_ft.system.units import counted

MIN_BF16_CAPABILITY = (8, 0)  # Ampere: the first CUDA cards with bfloat16 instructions


def resolve_device(name: str) -> torch.device:
    """The torch device for `auto|cuda|cpu|mps`. Raises ValueError with the available devices if it is missing."""
    name, there = spelled_out(name), ["cpu"]
    if torch.backends.mps.is_available():
        there.insert(0, "mps")
    if torch.cuda.is_available():
        there.insert(0, "cuda")
    if name == "auto":
        name = there[0]
    if name not in there:
        build = f"torch {torch.__version__}"
        if name == "cuda" and torch.version.cuda is None:
            build += " (a build without CUDA; install one from https://pytorch.org)"
        raise ValueError(
            f"device={name} needs a {name} device, and {build} sees none. It sees: {', '.join(there)}. "
            f"Set device={there[0]} or device=auto."
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def check_dtype(dtype: str, device: torch.device) -> list[str]:
    """Raise ValueError if the device cannot compute in `model.dtype`; otherwise return notes for the log."""
    if device.type == "cuda" and dtype == "bfloat16":
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_BF16_CAPABILITY:
            raise ValueError(
                f"model.dtype=bfloat16 needs a CUDA card of compute capability 8.0 (Ampere) or newer; "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]} and would emulate it. "
                f"Set model.dtype=float16 (loss scaling is automatic) or model.dtype=float32."
            )
    if device.type == "mps" and dtype == "bfloat16" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ValueError("model.dtype=bfloat16 on mps needs macOS 14 or newer. Set model.dtype=float32 or device=cpu.")
    if device.type == "cpu" and getattr(torch, dtype) in slow_dtypes():
        return [f"this CPU has no {dtype} instructions, so {dtype} products are computed in float32"]
    return []


def describe(device: torch.device) -> str:
    """A device for logs: its name, or a CPU's number of threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu, {counted(torch.get_num_threads(), 'threads')}"
    return str(device)
