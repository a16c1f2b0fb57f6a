"""Merges an adapter into the weights that it was trained beside: on copies, in float32, and rounded once.

The model that is given stays as it is, down to the last bit, so a save during training can merge. What rounding to the
model's dtype costs is reported: bfloat16 keeps 8 bits of a weight, and of a change much smaller than the weight it may
keep few. An adapter that was trained on a quantised model is merged into the model as it was before it was quantised:
the errors of 4 bits are not made a part of it, and the result is the model that everything else loads, no longer
exactly the one that was trained.
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
    """What merging changed, and what of it rounding took. Sizes are root mean squares over all merged weights."""

    num_layers: int
    change: float
    """Of the weights by the adapter, relative to the weights."""
    rounding_error: float
    """Of the merged weights by rounding to their dtype, relative to the weights."""
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        share = f", {self.rounding_error / self.change:.1%} of that change" if self.change else ""
        return (
            f"merged an adapter into {self.num_layers} layers: it changes their weights by {self.change:.2g} of their "
            f"size, and rounding to {dtype} by {self.rounding_error:.2g}{share}"
        )


@torch.no_grad()
def merge_adapter(model: Decoder) -> tuple[dict[str, Tensor], MergeReport]:
    """Returns the weights of the adapted layers with the adapter in them, by the plain model's names, and a report.

    They are new tensors in the dtype of the model's. Raises ValueError where the model has no adapter, or a quantised
    weight, into which nothing can be merged.
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
    """Each tensor of the plain model by its name there, layer by layer; those with an adapter merged, new ones, as they are asked
    for. Raises ValueError as `merge_adapter` does for quantised weights."""
    layers = [*_mergeable_layers(model).values(), *trained_rows(model).values()] if has_adapter(model) else []
    frozen = {id(layer.frozen_weight): layer for layer in layers}
    for place, module in model.named_modules():
        if isinstance(module, AdaptedLayer | TrainedRows):
            continue  # the adapter's own
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
    """Returns a plain model with the adapter of a folder merged into it, and a report.

    `base` is the model's folder; None takes the one that the adapter names. Takes the memory of the model and one
    matrix in float32. Raises ValueError where either is not what is expected.
    """
    scores = f"{SCORE}.weight" in read_adapter(Path(adapter)).tensors
    base = base_model(Path(adapter)) if base is None else base
    model = load_model(base, device=device, dtype=dtype, scores=scores, new_ids=ids_of_rows(adapter))
    load_adapter(model, adapter)
    squares = []
    for layer in _mergeable_layers(model).values():
        layer.frozen_weight.data, of_layer = _merge(layer)  # the model is this function's own
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
                f"{name} is quantised, and an adapter is merged into the model as it was before: load it without "
                "lora.quantize, put the saved adapter on it, and merge that."
            )
    return layers


def _merge(layer: AdaptedLayer) -> tuple[Tensor, tuple[float, float, float]]:
    """The layer's merged weight in its own dtype; sums of the squares of the weight, of its change and of rounding."""
    weight, exact = layer.frozen_weight.detach(), layer.merged_weight()
    rounded = exact.to(weight.dtype, copy=True)
    error = (rounded.float() - exact).square().sum().item()
    return rounded, (weight.float().square().sum().item(), exact.sub_(weight).square().sum().item(), error)


def _of_rows(layer: TrainedRows) -> tuple[float, float, float]:
    """The same sums, of rows that train."""
    start, exact = layer.start.float(), layer.rows.float()
    weight, change, error = (
        x.square().sum().item() for x in (start, exact - start, layer.rows.to(layer.start) - exact)
    )
    return weight, change, error
