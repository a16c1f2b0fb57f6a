"""Names of the decoder's parameters in Hugging Face folders."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lean_ft.models.families import FAMILIES, Family

_NOT_TEXT = ("vision_tower.", "visual.", "multi_modal_projector.", "embed_vision.", "vision_embedder.")
_NOT_TEXT += ("vision_model.", "audio_tower.", "embed_audio.")


def name_in_language_model(name: str) -> str | None:
    """The name of a multimodal model's tensor or module in its language model; None for those of images or audio."""
    if name.removeprefix("model.").startswith(_NOT_TEXT):
        return None
    # transformers 4 wrote language_model.model.layers, version 5 writes model.language_model.layers.
    name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name)
    return re.sub(r"^model\.lm_head", "lm_head", name)


def module_on_disk(hf_config: Mapping[str, Any], name: str) -> str:
    """transformers' name of a module; see `Source.module_name` for the language model of a multimodal model."""
    family = FAMILIES.get(hf_config.get("model_type", ""), Family())
    renamed = {part: place for part, (place, *others) in family.on_disk.items() if not others and "*" not in place}
    renamed = {**family.in_memory, **renamed}
    part = next((part for part in renamed if part in name), None)
    return name if part is None else name.replace(part, renamed[part])


def parameters_on_disk(hf_config: Mapping[str, Any], name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a parameter: their names, and contiguous views of the parameter."""
    family = FAMILIES.get(hf_config.get("model_type", ""), Family())
    part = next((part for part in family.on_disk if part in name), None)
    places = [name] if part is None else [name.replace(part, place) for place in family.on_disk[part]]
    if name.startswith("model."):
        places = [family.prefix_on_disk + place.removeprefix("model.") for place in places]
    if len(places) == 1 and "*" not in places[0]:
        yield places[0], parameter
        return
    stack = enumerate(parameter) if "*" in places[0] else [("", parameter)]
    for index, tensor in stack:
        for place, piece in zip(places, tensor.chunk(len(places)), strict=True):
            yield place.replace("*", str(index)), piece
