"""Sampling from a sharded model on each rank independently: different prompts and numbers of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch

from lean_ft.models import Decoder
from lean_ft.parallel.ranks import EXPERTS, ManyRanks
from lean_ft.system.passes import evaluating
from lean_ft.system.shards import Ranks


@contextmanager
def generating(model: Decoder, ranks: Ranks, gather: Literal["layer", "whole"]) -> Iterator[None]:
    """Context manager in which each rank may call the model with a cache as often as it needs; all ranks enter and
    leave.

    `whole` gathers all weights at the start and frees them at the end. `layer` gathers each layer while it computes,
    which
    needs all ranks: a rank that has finished joins the others' passes with a single token. Expert parallelism does the
    same with either choice, because tokens of all ranks pass through the experts.
    """
    if not isinstance(ranks, ManyRanks) or model not in ranks.cut_models:
        yield
        return
    in_step = gather == "layer" or EXPERTS in ranks.groups
    try:
        with (
            _whole(model, ranks, gather == "whole"),
            _in_step(model, ranks) if in_step else nullcontext(),
        ):
            yield
    finally:
        ranks.gather_no_more(model)


@contextmanager
def _in_step(model: Decoder, ranks: ManyRanks) -> Iterator[None]:
    """Context manager in which all ranks take part in each rank's passes."""
    step = model.register_forward_pre_hook(lambda *_: ranks.highest(1) and None)
    try:
        yield
    finally:
        step.remove()
        while ranks.highest(0)[0]:
            _pass_of_one_token(model)


@contextmanager
def _whole(model: Decoder, ranks: ManyRanks, gathers_all: bool) -> Iterator[None]:
    """Context manager in which all weights are gathered, or those of a sharded vision tower alone, which few passes
    compute."""
    tower = model.vision if model.vision is not None and model.vision.is_sharded else None
    part = model if gathers_all else tower
    if part is None:
        yield
        return
    units = [module for module in part.modules() if module in ranks.resharded]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
    try:
        _pass_of_one_token(model)
        if tower is not None:
            tower.is_sharded = False
        yield
    finally:
        if tower is not None:
            tower.is_sharded = True
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]


def _pass_of_one_token(model: Decoder) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with evaluating(model):
        model(token, cache=model.new_cache(1, 1), return_hidden=True)
