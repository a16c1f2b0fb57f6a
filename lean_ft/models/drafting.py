"""Layers that draft tokens for speculative decoding (multi-token prediction, DeepSeek-V3 technical report, section
2.2).

Like transformers, lean_ft does not compute these layers. It copies their tensors into saved folders as they are stored,
because servers refuse a config.json that promises layers without tensors. If the tensors cannot be copied, the saved
config.json promises no such layers.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lean_ft.models.dequantized import Readable, dequantized
from lean_ft.models.stored_weights import stored_tensors
from lean_ft.system.config_fields import MAX_LAYERS

if TYPE_CHECKING:
    from lean_ft.models.source import Source

# Fields of config.json with the number of these layers. transformers takes 1 for some that are absent.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_NAME = re.compile(r"(?:^|\.)mtp[._]")
_OF_VOCABULARY = ("embed_tokens.weight", "head.weight")  # ends the names of tensors with a row per token


def num_drafting_layers(config: Mapping[str, Any]) -> int:
    """The number of drafting layers that a language model's config.json promises."""
    number = next((found for name in _COUNTS if (found := config.get(name))), 0)
    return number if isinstance(number, int) and 0 <= number < MAX_LAYERS else 0


def is_drafting(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor of a language model's folder belongs to a drafting layer: `mtp.`, or a layer after the last."""
    if _NAME.search(name):
        return True
    first, layer = config.get("num_hidden_layers"), re.match(r"model\.layers\.(\d{1,6})\.", name)
    return isinstance(first, int) and layer is not None and 0 <= int(layer[1]) - first < num_drafting_layers(config)


def drafting_of(
    own: Mapping[str, str | None], stored: Mapping[str, Readable], source: "Source", vocab_size: int
) -> dict[str, str]:
    """Return the names of a folder's drafting tensors, by their names in a folder of the language model.

    Empty unless all can be copied: their dtypes are known, and those with a row per token have at least the rows of the
    model.
    own: names in the folder -> names in a folder of the language model.
    """
    found = {place: name for name, place in own.items() if place is not None and is_drafting(place, source.config)}
    are_copied = all(
        stored[name].dtype is not None
        and (stored[name].shape[:1] >= (vocab_size,) or not name.endswith(_OF_VOCABULARY))
        for name in found.values()
    )
    return found if are_copied else {}


def drafting_tensors(source: "Source") -> dict[str, Readable]:
    """The tensors of `source.drafting`, to be copied. Raises ValueError if the folder no longer has them."""
    if not source.drafting or source.folder is None:
        return {}
    try:
        stored = dequantized(stored_tensors(source.start / source.folder), source.quantization)
        return {own: stored[name] for own, name in source.drafting.items()}
    except (OSError, KeyError, ValueError):
        raise ValueError(f"{source.folder} no longer has them") from None


def drafting_bytes(source: "Source") -> int:
    """The size of the `drafting_tensors`, 0 if they are gone."""
    try:
        tensors = drafting_tensors(source).values()
    except ValueError:
        return 0
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors if tensor.dtype is not None)


def without_drafting(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json, also of a multimodal model, that promises no drafting layers."""
    none: dict[str, Any] = {name: 0 for name in _COUNTS if config.get(name)} | (
        {"use_mtp": False} if config.get("use_mtp") else {}
    )
    if isinstance(text := config.get("text_config"), dict):
        none["text_config"] = without_drafting(text)
    return {**config, **none}


def drafting_remark(source: "Source") -> str:
    """What a saved model has of its drafting layers, for a line about the model; empty if there are none."""
    if source.drafting:
        return f"its {len(source.drafting)} tensors of drafting layers are copied, not trained"
    if num_drafting_layers(source.config):
        field = next(name for name in _COUNTS if source.config.get(name))
        return f"without the drafting layers that config.json promises ({field} is saved as 0)"
    return ""


def lost_drafting(source: "Source") -> str:
    """A line for exports in a format without drafting layers; empty if the model has none."""
    has_any = source.drafting or num_drafting_layers(source.config)
    return "\nThe drafting layers of the model (multi-token prediction) are left out." if has_any else ""
