"""Decides whether the completions of one prompt, or texts that begin with it, share its computation.

A row [prompt | completion | completion ...] is exact if a prompt's keys and values do not depend on what follows. That
holds for all causal models except those whose rotary frequencies change with the length of the text, and those that
keep a state.
"""

from typing import Literal

from lean_ft.data.objective import PLAIN, objective_of
from lean_ft.models import Decoder, empty_model
from lean_ft.settings import DataConfig, ModelConfig, PromptDataConfig, RecipeConfig, ValueConfig
from lean_ft.system.log import say


def shares_prompts(cfg: RecipeConfig, data: DataConfig | None = None) -> bool:
    """Return whether to compute each prompt once for all that follows it, and log it.

    data: the settings of the rows, if they are not those of `cfg`.

    `data.shared_prompt=auto` does so if the model allows it, except with a mixture's router loss, which is a mean over
    positions. Raises ValueError for `data.shared_prompt=true` if the model does not allow it, or as `load_model` does.
    """
    data = data or cfg.group(DataConfig)
    objective = PLAIN if data is None else objective_of(data)
    wanted: Literal["auto"] | bool = getattr(cfg.group(PromptDataConfig) or data, "shared_prompt", False)
    of_rows = "" if data is None else objective.why_not_shared(data)
    if wanted is False or (wanted == "auto" and of_rows):
        return False
    model, longest, value = cfg.needed(ModelConfig), cfg.row_tokens, cfg.group(ValueConfig)
    assert longest is not None
    paths = [model.path] + ([] if value is None or value.path is None else [value.path])  # both read the same batches
    models = [empty_model(path, router_aux_loss_coef=model.router_aux_loss_coef) for path in paths]
    why_not = of_rows or next((reason for config in models if (reason := _why_not(config, longest))), "")
    if wanted is True and why_not:
        raise ValueError(f"data.shared_prompt=true, but {why_not}. Set data.shared_prompt=false.")
    if wanted == "auto" and not why_not and models[0].router_aux_loss_coef:
        why_not = "the router's loss is a mean over all positions"
    each = objective.sequences.removesuffix("s")
    say(
        "prompts", f"computed for each {each}: {why_not}" if why_not else f"computed once for all {objective.sequences}"
    )
    return not why_not


def _why_not(model: Decoder, longest: int) -> str:
    """Why a prompt cannot be computed once for all its completions; empty if it can."""
    if model.config.why_no_prefix:
        return model.config.why_no_prefix
    if model.has_chunks:
        return "the model has layers that attend within chunks of positions"
    for rope, _ in model.rotary:
        if not rope.same_frequencies(1, longest):
            return (
                f"the model's rotary frequencies ({rope.scaling}) change with the length of a text beyond "
                f"{rope.original_max_positions} tokens, and texts have up to {longest} tokens"
            )
    return ""
