"""The longest text that a model was made for, as its config.json tells it."""

from collections.abc import Mapping
from typing import Any

_STRETCHED = ("linear", "dynamic", "yarn")  # scalings whose factor counts from the original context


def context_length(config: Mapping[str, Any]) -> int | None:
    """The tokens of the longest text, or None where config.json does not say, or not as a whole number.

    That is `max_position_embeddings`. Where a rotary scaling has a factor, it multiplies the original context, or what the
    config calls the longest where it names none: many configs leave the unscaled number there (Qwen2.5 with yarn), for
    transformers reads the two apart.
    """
    text = config.get("text_config")  # of a model that reads images, too
    config = text if isinstance(text, dict) else config
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHED:
        return longest
    original, factor = scaling.get("original_max_position_embeddings") or longest, scaling.get("factor")
    if not isinstance(original, int | float) or not isinstance(factor, int | float):
        return longest
    return max(longest, int(original * factor))
