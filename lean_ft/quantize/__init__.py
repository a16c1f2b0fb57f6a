"""Quantized weights and products: torchao's 8- and 4-bit kinds, quantization-aware training, NF4 and float8."""

from lean_ft.quantize.held_out_loss import mean_loss
from lean_ft.quantize.torchao_kinds import (
    GROUPED,
    fake_quantize,
    is_quantized,
    load_quantized,
    quantize,
    save_quantized,
    torchao_config,
)

__all__ = [
    "GROUPED",
    "fake_quantize",
    "is_quantized",
    "load_quantized",
    "mean_loss",
    "quantize",
    "save_quantized",
    "torchao_config",
]
