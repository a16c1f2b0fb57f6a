"""Tensor parallelism: heads of attention and inner features of feed-forward layers are cut over ranks.

Projections into a layer's inside are cut by rows, so that a rank has some heads and some inner features whole; the
projection out of it is cut by columns, and its products add up over the ranks. Between the two, where all is per token, the
ranks have different tokens: into a layer the tokens are gathered, out of it the sums are scattered. So nothing is
computed or kept twice, and what is not cut (norms, routers, the A of an adapter on a projection in and the B of one on a
projection out) has on each rank the gradient of its own tokens or heads, which FSDP sums like those of other data.

A mixture of experts is left as it is: its tokens are cut already, and `parallel.experts` cuts its experts. Where tokens are
generated there is one a row, which cannot be cut: then each of the ranks has all rows, and the sums go to all.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, with the tokens cut as in Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198. Left out: layers whose projections in are one matrix, and norms over all heads together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft.models import Decoder
from lean_ft.models.attention.attention import Attention
from lean_ft.models.layers import MLP
from lean_ft.parallel.collectives import gather_tokens, scatter_tokens, sum_over
from lean_ft.parallel.context import RowTokens
from lean_ft.parallel.parameters import cut_parameter
from lean_ft.parallel.ranks import TENSOR, ManyRanks
from lean_ft.system.shards import Cut

ROWS, COLUMNS = 0, 1  # of a weight, (outputs, inputs)
_SIDES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ROWS),
    "o_proj": COLUMNS,
    "down_proj": COLUMNS,
}


@dataclass(frozen=True)
class TokenExchange:
    """Gathers the tokens in front of a layer, and scatters the sums behind it; of whole rows they are here, and stay."""

    group: str
    size: int
    tokens: RowTokens

    def gather(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self.tokens.rows_are_whole else (gather_tokens(args[0], self.group, self.size), *args[1:])

    def scatter(self, layer: nn.Module, args: tuple[Any, ...], partial: Tensor) -> Tensor:
        if self.tokens.rows_are_whole:
            total = sum_over(partial, self.group)
        else:
            total = scatter_tokens(partial, self.group, self.size)
        out_of_layer = layer.get_submodule("o_proj" if isinstance(layer, Attention) else "down_proj")
        bias = getattr(out_of_layer, "bias", None)  # once, and not on every rank
        return total if bias is None else total + bias


def check_divides(model: Decoder, num_ranks: int) -> None:
    """Raises ValueError where a layer of the model cannot be cut over so many ranks."""
    config, setting = model.config, f"parallel.tensor={num_ranks}"
    refuse_states(model, setting)
    if config.fused_qkv or config.fused_gate_up:
        raise ValueError(
            f"{setting} cuts projections by heads and features, and this model has one matrix for queries, keys and values, "
            "or for the gate and what it gates. Set parallel.tensor=1, with more of parallel.shard or parallel.context."
        )
    if config.latent is not None:
        raise ValueError(
            f"{setting} cuts attention by heads, and this model makes those of keys and values from one latent. Set "
            "parallel.tensor=1, with more of parallel.shard."
        )
    if config.givers:
        raise ValueError(
            f"{setting} cuts attention by heads, and layers of this model attend to the keys of another's. Set "
            "parallel.tensor=1, with more of parallel.shard or parallel.context."
        )
    if config.qk_norm == "projection":
        raise ValueError(
            f"{setting} gives each process some heads, and this model norms the queries and keys of all heads as one vector. "
            "Set parallel.tensor=1, with more of parallel.shard or parallel.context."
        )
    sizes = {"query heads": config.num_heads}
    sizes |= {"key-value heads" + " of some layers" * (i > 0): n for i, n in enumerate(config.numbers_of_kv_heads)}
    if any(isinstance(layer.mlp, MLP) for layer in model.layers):
        sizes["inner features of its feed-forward layers"] = config.intermediate_size
    for what, number in sizes.items():
        if number % num_ranks:
            raise ValueError(
                f"{setting} cuts the {number} {what} of this model into equal parts, which does not go round. Set a "
                "parallel.tensor that divides it."
            )
    for name, projection, side in _projections(model):
        base = getattr(projection, "base_layer", projection)
        if side == COLUMNS and base is not projection and base.bias is not None:
            raise ValueError(
                f"{setting}: {name} has a bias, which is added where its products are summed, and an adapter, which would "
                "add it before. Take it from lora.targets, or set parallel.tensor=1."
            )


def refuse_states(model: Decoder, setting: str) -> None:
    """Raises ValueError for a model whose layers are not all attention."""
    if model.config.has_states:
        raise ValueError(
            f"{setting} cuts attention by heads, and layers of this model keep a state over each row, which is not cut. Set it "
            "to 1, with more of parallel.shard."
        )


def cut_layers(model: Decoder, ranks: ManyRanks) -> None:
    """Cuts the projections of every layer, and puts the exchange of tokens around them."""
    group = ranks.groups[TENSOR]
    assert model.sharding.row_tokens is not None
    exchange = TokenExchange(group.group_name, group.size(), model.sharding.row_tokens)
    for name, projection, side in list(_projections(model)):
        adapter, base = None, projection
        if hasattr(projection, "base_layer"):
            adapter, base, name = projection, projection.base_layer, f"{name}.base_layer"
        cut = Cut(TENSOR, side, group.size(), group.rank())
        cut_parameter(model, base, name, "weight", cut)
        if side == ROWS and base.bias is not None:
            cut_parameter(model, base, name, "bias", cut)
        if side == COLUMNS:
            base.forward = MethodType(_without_bias, base) if adapter is None else base.forward
        if adapter is not None:
            factor = "lora_B" if side == ROWS else "lora_A"
            cut_parameter(model, adapter, name.removesuffix(".base_layer"), factor, cut)
    for name, part in _cut_parts(model):
        if isinstance(part, Attention) and part.sinks is not None:
            cut_parameter(model, part, name, "sinks", Cut(TENSOR, 0, group.size(), group.rank()))
        part.register_forward_pre_hook(exchange.gather)
        part.register_forward_hook(exchange.scatter)


def _cut_parts(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """What is cut, by name: attention, and feed-forward layers but for those inside a mixture, which has its tokens cut."""
    for i, layer in enumerate(model.layers):
        for name in ("self_attn", "mlp"):
            part = getattr(layer, name, None)
            if isinstance(part, Attention | MLP):
                yield f"model.layers.{i}.{name}", part


def _projections(model: Decoder) -> Iterator[tuple[str, Any, int]]:
    """Each projection that is cut: its name, itself or what has an adapter in its place, and along what."""
    for place, part in _cut_parts(model):
        for name, side in _SIDES.items():
            if hasattr(part, name):
                yield f"{place}.{name}", part.get_submodule(name), side


def _without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight)
