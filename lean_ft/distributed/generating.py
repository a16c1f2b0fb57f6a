"""Sampling from a model that is cut over ranks, by each of them for itself: its own prompts, as many tokens as these take."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from lean_ft.distributed.ranks import ManyRanks
from lean_ft.models import Decoder
from lean_ft.shards import Ranks


@contextmanager
def generating(model: Decoder, ranks: Ranks, gather: Literal["layer", "whole"]) -> Iterator[None]:
    """Inside, a rank may call the model without gradients as often as it likes; all ranks enter and leave together.

    `whole` gathers all weights at once and frees them at the end. `layer` gathers a layer while it computes, which takes all
    ranks: before each pass they tell one another that one is to come, and who has none left makes one of a single token.
    """
    if not isinstance(ranks, ManyRanks) or model not in ranks.cut_models:
        yield
        return
    device = model.output_weight.device

    @torch.no_grad()
    def pass_of_one_token() -> None:
        model(torch.zeros(1, 1, dtype=torch.int64, device=device), return_hidden=True)

    if gather == "whole":
        # What FSDP2's set_reshard_after_forward sets; here it comes back as it was, unit by unit.
        units: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
        groups = [group for one in units if (group := one._get_fsdp_state()._fsdp_param_group) is not None]
        before = [group.post_forward_mesh_info for group in groups]
        for group in groups:
            group.post_forward_mesh_info = None
        try:
            pass_of_one_token()
            yield
        finally:
            for group, info in zip(groups, before, strict=True):
                group.post_forward_mesh_info = info
            ranks.gather_no_more(model)
        return
    step = model.register_forward_pre_hook(lambda *_: ranks.highest(1) and None)
    try:
        yield
    finally:
        step.remove()
        while ranks.highest(0)[0]:
            pass_of_one_token()
        ranks.gather_no_more(model)
