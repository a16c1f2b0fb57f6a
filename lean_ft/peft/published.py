"""The weights that a run gives to a sampling engine while it trains: those of the plain model, layer by layer.

An engine computes with plain weights under the names of the model's folder. So adapters are merged in float32 and
rounded once, and quantized frozen weights become dense in the dtype in which the run multiplies by them. For a
quantized model, the result is what the policy computes, with the errors of its 4 or 8 bits: W' + scaling * B A, where
W' is the dequantized weight. `load_merged`, which writes finished models, merges into the unquantized model instead,
because there these errors would only be a loss.

With several ranks, each rank has its part of a tensor that is a parameter of the run. For other tensors, all ranks
gather the weight and its adapter, and the ranks take turns in merging. So the bits are those of a single process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, groupby

import torch
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import Frozen, FrozenParameter
from lean_ft.models.source import own_tensors
from lean_ft.peft.experts import ExpertsAdapter
from lean_ft.peft.layers import AdaptedLayer, adapted_layers, base_modules
from lean_ft.peft.new_rows import TrainedRows, trained_rows
from lean_ft.system.shards import Part, Ranks, whole_shape


@torch.no_grad()
def published_parts(
    model: Decoder, ranks: Ranks, *, on_rank_zero: bool = False
) -> Iterator[tuple[str, Mapping[str, Part]]]:
    """Yield each layer's name and this rank's parts of its tensors, by their names in the model's folder.

    A layer is a decoder layer, or a module outside of them; its name can be a file's. All ranks call this and take all
    layers, since each layer may gather weights. Parts are as for `write_file`: those of a tensor that another rank
    merges have no values. The sum of `Part.whole_bytes` is the number of bytes that are published. A tied weight is
    yielded once, as the embedding.

    In memory are one layer's tensors, one gathered weight, and two float32 copies of it, or of some experts of a stack.
    A mapping is emptied when the caller asks for the next one.

    Args:
        on_rank_zero: gather all tensors whole on rank 0, for a transfer that no other rank takes part in.
    """
    ranks.gather_no_more(model)
    source, own_names, number = model.source, model.source.own_names, count()
    for layer, tensors in groupby(_plain_tensors(model), key=lambda plain: _layer_of(plain.name)):
        parts = dict[str, Part]()
        for plain in tensors:
            if plain.holder is None and not on_rank_zero:
                stored = source.stored(plain.name, plain.tensor, as_read=True)
            else:
                is_mine = ranks.rank == (0 if on_rank_zero else next(number) % ranks.size)
                whole = plain.gathered(ranks, is_mine)
                stored = source.stored(plain.name, whole, as_read=True)
                stored = stored if is_mine else ((place, _kept_by_others(part)) for place, part in stored)
            parts |= {own_names.get(place, place): source.turned(place, part) for place, part in stored}
        yield layer, parts
        parts.clear()


Holder = AdaptedLayer | TrainedRows | FrozenParameter


@dataclass(frozen=True)
class _PlainTensor:
    """A tensor of the plain model, and if it is not stored as it is, the module that computes it."""

    name: str
    tensor: Tensor  # the stored one
    holder: Holder | None

    def gathered(self, ranks: Ranks, is_mine: bool) -> Tensor:
        """The whole tensor; if it is not this rank's, its shape and dtype on the meta device. All ranks call this."""
        if self.holder is None:
            whole = ranks.whole(self.tensor)
            return whole if is_mine else torch.empty_like(whole, device="meta")
        form = self.holder.frozen.form
        with _whole(self.holder, ranks):
            if is_mine:
                return _weight_of(self.holder)
        shape = whole_shape(self.tensor) if form.kind == "plain" else form.shape
        return torch.empty(shape, dtype=form.dtype, device="meta")


def _plain_tensors(model: Decoder) -> Iterator[_PlainTensor]:
    """The tensors of the plain model in the order of its modules."""
    layers: list[Holder] = [*adapted_layers(model).values(), *trained_rows(model).values()]
    holders = {id(_first(layer.frozen)): layer for layer in layers}
    for place, module in base_modules(model):
        place = place.replace(".base_layer", "")
        if isinstance(module, FrozenParameter):
            first = _first(module.frozen)
            yield _PlainTensor(place, first, holders.get(id(first), module))
            continue
        for name, tensor in own_tensors(module):
            yield _PlainTensor(f"{place}.{name}", tensor, holders.get(id(tensor)))


def _first(frozen: Frozen) -> Tensor:
    return frozen.tensors[0]


def _weight_of(holder: Holder) -> Tensor:
    if isinstance(holder, FrozenParameter):
        return holder.frozen.whole()
    dtype = holder.frozen.form.dtype
    return holder.merged_weight(dtype) if isinstance(holder, ExpertsAdapter) else holder.merged_weight().to(dtype)


@contextmanager
def _whole(holder: Holder, ranks: Ranks) -> Iterator[None]:
    """Context manager in which the parameters that a module's weight depends on are whole."""
    if ranks.size == 1:
        yield
        return
    frozen = {id(tensor) for tensor in holder.frozen.tensors}
    parameters = [
        (module, name, parameter)
        for module in holder.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if module is holder or id(parameter) in frozen
    ]
    try:
        for module, name, parameter in parameters:
            setattr(module, name, nn.Parameter(ranks.whole(parameter), requires_grad=False))
        yield
    finally:
        for module, name, parameter in parameters:
            setattr(module, name, parameter)


def _kept_by_others(part: Part) -> Part:
    """A part without values, of a tensor that another rank has."""
    nothing = torch.empty(0, dtype=part.dtype)
    return replace(part, values=nothing, first=0, is_kept_by_others=True, run=None, stride=0)


def _layer_of(name: str) -> str:
    """The name of a tensor's layer, or outside of layers of its module."""
    parts = name.split(".")
    return ".".join(parts[:3] if parts[:2] == ["model", "layers"] else parts[:-1])
