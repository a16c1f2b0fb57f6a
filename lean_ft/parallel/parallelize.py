"""Shard a model's parameters over the ranks: FSDP2; HSDP with replicas; DDP if every rank has a replica.

A layer is gathered before its forward and before its backward pass, and its gradients are summed and sharded as soon as
they are complete. Gradients are summed, not averaged, because the loss is divided by the step's number of targets. The
optimizer thus gets rows of summed gradients, also in backward, and the rest of the step is as on one device.

The loss uses the output layer outside of any forward pass. So the output layer forms an FSDP unit with the last norm
(and the embedding, if tied), which stays gathered from that norm's forward to its backward; its gradient, the largest
one, is reduced first. Alternatively, embedding and output layer stay sharded and are not units
(`lean_ft.parallel.vocabulary`).

Source: PyTorch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277). Left out: its mixed precision and offload; use
`model.dtype` and `memory` instead.
"""

from typing import Any

import torch
from torch import nn

from lean_ft.models import Decoder, read_weights
from lean_ft.models.moe import Router
from lean_ft.parallel.ranks import CONTEXT, EXPERTS, TENSOR, ManyRanks
from lean_ft.parallel.vocabulary import CutVocabulary, why_gathered
from lean_ft.settings import ParallelConfig
from lean_ft.system.log import say
from lean_ft.system.shards import Cut, Ranks, remember_cuts
from lean_ft.torch_private import without_modes


def parallelize(model: Decoder, cfg: ParallelConfig, ranks: Ranks, *, tokens: int | None = None) -> None:
    """Shard the model over the ranks and load its weights if it has none; a no-op for a single process.

    Call it after `apply_memory`, which needs whole layers, and before anything that holds or hooks parameters. `tokens`
    is the maximum of a forward pass; pass it only if the loss is `CrossEntropy`, the only one that supports a sharded
    vocabulary. Raises ValueError for settings that the model does not support.
    """
    if not isinstance(ranks, ManyRanks):
        return
    if model not in ranks.layers_are_cut:
        for name in (CONTEXT, TENSOR, EXPERTS):
            if getattr(cfg, name) > 1:
                raise ValueError(
                    f"parallel.{name}={getattr(cfg, name)} is not supported by this recipe. Set parallel.{name}=1, or, "
                    "in your own recipe, call lean_ft.parallel.cut before apply_memory."
                )
    with without_modes():  # FSDP2 needs real shapes while the planner computes with shapes only
        _shard(model, cfg, ranks, tokens)
    ranks.cut_models.append(model)
    remember_cuts(model.named_parameters(), model.sharding.cuts)
    if model.source.unread is not None:
        read_weights(model, ranks.device)


def _shard(model: Decoder, cfg: ParallelConfig, ranks: ManyRanks, tokens: int | None) -> None:
    from torch.distributed.fsdp import fully_shard

    from lean_ft.torch_private import fsdp_common

    if not hasattr(fsdp_common, "ShardPlacementResult") and any(not p.is_floating_point() for p in model.parameters()):
        raise ValueError(
            f"torch {torch.__version__} cannot shard quantized weights. Upgrade torch, set lora.quantize=none, or use "
            "one process."
        )
    trunk = model.model
    how: dict[str, Any] = {"mesh": ranks.mesh_of(None)}
    replicated = _shard_tower(model, cfg, ranks, how)
    placement = _placement(model, ranks)
    units: list[nn.Module] = []  # with cfg.reshard_after_forward
    for layer in model.layers:
        routers = (module for module in layer.modules() if isinstance(module, Router) and module.weight.requires_grad)
        for router in routers:  # an FSDP2 unit has one dtype
            if router.weight.dtype != model.dtype:
                fully_shard(router, reshard_after_forward=cfg.reshard_after_forward, **how)
                units.append(router)
        units.append(layer)
        fully_shard(layer, reshard_after_forward=cfg.reshard_after_forward, shard_placement_fn=placement, **how)
    if cfg.reshard_after_forward:
        ranks.resharded.update(units)
    gathered = why_gathered(model, cfg, ranks, None if tokens is None else tokens // ranks.num_sharing)
    if not gathered:
        replicated |= CutVocabulary(model, ranks, how["mesh"]).parameters
    say("vocabulary", f"gathered: {gathered}" if gathered else f"sharded over {ranks.num_shards} processes")
    how["ignored_params"] = replicated
    ends: list[nn.Module] = [trunk.norm, *(model.dense or ())]
    if gathered:
        ends.append(trunk.embed_tokens if model.head is None else model.head)
    if gathered and model.head is not None:
        fully_shard(trunk.embed_tokens, reshard_after_forward=True, **how)
        ranks.resharded.add(trunk.embed_tokens)
        if isinstance(trunk.embed_tokens, nn.Embedding):  # its backward needs only the ids
            trunk.embed_tokens.set_unshard_in_backward(False)  # type: ignore[operator]
    for name in [name for name in trunk.more_embeddings if hasattr(trunk, name)]:
        embedding: Any = trunk.get_submodule(name)
        fully_shard(embedding, reshard_after_forward=True, **how)
        ranks.resharded.add(embedding)
        embedding.set_unshard_in_backward(False)
    fully_shard(ends, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    _sum_gradients(model)


def _shard_tower(model: Decoder, cfg: ParallelConfig, ranks: ManyRanks, how: dict[str, Any]) -> set[nn.Parameter]:
    """Shard a vision tower that trains, with a unit per block. Return the parameters of a frozen tower. Each rank keeps
    these whole, so no rank waits for another to encode its rows."""
    from torch.distributed.fsdp import fully_shard

    tower = model.vision
    if tower is None or not any(parameter.requires_grad for parameter in tower.parameters()):
        return set() if tower is None else set(tower.parameters())
    for unit in (*tower.blocks, tower):
        fully_shard(unit, reshard_after_forward=cfg.reshard_after_forward, **how)
    if cfg.reshard_after_forward:
        ranks.resharded.update((*tower.blocks, tower))
    tower.is_sharded = True
    return set()


def sharded_linear(in_features: int, out_features: int, ranks: Ranks) -> nn.Linear:
    """A linear layer without bias on the meta device, sharded by rows over the ranks."""
    with without_modes():
        layer = nn.Linear(in_features, out_features, bias=False, device="meta")
        if isinstance(ranks, ManyRanks):
            from torch.distributed.fsdp import fully_shard

            fully_shard(layer, mesh=ranks.mesh_of(None))
            _sum_gradients(layer)
            ranks.cut_models.append(layer)
    return layer


def _sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 sum gradients instead of averaging them."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction here


def _placement(model: Decoder, ranks: ManyRanks) -> Any:
    """FSDP2's placement function: parameters that `cut` has split are sharded over the remaining ranks only."""
    if not model.sharding.cuts:
        return None
    from torch.distributed.tensor import Shard

    from lean_ft.torch_private import fsdp_common

    if not hasattr(fsdp_common, "ShardPlacementResult"):
        raise ValueError(
            f"parallel.tensor and parallel.experts need a newer torch than {torch.__version__}. Upgrade it."
        )

    meshes = {over: ranks.mesh_of(over) for over in {cut.over for cut in model.sharding.cuts.values()}}
    infos = {
        over: fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for over, mesh in meshes.items()
    }

    def place(parameter: nn.Parameter) -> Any:
        cut: Cut | None = getattr(parameter, "cut", None)
        return None if cut is None else fsdp_common.ShardPlacementResult(Shard(0), infos[cut.over])

    return place
