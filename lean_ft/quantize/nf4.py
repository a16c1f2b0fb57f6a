"""NF4: frozen weights in 4.13 bits per value, in the format of `models.frozen_weight`.

Quantized weights are never saved; each run makes them from the model's folder.

Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from lean_ft.models.frozen_weight import NF4_BLOCK, NF4_SCALE_BLOCK, Form, Frozen
from lean_ft.system.environment import bitsandbytes_problem
from lean_ft.torch_private import without_modes

_STRIP_NUMBERS = 2**26  # a multiple of the block; on a CPU the library takes 16 bytes per number


def to_nf4(weight: Tensor) -> Frozen:
    """Quantize a weight (O, I), or a stack of them, with double quantization. On `meta`, only shapes are made."""
    form = Form("nf4", tuple(weight.shape), weight.dtype)
    if weight.dim() == 3 and weight[0].numel() % NF4_BLOCK:
        raise ValueError(
            f"lora.quantize=nf4 quantizes blocks of {NF4_BLOCK} values, which do not divide this model's experts of "
            f"shape {tuple(weight.shape[1:])}. Set lora.quantize=float8 or none."
        )
    if weight.is_meta:
        num_scales = -(-weight.numel() // NF4_BLOCK)
        levels = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="meta")
        scales = torch.empty(num_scales, dtype=torch.uint8, device="meta")
        scale_scales = torch.empty(-(-num_scales // NF4_SCALE_BLOCK), device="meta")
        return Frozen(form, (levels, scales, scale_scales, *(torch.empty(n, device="meta") for n in ((), (256,)))))
    check_available(on_gpu=weight.is_cuda)
    library, strips = _bitsandbytes(), weight.contiguous().view(-1).split(_STRIP_NUMBERS)
    parts = [library.quantize_4bit(strip, blocksize=NF4_BLOCK, quant_type="nf4") for strip in strips]
    scales = torch.cat([state.absmax for _, state in parts])
    mean_scale = scales.mean()
    scales, state = library.quantize_blockwise(scales - mean_scale, blocksize=NF4_SCALE_BLOCK)
    return Frozen(form, (torch.cat([levels for levels, _ in parts]), scales, state.absmax, mean_scale, state.code))


def check_available(*, on_gpu: bool) -> None:
    """Raise ValueError if bitsandbytes is missing or has no kernels for the GPU."""
    if (reason := bitsandbytes_problem(on_gpu=on_gpu)) is not None:
        fix = "Run `pip install bitsandbytes`, or set lora.quantize=none."
        raise ValueError(f"lora.quantize=nf4 needs bitsandbytes, and {reason}. {fix}")


@cache
def _bitsandbytes() -> ModuleType:
    import bitsandbytes.functional as functional

    with without_modes():  # the library builds its tables on first use
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    return functional
