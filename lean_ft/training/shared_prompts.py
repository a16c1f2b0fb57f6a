"""Decides whether the completions of one prompt share its computation.

A row [prompt | completion | completion ...] is exact if a prompt's keys and values do not depend on what follows. That holds for
all causal models except those whose rotary frequencies change with the length of the text, and those that keep a state.
"""

from typing import Any

import torch

from lean_ft.models import Decoder, empty_model
from lean_ft.system.log import say


def shares_prompts(cfg: Any) -> bool:
    """Return whether to compute each prompt once for all of its completions, and log it.

    `data.shared_prompt=auto` does so if the model allows it, except with a mixture's router loss, which is a mean over positions.
    Raises ValueError for `data.shared_prompt=true` if the model does not allow it, or as `load_model` does.
    """
    if cfg.data.shared_prompt is False:
        return False
    value_path = cfg.value.path if hasattr(cfg, "value") else None  # PPO's value model reads the same batches
    paths = [cfg.model.path] + ([] if value_path is None else [value_path])
    models = [empty_model(path, torch.float32, cfg.model.router_aux_loss_coef) for path in paths]
    why_not = next((reason for model in models if (reason := _why_not(model, cfg.row_tokens))), "")
    if cfg.data.shared_prompt is True and why_not:
        raise ValueError(f"data.shared_prompt=true, but {why_not}. Set data.shared_prompt=false.")
    if cfg.data.shared_prompt == "auto" and not why_not and models[0].router_aux_loss_coef:
        why_not = "the router's loss is a mean over all positions"
    say("prompts", f"computed for each completion: {why_not}" if why_not else "computed once for all completions")
    return not why_not


def _why_not(model: Decoder, longest: int) -> str:
    """Why a prompt cannot be computed once for all its completions; empty if it can."""
    if model.config.has_states:
        return "the model has recurrent layers, whose state cannot branch"
    if model.config.has_chunks:
        return "the model has layers that attend within chunks of positions"
    for rope in model.rotary:
        if not rope.same_frequencies(1, longest):
            return (
                f"the model's rotary frequencies ({rope.scaling}) change with the length of a text beyond "
                f"{rope.original_max_positions} tokens, and texts have up to {longest} tokens"
            )
    return ""
