"""Where a decoder was read from, under which names its tensors are there, and how ranks share it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lean_ft.models.families import MULTIMODAL, Family, family_of
from lean_ft.models.families.multimodal import OF_SOUND, OF_TOWER
from lean_ft.models.vision.config import VISION_FAMILIES
from lean_ft.system.foreign_values import JSON
from lean_ft.system.shards import Cut, Part, part_of

if TYPE_CHECKING:
    from lean_ft.models.frozen_weight import Frozen
    from lean_ft.models.hf_format import Unread
    from lean_ft.parallel.context import RowTokens
    from lean_ft.parallel.vocabulary import CutVocabulary


@dataclass
class Source:
    """The folder that a model was read from; saving writes the same form back.

    A parameter has one name here, the decoder's, for all families. `stored` and `module_name` return the names that the
    folder and transformers use for it.
    """

    folder: Path | None = None
    start: Path = field(default_factory=Path.cwd)
    """The current folder when the model was read, to which `folder` may be relative. User code may change the current
    folder."""
    config: dict[str, Any] = field(default_factory=dict)
    """The folder's config.json, without its quantization; for a multimodal model, that of its language model."""
    part_of: str = ""
    """The model_type of the multimodal model whose language model this is, with or without its vision tower."""
    names: dict[str, str | None] = field(default_factory=dict)
    """A multimodal model's folder: its names of all tensors, and the names in a folder of the language model. None for
    tensors that the language model does not have. Empty for other folders."""
    stacks: dict[str, bool] = field(default_factory=dict)
    """Parameters of experts that the folder stores as one tensor instead of one per expert, and whether their matrices
    are transposed there, as in the published Qwen3-VL."""
    drafting: dict[str, str] = field(default_factory=dict)
    """The folder's names of tensors of drafting layers, which saving copies, by their names in a folder of the language
    model."""
    new_ids: list[int] = field(default_factory=list)
    """Ids of added tokens, whose rows the folder does not have."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """The quantization of the folder's weights, which are dequantized while loading unless an adapter keeps them."""
    form_in_folder: "Callable[[str], Frozen | None] | None" = None
    """The form in which the folder has a parameter, on the meta device, or None if it is not quantized. None for random
    weights and in plans."""
    generation_config: bytes | None = None
    end_ids: list[int] = field(default_factory=list)
    """The ids that end a completion, by the folder's files."""
    beside: dict[str, JSON] = field(default_factory=dict)
    """Further files of the folder by name, which saving writes again (`lean_ft.models.beside`)."""
    is_bare: bool = False
    """Whether the model is saved without an output layer, under the names of transformers' class without one, which has
    no prefix."""
    dense: tuple[str, ...] = ()
    """The folders of the layers after pooling, inside the model's folder."""
    score_is_new: bool = False
    """Whether the score layer of a reward model was added to a language model's folder."""
    unread: "Unread | None" = None
    """How to fill the weights of a model that is still on the meta device."""

    @cached_property
    def family(self) -> Family:
        return family_of(self.config.get("model_type")) or Family()

    def _pieces(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of a whole parameter, as contiguous views of it."""
        if name.startswith("vision."):
            yield self._of_tower(name), parameter
            return
        places = self.places(name)
        if len(places) == 1 and "*" not in places[0]:
            yield places[0], parameter
            return
        stack = enumerate(parameter) if "*" in places[0] else [("", parameter)]
        for index, tensor in stack:
            for place, piece in zip(places, tensor.chunk(len(places)), strict=True):
                yield place.replace("*", str(index)), piece

    def places(self, name: str) -> list[str]:
        """The names that a parameter's tensors have in the language model's folder. `*` stands for an index, such as an
        expert's."""
        if name.startswith("dense."):
            _, index, own = name.split(".", 2)
            return [f"{self.dense[int(index)]}/{own}"]
        family = self.family
        part = next((part for part in family.on_disk if part in name), None)
        places = [name] if part is None else [name.replace(part, place) for place in family.on_disk[part]]
        return [self._with_prefix(place, self.prefix_on_disk) for place in places]

    @property
    def prefix_on_disk(self) -> str:
        """The start of the folder's names of all parameters but the output layer's."""
        prefix = self.family.prefix_on_disk
        return _without_model(prefix) if self.is_bare else prefix

    def _with_prefix(self, name: str, prefix: str) -> str:
        for own, theirs in (("model.layers.", f"{prefix}{self.family.layers}."), ("model.", prefix)):
            if name.startswith(own):
                return theirs + name.removeprefix(own)
        return name

    def _of_tower(self, name: str) -> str:
        """The name of a module or parameter of the vision tower in the folder, without the `model.` before it."""
        family = VISION_FAMILIES.get(self.part_of)
        for part, place in ({} if family is None else family.on_disk).items():
            if part.startswith("."):
                name = name.replace(part, place)
            elif name.startswith(part):
                name = place + name.removeprefix(part)
        return name

    def name_in_whole(self, place: str) -> str:
        """The name that transformers gives to a tensor or module of the multimodal model, by its name in `stored`."""
        if place.startswith(OF_TOWER):
            return f"model.{place}"
        own, theirs = MULTIMODAL[self.part_of].modules
        return theirs + place.removeprefix(own) if place.startswith(own) else place

    def stored(self, name: str, parameter: Tensor, as_read: bool = False) -> Iterator[tuple[str, Part]]:
        """Yield the stored tensors of a parameter, which may be sharded: their names in a folder of the language model,
        and this rank's part of each as a view, contiguous unless it is transposed. With `as_read`, each of `stacks` is
        one tensor under the parameter's name."""
        here = part_of(parameter)
        if self.is_transposed(name):
            yield self.places(name)[0], here.transposed
            return
        if as_read and name in self.stacks:
            yield name, here
            return
        if here.values.shape == here.shape:
            for place, tensor in self._pieces(name, here.values):
                yield place, Part(tensor, tuple(tensor.shape), 0, here.is_kept_by_others)
            return
        pieces = self._pieces(name, torch.empty(here.shape, device="meta"))  # views that take no memory
        if here.run is not None:  # a layer's matrix, which every family stores as one tensor
            ((place, _),) = pieces
            yield place, here
            return
        flat, end = here.values.view(-1), here.first + here.values.numel()
        for place, piece in pieces:
            start = min(max(here.first, piece.storage_offset()), piece.storage_offset() + piece.numel())
            stop = max(start, min(end, piece.storage_offset() + piece.numel()))
            values = flat[start - here.first : stop - here.first] if stop > start else flat[:0]
            yield place, Part(values, tuple(piece.shape), int(start - piece.storage_offset()), here.is_kept_by_others)

    def is_transposed(self, name: str) -> bool:
        """Whether the folder has a parameter transposed."""
        return name.endswith("weight") and any(part in name for part in self.family.transposed)

    def turned(self, place: str, part: Part) -> Part:
        """A part of `stored` as the folder has it, to write: for transposed `stacks` a view that is not contiguous."""
        if not self.stacks.get(place):
            return part
        return replace(part, values=part.values.mT, shape=(part.shape[0], part.shape[2], part.shape[1]))

    @property
    def own_names(self) -> dict[str, str]:
        """A multimodal model's folder: its names of tensors by their names in a folder of the language model."""
        return {stored: name for name, stored in self.names.items() if stored is not None}

    def module_name(self, name: str, in_whole: bool = True) -> str:
        """The name of a module in transformers' class, which PEFT uses too; with `in_whole` in the class of the
        multimodal model, if the folder has one. `name_in_language_model` reverts the difference."""
        if name.startswith("vision."):
            return self.name_in_whole(self._of_tower(name)) if in_whole else self._of_tower(name)
        family = self.family
        renamed = {part: place for part, (place, *others) in family.on_disk.items() if not others and "*" not in place}
        renamed = {**family.in_memory, **{part: renamed[part] for part in renamed if part not in family.in_memory}}
        part = next((part for part in renamed if part in name), None)
        name = name if part is None else name.replace(part, renamed[part])
        prefix = family.prefix_in_memory
        name = self._with_prefix(name, _without_model(prefix) if self.is_bare and not self.part_of else prefix)
        return self.name_in_whole(name) if self.part_of and in_whole else name


def _without_model(prefix: str) -> str:
    """A prefix of names without the attribute that has the model without its output layer."""
    return prefix.partition(".")[2]


def is_of_tower(place: str) -> bool:
    """Whether a name of `Source.stored` belongs to the vision tower."""
    return place.startswith(OF_TOWER)


def name_in_language_model(name: str, spellings: Mapping[str, str] | None = None) -> str | None:
    """The name of a multimodal model's tensor or module in its language model; None for those of audio. Those of the
    vision tower have the name of `Source.stored`, or None without `spellings`, which are those of `VisionFamily`."""
    inner = name.removeprefix("model.")
    if inner.startswith(OF_TOWER):
        for spelling, place in (spellings or {}).items():
            inner = inner.replace(spelling, place)
        return None if spellings is None else inner
    if inner.startswith(OF_SOUND):
        return None
    # transformers 4 wrote language_model.model.layers, version 5 writes model.language_model.layers.
    name = re.sub(r"^(model\.)?(language|text)_model\.(model\.)?", "model.", name)
    return re.sub(r"^model\.lm_head", "lm_head", name)


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


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a module, without its submodules'."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a model by name, module by module."""
    for place, module in model.named_modules():
        for name, tensor in own_tensors(module):
            yield f"{place}.{name}" if place else name, tensor


def tensors_on_disk(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's folder by name, without gradients.

    If the family stores a parameter as several tensors, these are views of the parameter, not copies.
    """
    return {name: part.values for name, part in parts_on_disk(model).items()}


def parts_on_disk(model: nn.Module, as_read: bool = False) -> dict[str, Part]:
    """As `tensors_on_disk`, for a model that may be sharded: this rank's part of each tensor. `as_read` is that of
    `stored`; a model with a vision tower, which is always saved in the form of its folder, has no other."""
    source, as_read = source_of(model), as_read or getattr(model, "vision", None) is not None
    return dict(pair for name, tensor in all_tensors(model) for pair in source.stored(name, tensor, as_read))
