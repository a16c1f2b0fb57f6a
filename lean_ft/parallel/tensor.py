"""Tensor parallelism: attention heads and inner features of feed-forward layers are split over ranks.

Input projections of a layer are split by rows, so each rank has some heads and inner features. The output projection is
split by columns, and its products are summed over the ranks. Outside of these layers, each rank has different tokens:
the tokens are gathered before a layer, and the sums are scattered after it. So nothing is computed or kept twice.
Parameters that are not split (norms, routers, A of an adapter on an input projection, B of one on an output projection)
get the gradient of a rank's own tokens or heads, which FSDP sums as for ranks with different data.

Mixtures of experts are not split: their tokens already are, and `parallel.experts` splits the experts. During
generation each row has one token, so every rank has all rows, and the sums go to all ranks.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, with tokens split as in Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198. Left out: fused input projections, and norms over all heads together or
with a weight for each head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.attention.attention import Attention
from lean_ft.models.config import FamilyParts
from lean_ft.models.layers import MLP
from lean_ft.parallel.collectives import gather_tokens, scatter_tokens, sum_over
from lean_ft.parallel.ranks import TENSOR, ManyRanks
from lean_ft.system.shards import Cut, remember_cuts

ROWS, COLUMNS = 0, 1  # dimensions of a weight (outputs, inputs)
_SIDES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ROWS)
_SIDES |= dict.fromkeys(("o_proj", "down_proj"), COLUMNS)


def cut_parameter(model: Decoder, owner: nn.Module, place: str, name: str, cut: Cut) -> None:
    """Replace the parameter `name` of `owner`, the model's module `place`, by this rank's part."""
    whole = owner.get_parameter(name)
    assert whole.shape[cut.dim] % cut.num_parts == 0, "sizes that do not divide evenly are refused earlier"
    part = whole.detach().chunk(cut.num_parts, cut.dim)[cut.part].clone()
    setattr(owner, name, nn.Parameter(part.contiguous(), requires_grad=whole.requires_grad))
    model.sharding.cuts[f"{place}.{name}"] = cut
    remember_cuts([(name, owner.get_parameter(name))], {name: cut})


@dataclass
class TokenExchange:
    """Hooks that gather tokens before a layer and scatter the sums after it; with whole rows, they only sum."""

    group: str
    size: int
    rows_are_whole: bool = False  # whether the current pass has all tokens of its rows here, as every pass with a cache

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows_are_whole = signature(model.forward).bind(*args, **kwargs).arguments.get("cache") is not None

    def gather(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self.rows_are_whole else (gather_tokens(args[0], self.group, self.size), *args[1:])

    def scatter(self, layer: nn.Module, args: tuple[Any, ...], partial: Tensor) -> Tensor:
        if self.rows_are_whole:
            total = sum_over(partial, self.group)
        else:
            total = scatter_tokens(partial, self.group, self.size)
        out_of_layer = layer.get_submodule("o_proj" if isinstance(layer, Attention) else "down_proj")
        bias = getattr(out_of_layer, "bias", None)  # added once, after the sum over ranks
        return total if bias is None else total + bias


def check_divides(model: Decoder, num_ranks: int) -> None:
    """Raise ValueError if a layer of the model cannot be split over `num_ranks`."""
    config, setting = model.config, f"parallel.tensor={num_ranks}"
    unsupported = {
        "recurrent layers": config.has_states,
        "fused projections (query, key and value, or gate and up)": config.fused_qkv or config.fused_gate_up,
        "keys and values made from one latent vector": config.latent is not None,
        "layers that use another layer's keys": bool(config.kv_source_layers),
        "drafting layers": config.num_drafting > 0,
        "learned positions": config.position_row is not None,
        "modules that only its family has": config.parts != FamilyParts() and not config.parts.splits,
        "norms over the queries and keys of all heads together": config.qk_norm == "projection",
        "norms of queries and keys with a weight for each head": config.qk_norm == "centered_by_head",
    }
    for what, is_present in unsupported.items():
        if is_present:
            raise ValueError(f"{setting} does not support this model's {what}. Set parallel.shard instead.")
    sizes = {"query heads": config.num_heads}
    sizes |= {"key-value heads" + " of some layers" * (i > 0): n for i, n in enumerate(config.kv_head_counts)}
    downs = (layer.mlp.down_proj for layer in model.layers if isinstance(layer.mlp, MLP))
    dense = (getattr(down, "base_layer", down).in_features for down in downs)
    for i, number in enumerate(dict.fromkeys(dense)):
        sizes["inner features of its feed-forward layers" + " of some layers" * (i > 0)] = number
    for what, number in sizes.items():
        if number % num_ranks:
            raise ValueError(f"{setting} does not divide this model's {number} {what}. Set a value that does.")
    for name, projection, side in _projections(model):
        base = getattr(projection, "base_layer", projection)
        if side == COLUMNS and base is not projection and base.bias is not None:
            raise ValueError(
                f"{setting} does not support an adapter on {name}, because that layer has a bias. Remove it from "
                "lora.targets, or set parallel.tensor=1."
            )


def cut_layers(model: Decoder, ranks: ManyRanks) -> None:
    """Split the projections of every layer, and add hooks that exchange tokens."""
    group = ranks.groups[TENSOR]
    exchange = TokenExchange(group.group_name, group.size())
    model.register_forward_pre_hook(exchange.begin, with_kwargs=True)
    for name, projection, side in list(_projections(model)):
        adapter, base = None, projection
        if hasattr(projection, "base_layer"):
            adapter, base, name = projection, projection.base_layer, f"{name}.base_layer"
        cut = Cut(TENSOR, side, group.size(), group.rank())
        cut_parameter(model, base, name, "weight", cut)
        if side == ROWS and base.bias is not None:
            cut_parameter(model, base, name, "bias", cut)
        if side == COLUMNS and adapter is None:
            base.forward = MethodType(_without_bias, base)
        if adapter is not None:
            factor = "lora_B" if side == ROWS else "lora_A"
            cut_parameter(model, adapter, name.removesuffix(".base_layer"), factor, cut)
    for name, part in _cut_parts(model):
        if isinstance(part, Attention) and part.sinks is not None:
            cut_parameter(model, part, name, "sinks", Cut(TENSOR, 0, group.size(), group.rank()))
        part.register_forward_pre_hook(exchange.gather)
        part.register_forward_hook(exchange.scatter)


def _cut_parts(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """The layers to split, by name: attention, and feed-forward layers outside of mixtures."""
    for i, layer in enumerate(model.layers):
        for name in ("self_attn", "mlp"):
            part = getattr(layer, name, None)
            if isinstance(part, Attention | MLP):
                yield f"model.layers.{i}.{name}", part


def _projections(model: Decoder) -> Iterator[tuple[str, Any, int]]:
    """Each projection to split: its name, the module (perhaps with an adapter), and the dimension."""
    for place, part in _cut_parts(model):
        for name, side in _SIDES.items():
            if hasattr(part, name):
                yield f"{place}.{name}", part.get_submodule(name), side


def _without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight)
