"""Drafting layers of folders (multi-token prediction, DeepSeek-V3 technical report, section 2.2), by `model.mtp`.

`keep`: the layers are not computed. Their tensors are copied into saved folders as they are stored, because servers
refuse a config.json that promises layers without tensors. If they cannot be copied, the saved config.json promises no
such layers. `drop`: the same, without copies. `train`: the layers are part of the model (`drafting_layers`).
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lean_ft.gguf.cache import gguf_file
from lean_ft.models.config import DecoderConfig
from lean_ft.models.config_json import decoder_config
from lean_ft.models.dequantized import Readable, dequantized
from lean_ft.models.families.drafting_forms import FORMS, DraftingFamily
from lean_ft.models.new_model import Fill, random_weights
from lean_ft.models.source import all_tensors
from lean_ft.models.stored_weights import stored_tensors
from lean_ft.system.config_fields import MAX_LAYERS
from lean_ft.system.units import counted, enumerated

if TYPE_CHECKING:
    from lean_ft.models.decoder import Decoder
    from lean_ft.models.source import Source

# Fields of config.json with the number of these layers. transformers takes 1 for some that are absent.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_NAME = re.compile(r"(?:^|\.)mtp[._]")
_OF_VOCABULARY = ("embed_tokens.weight", "head.weight")  # ends the names of tensors with a row per token


class Built(int):
    """The number of drafting layers in a config.json, if these layers are part of the model."""


def num_drafting_layers(config: Mapping[str, Any]) -> int:
    """The number of drafting layers that a language model's config.json promises."""
    number = next((found for name in _COUNTS if (found := config.get(name))), 0)
    return number if isinstance(number, int) and 0 <= number < MAX_LAYERS else 0


def is_drafting(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor of a language model's folder belongs to a drafting layer, `mtp.` or a layer after the last, and
    not to the model. If drafting layers are part of the model, those that repeat its embedding and output layer."""
    number = num_drafting_layers(config)
    first, layer = config.get("num_hidden_layers"), re.match(r"model\.layers\.(\d{1,6})\.", name)
    is_after = isinstance(first, int) and layer is not None and 0 <= int(layer[1]) - first < number
    if not is_after and not _NAME.search(name):
        return False
    return not isinstance(number, Built) or name.endswith(FORMS[config["model_type"]].copies)


def with_drafting_layers(config: DecoderConfig, source: "Source") -> DecoderConfig:
    """The decoder with its drafting layers, whose names `source` gets; with one layer if the folder promises none.

    Raises ValueError for a family whose drafting layers are not computed, and for a folder with too many.
    """
    setting, where = "model.mtp=train", str(source.folder)
    family = source.config.get("model_type")
    form = FORMS.get(str(family))
    if form is None:
        raise ValueError(
            f"{where}: drafting layers of the family {family} are not computed; those of {enumerated([*FORMS])} are. "
            "In a training run, remove model.mtp=train; in `leanft evaluate`, remove drafts."
        )
    if source.folder is not None and gguf_file(source.folder) is not None:
        raise ValueError(f"{setting} reads drafting layers from safetensors, and {where} is a GGUF file.")
    number = num_drafting_layers(source.config) or 1
    if number > form.most:
        raise ValueError(
            f"{setting}: {where}/config.json promises {number} drafting layers; expected at most {form.most}. Set "
            "model.mtp=keep."
        )
    of_layer, place = form.config_of_layer(source.config)
    layer = decoder_config(of_layer, f"{where}/config.json, for a drafting layer").layers[place]
    source.config = {**source.config, form.count: Built(number)}
    source.family = DraftingFamily.of(source.family, form, config.num_layers, number)
    return replace(config, layers=(*config.layers, *[layer] * number), num_drafting=number)


def freeze_trunk(model: "Decoder") -> None:
    """Freeze all parameters but those of drafting layers."""
    model.requires_grad_(False)
    for layer in model.drafting:
        layer.requires_grad_(True)


def is_new_layer(name: str, source: "Source") -> bool:
    """Whether a parameter of the decoder belongs to a drafting layer that starts with random weights."""
    row = source.family
    return isinstance(row, DraftingFamily) and row.is_new and row.is_of_drafting(name)


def new_layers(model: "Decoder", stored: Collection[str]) -> Fill | None:
    """How to fill drafting layers of the model that a folder with the tensors `stored` does not have; None if it has
    them, or the model has none."""
    source, row = model.source, model.source.family
    if not isinstance(row, DraftingFamily):
        return None
    of_layers = ((name, tensor) for name, tensor in all_tensors(model) if row.is_of_drafting(name))
    if any(place in stored for name, tensor in of_layers for place, _ in source.stored(name, tensor, as_read=True)):
        return None
    source.family = replace(row, is_new=True)
    return random_weights(model)


def drafting_of(own: Mapping[str, str | None], stored: Mapping[str, Readable], model: "Decoder") -> dict[str, str]:
    """Return the names of a folder's drafting tensors to copy, by their names in a folder of the language model.

    Empty unless all can be copied: their dtypes are known, and those with a row per token have at least the rows of the
    model. Empty for a model that gives no text, and for copies of an embedding that trains.
    own: names in the folder -> names in a folder of the language model.
    """
    source, config = model.source, model.config
    trains_copied = config.num_drafting > 0 and any(p.requires_grad for p in model.model.embed_tokens.parameters())
    if not config.has_output or config.num_scores or trains_copied:
        return {}
    vocab_size = config.vocab_size
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
    if isinstance(num_drafting_layers(config), Built):
        return config
    none: dict[str, Any] = {name: 0 for name in _COUNTS if config.get(name)} | (
        {"use_mtp": False} if config.get("use_mtp") else {}
    )
    if isinstance(text := config.get("text_config"), dict):
        none["text_config"] = without_drafting(text)
    return {**config, **none}


def drafting_remark(source: "Source") -> str:
    """What a saved model has of its drafting layers, for a line about the model; empty if there are none."""
    if isinstance(source.family, DraftingFamily):
        layers = counted(num_drafting_layers(source.config), "drafting layers")
        return (
            f"with {layers}, new and random, because the folder has none" if source.family.is_new else f"with {layers}"
        )
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
