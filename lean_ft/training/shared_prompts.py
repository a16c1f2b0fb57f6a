"""Whether the answers to one prompt share its computation.

Rows [prompt | chosen | rejected] are exact where a prompt's keys and values are the same whichever answer follows. That is
so of every causal model but one whose rotary frequencies change with the length of the whole text.
"""

from typing import Any

import torch

from lean_ft.models import Decoder, empty_model
from lean_ft.system.log import say


def shares_prompts(cfg: Any) -> bool:
    """Whether `data.shared_prompt` and the model of `cfg` have prompts computed once for all their answers; says so.

    `auto` also computes them for each where a mixture's router loss is on, which is a mean over positions. Raises ValueError
    where `data.shared_prompt=true` and the model has no such prompts, or as `load_model` does.
    """
    if cfg.data.shared_prompt is False:
        return False
    model = empty_model(cfg.model.path, torch.float32, cfg.model.router_aux_loss_coef)
    asked, why_not = cfg.data.shared_prompt is True, _why_not(model, cfg.data.max_length)
    if asked and why_not:
        raise ValueError(
            f"data.shared_prompt=true, and {why_not}. Set data.shared_prompt=false, or a data.max_length within which they "
            "are the same."
        )
    if not asked and not why_not and model.router_aux_loss_coef:
        why_not = "the router's loss is a mean over all positions"
    say("prompts", f"computed for each answer, as {why_not}" if why_not else "each computed once for both its answers")
    return not why_not


def _why_not(model: Decoder, max_length: int) -> str:
    """What in the model keeps a prompt from being computed once for all its answers; nothing where nothing does."""
    if model.config.has_states:
        return "layers of the model keep a state over each document, which does not branch"
    if model.config.has_chunks:
        return "layers of the model attend within chunks of positions"
    for rope in model.rotary:
        if not rope.same_frequencies(1, max_length):
            return (
                f"the model's rotary frequencies ({rope.scaling}) change with the length of a text beyond "
                f"{rope.original_max_positions} tokens, of data.max_length={max_length}"
            )
    return ""
