"""Merge an adapter into the base weights: on copies, in float32, rounded once.

The live model does not change, so a run can merge while it trains. The report states the error of rounding to the
model's dtype: bfloat16 keeps 8 bits of a weight, which may be few bits of a small change. An adapter trained on a
quantized model is merged into the unquantized model, so the 4-bit errors are not part of the result, which therefore
differs slightly from the trained model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lean_ft.models import Decoder, load_model
from lean_ft.models.hf_format import own_tensors
from lean_ft.peft.experts import ExpertsAdapter
from lean_ft.peft.layers import AdaptedLayer
from lean_ft.peft.lora import SCORE, adapted_layers, has_adapter, take_adapters_off
from lean_ft.peft.new_rows import TrainedRows, trained_rows
from lean_ft.peft.peft_format import base_model, ids_of_rows, load_adapter, read_adapter
from lean_ft.quantize.nf4 import NF4Linear


@dataclass(frozen=True)
class MergeReport:
    """The size of a merge's change and rounding error: root mean squares over all merged weights, relative to theirs."""

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
def merge_adapter(model: Decoder) -> tuple[dict[str, Tensor], MergeReport]:
    """Return the merged weights of the adapted layers, by the plain model's names, and a report.

    The weights are new tensors in the model's dtype. Raises ValueError if the model has no adapter or is quantized.
    """
    merged, squares = {}, []
    for name, layer in _mergeable_layers(model).items():
        weight, of_layer = _merge(layer)
        merged[name if isinstance(layer, ExpertsAdapter) else f"{name}.weight"] = weight
        squares.append(of_layer)
    for name, layer in trained_rows(model).items():
        merged[f"{name}.weight"] = layer.merged_weight()
        squares.append(_of_rows(layer))
    return merged, _report(squares, model.dtype)


@torch.no_grad()
def plain_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of the plain model by name, layer by layer, merging adapted ones on demand.

    Raises ValueError for a quantized model.
    """
    layers = [*_mergeable_layers(model).values(), *trained_rows(model).values()] if has_adapter(model) else []
    frozen = {id(layer.frozen_weight): layer for layer in layers}
    for place, module in model.named_modules():
        if isinstance(module, AdaptedLayer | TrainedRows):
            continue
        for name, tensor in own_tensors(module):
            layer = frozen.get(id(tensor))
            whole = f"{place}.{name}".replace(".base_layer", "")
            yield whole, tensor if layer is None else layer.merged_weight().to(tensor.dtype)


@torch.no_grad()
def load_merged(
    adapter: str | Path,
    base: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Decoder, MergeReport]:
    """Return a plain model with the adapter of a folder merged, and a report.

    `base` is the model's folder; None uses the model that the adapter names. Needs memory for the model and one float32
    matrix. Raises ValueError if the adapter is not supported or does not fit the model.
    """
    scores = f"{SCORE}.weight" in read_adapter(Path(adapter)).tensors
    base = base_model(Path(adapter)) if base is None else base
    model = load_model(base, device=device, dtype=dtype, scores=scores, new_ids=ids_of_rows(adapter))
    load_adapter(model, adapter)
    squares = []
    for layer in _mergeable_layers(model).values():
        layer.frozen_weight.data, of_layer = _merge(layer)
        squares.append(of_layer)
    for layer in trained_rows(model).values():
        layer.frozen_weight.data = layer.merged_weight()
        squares.append(_of_rows(layer))
    take_adapters_off(model)
    return model.requires_grad_(True), _report(squares, dtype)


def _report(squares: list[tuple[float, float, float]], dtype: torch.dtype) -> MergeReport:
    weights, changes, errors = map(sum, zip(*squares, strict=True))
    return MergeReport(len(squares), (changes / (weights or 1.0)) ** 0.5, (errors / (weights or 1.0)) ** 0.5, dtype)


def _mergeable_layers(model: Decoder) -> dict[str, AdaptedLayer]:
    layers = adapted_layers(model)
    if not has_adapter(model):
        raise ValueError("the model has no adapter to merge.")
    for name, layer in layers.items():
        if isinstance(layer.base_layer, NF4Linear):
            raise ValueError(
                f"{name} is quantized, and an adapter can be merged only into unquantized weights. Load the model without "
                "lora.quantize, load the saved adapter, and merge that."
            )
    return layers


def _merge(layer: AdaptedLayer) -> tuple[Tensor, tuple[float, float, float]]:
    """The layer's merged weight in its dtype; sums of squares of the weight, its change and the rounding error."""
    weight, exact = layer.frozen_weight.detach(), layer.merged_weight()
    rounded = exact.to(weight.dtype, copy=True)
    error = (rounded.float() - exact).square().sum().item()
    return rounded, (weight.float().square().sum().item(), exact.sub_(weight).square().sum().item(), error)


def _of_rows(layer: TrainedRows) -> tuple[float, float, float]:
    """The sums of squares of `_merge`, for trained rows."""
    start, exact = layer.start.float(), layer.rows.float()
    rounding = layer.rows.to(layer.start) - exact
    return start.square().sum().item(), (exact - start).square().sum().item(), rounding.square().sum().item()
