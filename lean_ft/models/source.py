"""Where a decoder was read from, and how ranks share it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lean_ft.models.names_on_disk import module_on_disk
from lean_ft.system.shards import Cut

if TYPE_CHECKING:
    from lean_ft.models.hf_format import Unread
    from lean_ft.parallel.context import RowTokens
    from lean_ft.parallel.vocabulary import CutVocabulary


@dataclass
class Source:
    """The folder that a model was read from; saving writes the same form back."""

    folder: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The folder's config.json, without its quantization."""
    part_of: str = ""
    """The model_type of the multimodal model whose language model this is."""
    new_ids: list[int] = field(default_factory=list)
    """Ids of added tokens, whose rows the folder does not have."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """The quantization of the folder's weights, if they were dequantized while loading."""
    generation_config: bytes | None = None
    score_is_new: bool = False
    """Whether the score layer of a reward model was added to a language model's folder."""
    unread: "Unread | None" = None
    """How to fill the weights of a model that is still on the meta device."""

    def module_name(self, name: str) -> str:
        """transformers' name of a module in the folder's model, which PEFT uses too; `name_in_language_model` reverts it."""
        name = module_on_disk(self.config, name)
        if self.part_of == "llama4":
            return f"language_model.{name}"
        return re.sub(r"^model\.", "model.language_model.", name) if self.part_of else name


@dataclass
class Sharding:
    """How several ranks share one model; set by `lean_ft.parallel`."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """The split of each parameter that is split, by name."""
    vocabulary: "CutVocabulary | None" = None
    """Set if the embedding and the output layer stay split over ranks."""
    row_tokens: "RowTokens | None" = None
    """Set if ranks share the tokens of a row."""


def source_of(model: nn.Module) -> Source:
    """The source of a decoder; an empty one for other modules."""
    return getattr(model, "source", None) or Source()
