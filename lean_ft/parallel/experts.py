"""Expert parallelism: each rank has some experts of every mixture, and tokens go to where theirs are.

A rank sends each token to the ranks that have its experts, these compute it by the layer that one device has (`Experts`, of
fewer experts), and send it back, where its experts' results are weighed and summed. Experts that are not here are never
gathered. The ranks between which tokens go are those that a model is cut over anyway, so they have different tokens: an
expert's gradient is that of all the tokens that came, and over what further ranks there are its rows are cut and its gradients
summed as elsewhere.

How many tokens each rank sends is known when the router has spoken, so the host waits for that once a layer, and no
compiled graph can hold it. Dropping tokens to have equal numbers, which would avoid both, is left out: it is another model.

Source: Lepikhin et al. 2020, GShard, https://arxiv.org/abs/2006.16668.

Shapes: N tokens here, K experts a token, E experts in all, n ranks, M = N * K rows that are sent, L those that come,
D features.
"""

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lean_ft.models import Decoder
from lean_ft.models.moe import Experts, MixtureOfExperts
from lean_ft.parallel.collectives import all_to_all
from lean_ft.parallel.parameters import cut_parameter
from lean_ft.parallel.ranks import EXPERTS, ManyRanks
from lean_ft.system.shapes_only import stage
from lean_ft.system.shards import Cut


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks between which tokens go."""

    group: Any
    num_experts: int  # of all ranks

    def forward(self, experts: Experts, tokens: Tensor, weights: Tensor, chosen: Tensor, *thin: Any) -> Tensor:
        """As `Experts.forward`: tokens (N, D), weights (N, K) of the experts chosen (N, K); returns (N, D)."""
        assert not thin, "an adapter beside experts was refused before"
        size, per_token = self.group.size(), chosen.shape[1]
        own = self.num_experts // size
        by_expert, order = chosen.flatten().sort(stable=True)  # (M,)
        every = torch.arange(self.num_experts, device=order.device)
        ends = torch.searchsorted(by_expert, every, right=True)
        sent = ends.diff(prepend=ends.new_zeros(1))  # (E,): rows for each expert
        come = torch.empty_like(sent)  # from each rank, for each expert that is here
        dist.all_to_all_single(come, sent, group=self.group)
        counts = torch.stack((sent, come)).view(2, size, own).sum(-1)
        even = [[len(order) // size] * size] * 2  # what a plan, which routes nothing, goes by
        send, receive = counts.tolist() if stage() is None else even
        rows = tokens.index_select(0, order // per_token)  # (M, D)
        if experts.config.weighs_input:
            rows, weights = (rows * weights.flatten()[order, None]).to(rows.dtype), torch.ones_like(weights)
        rows = all_to_all(rows, receive, send, self.group.group_name)  # (L, D)
        expert = torch.arange(own, device=rows.device).repeat(size)
        expert = expert.repeat_interleave(come, output_size=len(rows))[:, None]  # (L, 1)
        results = Experts.forward(experts, rows, torch.ones_like(expert, dtype=weights.dtype), expert)
        back = all_to_all(results, send, receive, self.group.group_name)  # (M, D)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        back = back.index_select(0, places).unflatten(0, (-1, per_token))  # (N, K, D)
        return (back * weights[..., None].to(back.dtype)).sum(1)


def check_experts(model: Decoder, num_ranks: int) -> None:
    """Raises ValueError where the model has no experts that so many ranks can share."""
    if model.mixture is None:
        raise ValueError(
            f"parallel.experts={num_ranks} cuts the experts of a mixture over processes, and this model has none. Leave it "
            "out: parallel.shard cuts all of it."
        )
    for layer in model.config.layers:
        if layer.mixture is not None and layer.mixture.num_experts % num_ranks:
            raise ValueError(
                f"parallel.experts={num_ranks} gives each process as many experts, and the model has "
                f"{layer.mixture.num_experts}. Set one that divides it."
            )
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts) and not isinstance(module.experts, Experts):
            raise ValueError(
                f"parallel.experts={num_ranks}: {name}.experts has an adapter, whose matrices lie expert by expert within "
                "rows and are not cut. Name other layers in lora.targets, as [q_proj,k_proj,v_proj,o_proj], or leave "
                "parallel.experts out."
            )


def cut_experts(model: Decoder, ranks: ManyRanks) -> None:
    """Leaves each rank its own experts of every layer, and has tokens go to where theirs are."""
    group = ranks.groups[EXPERTS]
    cut = Cut(EXPERTS, 0, group.size(), group.rank())
    for name, module in list(model.named_modules()):
        if not isinstance(module, MixtureOfExperts):
            continue
        experts = module.experts
        between = ExpertRanks(group, experts.config.num_experts)
        for own, _ in list(experts.named_parameters()):
            cut_parameter(model, experts, f"{name}.experts", own, cut)
        num_own = between.num_experts // group.size()
        experts.config = replace(experts.config, num_experts=num_own, experts_per_token=1)
        experts.forward = MethodType(between.forward, experts)
