"""Adapters: LoRA, DoRA and QLoRA, saved in PEFT's format, loaded from it, and merged on copies."""

from lean_ft.peft.layers import AdaptedLayer, AdapterShape
from lean_ft.peft.lora import adapted_layers, apply_lora, lr_ratios, quantize_as_loaded
from lean_ft.peft.nf4 import NF4Linear

__all__ = [
    "AdaptedLayer",
    "AdapterShape",
    "NF4Linear",
    "adapted_layers",
    "apply_lora",
    "lr_ratios",
    "quantize_as_loaded",
]
