"""Weights and adapter of a model that was cut over ranks before it had any: each rank takes what is its own.

Frozen weights are read by rows. Some are first read whole, a matrix at a time, as what is kept of them depends on all of
their values: what is quantised, whose scales share a mean, below DoRA, which keeps the norms of rows, and where the rows of new
tokens train, whose mean all others have. The adapter is
drawn whole, in the order in which one process draws it, so its values do not depend on how many there are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.hf_format import Unread, own_tensors
from lean_ft.peft.layers import AdaptedLayer, row_norms
from lean_ft.peft.new_rows import TrainedRows, trained_rows
from lean_ft.quantize.nf4 import CUT_NAMES, NF4Linear, check_available, quantize, whole
from lean_ft.system.shards import Part, local, part_of, whole_shape

BASE = ".base_layer"


class UnreadBesideAdapter(Unread):
    """Of a model whose adapters are in place, and of shapes alone."""

    def into(self, model: Decoder) -> None:
        adapters = {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLayer)}
        below_dora = {layer.base_layer: layer for layer in adapters.values() if layer.shape.dora}
        below_rows: dict[nn.Module, TrainedRows] = {layer.base_layer: layer for layer in trained_rows(model).values()}
        for name, module in model.named_modules():
            if isinstance(module, AdaptedLayer | TrainedRows):
                continue
            own_name = name.replace(BASE, "")
            for key, parameter in own_tensors(module):
                if isinstance(module, NF4Linear) and key in CUT_NAMES:
                    if key == CUT_NAMES[0]:
                        self._quantize(module, f"{own_name}.weight", below_dora.get(module))
                elif key == "weight" and module in below_dora | below_rows:
                    weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=local(parameter).device)
                    self.fill(f"{own_name}.weight", weight)
                    _keep(part_of(parameter), weight)
                    if module in below_dora:
                        _measure(below_dora[module], weight)
                    else:
                        _begin(below_rows[module], model.source.new_ids, weight)
                else:
                    self.fill(f"{own_name}.{key}" if own_name else key, parameter)
        for layer in adapters.values():
            _draw(layer)

    def _quantize(self, module: NF4Linear, name: str, adapter: AdaptedLayer | None) -> None:
        device = local(module.levels).device
        check_available(on_gpu=device.type == "cuda")
        weight = torch.empty(module.out_features, module.in_features, dtype=module.dtype, device=device)
        self.fill(name, weight)
        frozen = quantize(weight)
        module.take(frozen)
        if adapter is not None:
            _measure(adapter, whole(frozen, module.out_features, weight))


def _keep(part: Part, whole: Tensor) -> None:
    part.values.copy_(part.within(whole.contiguous()))


def _measure(layer: AdaptedLayer, weight: Tensor) -> None:
    """What DoRA keeps of the frozen weight as it is used."""
    assert layer.lora_magnitude_vector is not None
    norms = row_norms(weight.T if isinstance(layer.base_layer, nn.Embedding) else weight)
    layer.square_norms.copy_(norms.square())
    _keep(part_of(layer.lora_magnitude_vector), norms.to(layer.lora_magnitude_vector.dtype))


def _begin(layer: TrainedRows, ids: Sequence[int], weight: Tensor) -> None:
    layer.ids.copy_(torch.tensor(ids))
    layer.start.copy_(weight[layer.ids])
    _keep(part_of(layer.rows), layer.start.to(layer.rows.dtype))


def _draw(layer: AdaptedLayer) -> None:
    """Draws the pair whole, as a layer on one process does, and keeps what is here."""
    parts = layer.lora_A, layer.lora_B
    layer.lora_A, layer.lora_B = (
        nn.Parameter(torch.empty(whole_shape(part), dtype=part.dtype, device=local(part).device)) for part in parts
    )
    layer.start_at_zero()
    for part, drawn in zip(parts, (layer.lora_A, layer.lora_B), strict=True):
        _keep(part_of(part), drawn.detach())
    layer.lora_A, layer.lora_B = parts
