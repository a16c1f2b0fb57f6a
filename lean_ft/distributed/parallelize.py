"""Cuts a model's parameters over the ranks: FSDP2, with copies HSDP, and DDP where every rank has a copy.

A layer is whole for as long as it computes: it is gathered before its forward and before its backward pass, and its
gradients are summed and cut as soon as they are there. The sum is no mean, as the loss was divided by the targets of the
whole step. So the optimizer, in backward too, sees rows of summed gradients, and the rest of the step is as on one device.

The output layer is used by the loss, outside of any forward pass. It forms a unit with the last norm, which stays whole from
that norm's forward to its backward pass, and so its gradient, the largest there is, goes first. Where it is the embedding,
that is in the unit too.

Source: PyTorch's `fully_shard` (Zhao et al. 2023, arXiv:2304.11277). Left out: its own mixed precision and offload, for
which the settings `model.dtype` and `memory` stand.
"""

from typing import Any

from torch import nn

from lean_ft.distributed.ranks import REPLICATE, SHARD, ManyRanks
from lean_ft.models import Decoder, read_weights
from lean_ft.settings import ParallelConfig
from lean_ft.shards import Ranks


def parallelize(model: Decoder, cfg: ParallelConfig, ranks: Ranks) -> None:
    """Cuts the model over the ranks, and reads its weights where it has none yet; on one device does nothing.

    Call it after `apply_memory`, which goes by whole layers, and before whatever holds the parameters or hooks into them.
    """
    if not isinstance(ranks, ManyRanks):
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard

    trunk, mesh = model.model, ranks.mesh
    how: dict[str, Any] = {"mesh": mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=cfg.reshard_after_forward, **how)
    ends: list[nn.Module] = [trunk.norm, trunk.embed_tokens if model.head is None else model.head]
    if model.head is not None:
        fully_shard(trunk.embed_tokens, reshard_after_forward=True, **how)
        if isinstance(trunk.embed_tokens, nn.Embedding):  # its backward takes the ids alone
            trunk.embed_tokens.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(ends, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other that multiplies
    ranks.cut_models.append(model)
    if model.unread is not None:
        read_weights(model, ranks.device)
