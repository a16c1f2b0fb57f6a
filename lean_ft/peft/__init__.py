"""Adapters: LoRA, DoRA and QLoRA, saved in PEFT's format, loaded from it, and merged on copies."""

from lean_ft.peft.layers import adapted_layers, base_modules
from lean_ft.peft.lora import (
    adapter_off,
    apply_lora,
    has_adapter,
    load_with_adapter,
    lr_ratios,
    quantize_as_loaded,
)
from lean_ft.peft.merging import MergeReport, load_merged
from lean_ft.peft.peft_format import (
    adapter_bytes,
    adapter_parts,
    base_fingerprint,
    check_trained,
    load_adapter,
    restore_adapter,
    save_adapter,
)
from lean_ft.peft.published import published_parts
from lean_ft.peft.stored_adapter import ids_of_rows, is_adapter, labels_of

__all__ = [
    "MergeReport",
    "adapted_layers",
    "adapter_bytes",
    "adapter_off",
    "adapter_parts",
    "apply_lora",
    "base_fingerprint",
    "base_modules",
    "check_trained",
    "has_adapter",
    "ids_of_rows",
    "is_adapter",
    "labels_of",
    "load_adapter",
    "load_merged",
    "load_with_adapter",
    "lr_ratios",
    "published_parts",
    "quantize_as_loaded",
    "restore_adapter",
    "save_adapter",
]
