"""Load the frozen weights and initialize the adapter of a model that was sharded on the meta device.

Each rank reads its own rows of the frozen weights. Some weights are read whole, one matrix at a time, because what is
kept depends on all of their values: quantized weights, whose scales share a mean; weights below DoRA, which needs row
norms; and weights with trained rows of new tokens. The adapter is drawn whole, in the order of a single process, so its
values do not depend on the number of ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import FrozenParameter
from lean_ft.models.hf_format import Unread
from lean_ft.models.source import own_tensors
from lean_ft.peft.layers import AdaptedLayer, adapted_layers, base_modules, row_norms
from lean_ft.peft.new_rows import TrainedRows, trained_rows
from lean_ft.system.shards import Part, local, part_of, whole_shape

BASE = ".base_layer"


class UnreadBesideAdapter(Unread):
    """Weights of a model on the meta device whose adapters are in place."""

    def into(self, model: Decoder) -> None:
        adapters = adapted_layers(model)
        below_dora = {layer.base_layer: layer for layer in adapters.values() if layer.shape.dora}
        below_rows: dict[nn.Module, TrainedRows] = {layer.base_layer: layer for layer in trained_rows(model).values()}
        for name, module in base_modules(model):
            own_name = name.replace(BASE, "")
            if isinstance(module, FrozenParameter):
                layer = model.get_submodule(name.rpartition(".")[0])
                frozen = module.load(own_name, local(module.frozen.tensors[0]).device, self.fill)
                module.take(frozen)
                if layer in below_dora:
                    _measure(below_dora[layer], frozen.whole())
                continue
            for key, parameter in own_tensors(module):
                if key == "weight" and module in below_dora | below_rows:
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


def _keep(part: Part, whole: Tensor) -> None:
    part.values.copy_(part.within(whole.contiguous()))


def _measure(layer: AdaptedLayer, weight: Tensor) -> None:
    """Set DoRA's norms of the frozen weight."""
    assert layer.lora_magnitude_vector is not None
    norms = row_norms(weight.T if isinstance(layer.base_layer, nn.Embedding) else weight)
    layer.square_norms.copy_(norms.square())
    _keep(part_of(layer.lora_magnitude_vector), norms.to(layer.lora_magnitude_vector.dtype))


def _begin(layer: TrainedRows, ids: Sequence[int], weight: Tensor) -> None:
    layer.ids.copy_(torch.tensor(ids))
    layer.start.copy_(weight[layer.ids])
    _keep(part_of(layer.rows), layer.start.to(layer.rows.dtype))


def _draw(layer: AdaptedLayer) -> None:
    """Draw the pair whole, as a single process does, and keep this rank's part."""
    parts = layer.lora_A, layer.lora_B
    layer.lora_A, layer.lora_B = (
        nn.Parameter(torch.empty(whole_shape(part), dtype=part.dtype, device=local(part).device)) for part in parts
    )
    layer.start_at_zero()
    for part, drawn in zip(parts, (layer.lora_A, layer.lora_B), strict=True):
        _keep(part_of(part), drawn.detach())
    layer.lora_A, layer.lora_B = parts
