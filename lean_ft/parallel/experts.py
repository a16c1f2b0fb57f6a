"""Expert parallelism: each rank has some experts of every mixture, and tokens are sent to their experts.

A rank sends each token to the ranks that have its experts. These compute it with the single-device layer (`Experts`,
with fewer experts) and send the results back, where they are weighted and summed. Experts are never gathered. The ranks
that exchange tokens also share the model and have different tokens, so an expert's gradient covers all tokens that it
received. Over further ranks, its rows are sharded and its gradients are summed as usual.

The number of tokens to send is known only after routing, so the host waits once per layer and the layer cannot be
compiled. Left out: dropping tokens to equalize the numbers, which would change the model.

Source: Lepikhin et al. 2020, GShard, https://arxiv.org/abs/2006.16668.

Shapes: N tokens of this rank, K experts per token, E experts in total, n ranks, M = N * K rows sent, L rows received, D
features.
"""

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lean_ft.models import Decoder
from lean_ft.models.moe import Experts, MixtureOfExperts, experts_of
from lean_ft.parallel.collectives import all_to_all
from lean_ft.parallel.ranks import EXPERTS, ManyRanks
from lean_ft.parallel.tensor import cut_parameter
from lean_ft.system.shards import Cut


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that exchange tokens."""

    ranks: ManyRanks
    num_experts: int  # on all ranks

    def forward(self, experts: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor, *thin: Any) -> Tensor:
        """As `Experts.forward`: tokens (N, D), weights (N, K) of the chosen experts (N, K); returns (N, D)."""
        assert not thin, "check_experts refuses adapters on experts"
        group, per_token = self.ranks.groups[EXPERTS], chosen.shape[1]
        size = group.size()
        num_local = self.num_experts // size
        by_expert, order = chosen.flatten().sort(stable=True)  # (M,)
        every = torch.arange(self.num_experts, device=order.device)
        ends = torch.searchsorted(by_expert, every, right=True)
        sent = ends.diff(prepend=ends.new_zeros(1))  # (E,): rows for each expert
        come = torch.empty_like(sent)  # from each rank, for each expert of this rank
        dist.all_to_all_single(come, sent, group=group)
        counts = torch.stack((sent, come)).view(2, size, num_local).sum(-1)
        send, receive = self.ranks.row_counts(counts, len(order))
        rows = tokens.index_select(0, order // per_token)  # (M, D)
        if experts.formula.scales_input:
            rows, weights = (rows * weights.flatten()[order, None]).to(rows.dtype), torch.ones_like(weights)
        rows = all_to_all(rows, receive, send, group.group_name)  # (L, D)
        expert = torch.arange(num_local, device=rows.device).repeat(size)
        expert = expert.repeat_interleave(come, output_size=len(rows))[:, None]  # (L, 1)
        results = Experts.forward(experts, rows, torch.ones_like(expert, dtype=weights.dtype), expert)
        back = all_to_all(results, send, receive, group.group_name)  # (M, D)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        back = back.index_select(0, places).unflatten(0, (-1, per_token))  # (N, K, D)
        return (back * weights[..., None].to(back.dtype)).sum(1)


def check_experts(model: Decoder, num_ranks: int) -> None:
    """Raise ValueError if the model has no experts that `num_ranks` can share evenly."""
    setting = f"parallel.experts={num_ranks}"
    if model.mixture is None:
        raise ValueError(
            f"{setting} is for mixtures of experts, and this model has no experts. Remove parallel.experts."
        )
    for layer in model.config.layers:
        if layer.mixture is not None and (number := layer.mixture.num_experts) % num_ranks:
            raise ValueError(f"{setting} does not divide this model's {number} experts. Set a value that does.")
    if adapted := [name for name in experts_of(model) if name.endswith(".base_layer")]:
        fix = "Set other lora.targets, such as [q_proj,k_proj,v_proj,o_proj], or remove parallel.experts."
        raise ValueError(f"{setting} does not support the adapter of {adapted[0].removesuffix('.base_layer')}. {fix}")


def cut_experts(model: Decoder, ranks: ManyRanks) -> None:
    """Keep this rank's experts of every layer, and send tokens to their experts."""
    group = ranks.groups[EXPERTS]
    cut = Cut(EXPERTS, 0, group.size(), group.rank())
    for name, module in list(model.named_modules()):
        if not isinstance(module, MixtureOfExperts):
            continue
        experts = module.experts
        between = ExpertRanks(ranks, experts.config.num_experts)
        for parameter_name, _ in list(experts.named_parameters()):
            cut_parameter(model, experts, f"{name}.experts", parameter_name, cut)
        num_local = between.num_experts // group.size()
        experts.config = replace(experts.config, num_experts=num_local, experts_per_token=1)
        experts.forward = MethodType(between.forward, experts)
