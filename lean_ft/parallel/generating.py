"""Sampling from a model that is cut over ranks, by each of them for itself: its own prompts, as many tokens as these take."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch

from lean_ft.models import Decoder
from lean_ft.parallel.ranks import EXPERTS, ManyRanks
from lean_ft.system.shards import Ranks


@contextmanager
def generating(model: Decoder, ranks: Ranks, gather: Literal["layer", "whole"]) -> Iterator[None]:
    """Inside, a rank may call the model without gradients as often as it likes, with a cache; all ranks enter and leave together.

    `whole` gathers all weights at once and frees them at the end. `layer` gathers a layer while it computes, which takes all
    ranks: before each pass they tell one another that one is to come, and who has none left makes one of a single token. So it
    is, however weights are gathered, where experts are cut, which tokens of all ranks go through.
    """
    if not isinstance(ranks, ManyRanks) or model not in ranks.cut_models:
        yield
        return
    try:
        with _whole(model, ranks) if gather == "whole" else nullcontext():
            if gather == "layer" or EXPERTS in ranks.groups:
                with _in_step(model, ranks):
                    yield
            else:
                yield
    finally:
        ranks.gather_no_more(model)


@contextmanager
def _in_step(model: Decoder, ranks: ManyRanks) -> Iterator[None]:
    """Inside, a pass of one rank is a pass of all."""
    step = model.register_forward_pre_hook(lambda *_: ranks.highest(1) and None)
    try:
        yield
    finally:
        step.remove()
        while ranks.highest(0)[0]:
            _pass_of_one_token(model)


@contextmanager
def _whole(model: Decoder, ranks: ManyRanks) -> Iterator[None]:
    """Context manager in which all weights are gathered."""
    units = [module for module in model.modules() if module in ranks.resharded]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
    try:
        _pass_of_one_token(model)
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


@torch.no_grad()
def _pass_of_one_token(model: Decoder) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(token, cache=model.new_cache(1, 1), return_hidden=True)
