"""Cuts a model's parameters over the ranks: FSDP2, with copies HSDP, and DDP where every rank has a copy.

A layer is whole for as long as it computes: it is gathered before its forward and before its backward pass, and its
gradients are summed and cut as soon as they are there. The sum is no mean, as the loss was divided by the targets of the
whole step. So the optimizer, in backward too, sees rows of summed gradients, and the rest of the step is as on one device.

The output layer is used by the loss, outside of any forward pass. It forms a unit with the last norm, which stays whole from
that norm's forward to its backward pass, and so its gradient, the largest there is, goes first. Where it is the embedding,
that is in the unit too. Or both stay cut, and are no unit (`lean_ft.parallel.vocabulary`).

Source: PyTorch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277). Left out: its own mixed precision and offload, for
which the settings `model.dtype` and `memory` stand.
"""

from typing import Any

import torch
from torch import nn

from lean_ft.models import Decoder, read_weights
from lean_ft.models.moe import Router
from lean_ft.parallel.ranks import CONTEXT, EXPERTS, TENSOR, ManyRanks
from lean_ft.parallel.vocabulary import CutVocabulary, why_whole
from lean_ft.settings import ParallelConfig
from lean_ft.system.log import say
from lean_ft.system.shapes_only import outside
from lean_ft.system.shards import Cut, Ranks, remember_cuts


def parallelize(model: Decoder, cfg: ParallelConfig, ranks: Ranks, *, tokens: int | None = None) -> None:
    """Cuts the model over the ranks, and reads its weights where it has none yet; on one device does nothing.

    Call it after `apply_memory`, which goes by whole layers, and before whatever holds the parameters or hooks into them.
    `tokens` are the most that a forward pass has, from a recipe whose loss is `CrossEntropy`, which alone can do with a
    vocabulary that stays cut. Raises ValueError where `cfg` asks for one that cannot be.
    """
    if not isinstance(ranks, ManyRanks):
        return
    if model not in ranks.layers_are_cut:
        for name in (CONTEXT, TENSOR, EXPERTS):
            if getattr(cfg, name) > 1:
                raise ValueError(
                    f"parallel.{name}={getattr(cfg, name)} cuts layers, which this recipe does not. Set parallel.{name}=1, or, "
                    "in a recipe of your own, call lean_ft.parallel.cut before apply_memory."
                )
    with outside():  # where shapes alone are computed the model has no memory yet, and FSDP2 asks for real shapes
        _cut(model, cfg, ranks, tokens)
    ranks.cut_models.append(model)
    remember_cuts(model.named_parameters(), model.sharding.cuts)
    if model.source.unread is not None:
        read_weights(model, ranks.device)


def _cut(model: Decoder, cfg: ParallelConfig, ranks: ManyRanks, tokens: int | None) -> None:
    from torch.distributed.fsdp import fully_shard

    trunk = model.model
    how: dict[str, Any] = {"mesh": ranks.mesh_of(None)}
    placement = _placement(model, ranks)
    units: list[nn.Module] = []  # that follow cfg.reshard_after_forward
    for layer in model.layers:
        routers = (module for module in layer.modules() if isinstance(module, Router) and module.weight.requires_grad)
        for router in routers:  # FSDP2 gathers tensors of one dtype together
            if router.weight.dtype != model.dtype:
                fully_shard(router, reshard_after_forward=cfg.reshard_after_forward, **how)
                units.append(router)
        units.append(layer)
        fully_shard(layer, reshard_after_forward=cfg.reshard_after_forward, shard_placement_fn=placement, **how)
    if cfg.reshard_after_forward:
        ranks.resharded.update(units)
    gathered = why_whole(model, cfg, ranks, None if tokens is None else tokens // ranks.num_sharing)
    if not gathered:
        how["ignored_params"] = CutVocabulary(model, ranks, how["mesh"]).parameters
    say("vocabulary", f"gathered: {gathered}" if gathered else f"stays cut over {ranks.num_shards} processes")
    ends: list[nn.Module] = [trunk.norm]
    if gathered:
        ends.append(trunk.embed_tokens if model.head is None else model.head)
    if gathered and model.head is not None:
        fully_shard(trunk.embed_tokens, reshard_after_forward=True, **how)
        ranks.resharded.add(trunk.embed_tokens)
        if isinstance(trunk.embed_tokens, nn.Embedding):  # its backward takes the ids alone
            trunk.embed_tokens.set_unshard_in_backward(False)  # type: ignore[operator]
    if model.config.layer_input_dim:
        fully_shard(trunk.embed_tokens_per_layer, reshard_after_forward=True, **how)
        ranks.resharded.add(trunk.embed_tokens_per_layer)
        trunk.embed_tokens_per_layer.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(ends, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    _sum_gradients(model)


def sharded_linear(in_features: int, out_features: int, ranks: Ranks) -> nn.Linear:
    """Return a linear layer without bias on the meta device, its rows sharded over the ranks. FSDP gathers it when it is called."""
    with outside():
        layer = nn.Linear(in_features, out_features, bias=False, device="meta")
        if isinstance(ranks, ManyRanks):
            from torch.distributed.fsdp import fully_shard

            fully_shard(layer, mesh=ranks.mesh_of(None))
            _sum_gradients(layer)
            ranks.cut_models.append(layer)
    return layer


def _sum_gradients(model: nn.Module) -> None:
    """What FSDP2 makes of ranks' gradients is their sum, and no mean."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other that multiplies


def _placement(model: Decoder, ranks: ManyRanks) -> Any:
    """Tells where the rows of a parameter are cut: what a layer's cut left here, over fewer ranks than all the others."""
    if not model.sharding.cuts:
        return None
    from torch.distributed.tensor import Shard

    from lean_ft.torch_private import fsdp_common

    if not hasattr(fsdp_common, "ShardPlacementResult"):
        raise ValueError(
            f"parallel.tensor and parallel.experts need an FSDP2 that cuts parameters over different ranks, which torch "
            f"{torch.__version__} has not. Set them to 1, or take a newer torch."
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
