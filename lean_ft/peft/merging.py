"""Merge an adapter into the base weights, in float32, rounded once.

The report states the error of rounding to the model's dtype: bfloat16 keeps 8 bits of a weight, which may be few bits
of a small change. An adapter trained on a quantized model is merged into the unquantized model, so the 4-bit errors are
not part of the result, which therefore differs slightly from the trained model. `lean_ft.peft.published` merges on
copies while a run trains.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from lean_ft.models import Decoder, load_model
from lean_ft.models.load_options import LoadKeywords, torch_dtype
from lean_ft.peft.layers import AdaptedLayer, adapted_layers
from lean_ft.peft.lora import take_adapters_off
from lean_ft.peft.new_rows import trained_rows
from lean_ft.peft.peft_format import load_adapter
from lean_ft.peft.stored_adapter import base_model, ids_of_rows, labels_of


@dataclass(frozen=True)
class MergeReport:
    """The size of a merge's change and rounding error: root mean squares over all merged weights, relative to
    theirs."""

    num_layers: int
    change: float
    rounding_error: float
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        share = f", {self.rounding_error / self.change:.1%} of that change" if self.change else ""
        return (
            f"merged an adapter into {self.num_layers} layers: relative change {self.change:.2g}, error of rounding to "
            f"{dtype} {self.rounding_error:.2g}{share}"
        )


@torch.no_grad()
def load_merged(
    adapter: str | Path,
    base: str | Path | None = None,
    device: str | torch.device = "cpu",
    **options: Unpack[LoadKeywords],
) -> tuple[Decoder, MergeReport]:
    """Return a plain model with the adapter of a folder merged, and a report.

    `options` are those of `load_model`, but for scores and new_ids, which the adapter has; the default dtype is
    bfloat16. `base` is the model's folder; None uses the model that the adapter names. Needs
    memory for the model and one float32 matrix. Raises ValueError if the adapter is not supported or does not fit the
    model.
    """
    base = base_model(Path(adapter)) if base is None else base
    dtype = torch_dtype(options.get("dtype", torch.bfloat16))
    keywords: LoadKeywords = {**options, "dtype": dtype, "scores": labels_of(adapter), "new_ids": ids_of_rows(adapter)}
    model = load_model(base, device, **keywords)
    load_adapter(model, adapter)
    squares = []  # of each layer's weight, its change and the rounding error
    for layer in _mergeable_layers(model).values():
        weight, exact = layer.frozen.tensors[0].detach(), layer.merged_weight()
        rounded = exact.to(weight.dtype, copy=True)
        error = _square(rounded.float() - exact)
        squares.append((_square(weight.float()), _square(exact.sub_(weight)), error))
        layer.frozen.tensors[0].data = rounded
    for layer in trained_rows(model).values():
        start, exact = layer.start.float(), layer.rows.float()
        squares.append((_square(start), _square(exact - start), _square(layer.rows.to(layer.start) - exact)))
        layer.frozen.tensors[0].data = layer.merged_weight()
    take_adapters_off(model)
    weights, changes, errors = map(sum, zip(*squares, strict=True))
    change, rounding_error = ((part / (weights or 1.0)) ** 0.5 for part in (changes, errors))
    return model.requires_grad_(True), MergeReport(len(squares), change, rounding_error, dtype)


def _square(tensor: Tensor) -> float:
    return tensor.square().sum().item()


def _mergeable_layers(model: Decoder) -> dict[str, AdaptedLayer]:
    layers = adapted_layers(model)
    for name, layer in layers.items():
        if layer.frozen.form.kind != "plain":
            quantized = f"{name} is quantized, and an adapter can be merged only into unquantized weights"
            raise ValueError(f"{quantized}. Load the model with lora.quantize=none, then the saved adapter.")
    return layers
