"""Language models of models that read images, as llama.cpp's converter writes them.

llama.cpp reads the vision tower from a second file, an mmproj file. That file fits a file of the language model with
the right architecture, the sections of positions with three axes, and the number of layers that get outputs of the
tower.

Source: llama.cpp, conversion/*.py and src/llama-model.cpp (the order of rotated features).
"""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from lean_ft.gguf.cache import GGUF_INDEX, gguf_file
from lean_ft.gguf.open import FAMILY_IN_WHOLE, GGUF_FAMILIES
from lean_ft.gguf.rows import GGUFFamily
from lean_ft.models.vision.config import VISION_FAMILIES
from lean_ft.system.config_fields import ConfigFields
from lean_ft.system.whole_files import read_json

if TYPE_CHECKING:
    from lean_ft.models import Decoder

# (model_type of the whole model, architecture of its language model alone) -> architecture of the language model in it.
_ARCHITECTURES = {
    ("mistral3", "llama"): "mistral3", ("paddleocr_vl", "llama"): "paddleocr", ("qwen2_vl", "qwen2"): "qwen2vl",
    ("qwen2_5_vl", "qwen2"): "qwen2vl", ("qwen2_5_omni_thinker", "qwen2"): "qwen2vl", ("qwen3_vl", "qwen3"): "qwen3vl",
    ("qwen3_vl_moe", "qwen3moe"): "qwen3vlmoe",
}  # fmt: skip
_SECTIONS, _DEEPSTACK = "rope.dimension_sections", "n_deepstack_layers"
# Models for whose tower llama.cpp's converter writes an mmproj file.
_WITH_MMPROJ = {*VISION_FAMILIES} | {
    "exaone4_5", "gemma3n", "glm4v", "glm4v_moe", "glm_ocr", "idefics3", "internvl", "janus", "kimi_k25",
    "lighton_ocr", "llama4",
    "minicpmv4_6", "paddleocr_vl", "qwen2_vl", "qwen2_5_omni_thinker",
}  # fmt: skip


def row_of(model: "Decoder") -> GGUFFamily:
    """Return the row of a model's family. A language model of a model that reads images gets its own architecture and
    metadata.

    The family must be one of `GGUF_FAMILIES`. Raises ValueError if config.json or the GGUF file lacks a field that the
    row needs, or has a wrong value of it.
    """
    family, folder = GGUF_FAMILIES[model.source.config["model_type"]], model.source.folder
    if family.architecture_of is not None:
        family = family._replace(architecture=family.architecture_of(model.config))
    if folder is not None and (file := gguf_file(folder)) is not None:
        architecture, further = _in_file(folder, file, family.architecture)
    else:
        architecture, further = _in_folder(model, family.architecture)
    if architecture in FAMILY_IN_WHOLE and _SECTIONS not in further:
        raise ValueError(
            f"{folder}: config.json has no mrope_section in its rotary settings, which llama.cpp's architecture "
            f"{architecture} needs."
        )
    # llama.cpp rotates features i and i + R / 2 of a head wherever positions have three axes.
    pairs_neighbors = family.pairs_neighbors and _SECTIONS not in further
    return family._replace(
        architecture=architecture,
        metadata=lambda model: family.metadata(model) | further,
        pairs_neighbors=pairs_neighbors,
    )


def _in_folder(model: "Decoder", architecture: str) -> tuple[str, dict[str, Any]]:
    """The architecture and the further metadata of a model of a Hugging Face folder, by its config.json."""
    fields = _whole_config(model)
    architecture = _ARCHITECTURES.get((model.source.part_of, architecture), architecture)
    further: dict[str, Any] = {}
    for part in (fields.object("text_config"), fields):  # Qwen2.5-VL is published with all fields at the top level
        for rope in (part.object("rope_parameters"), part.object("rope_scaling")):
            if _SECTIONS not in further and rope.get("mrope_section") is not None:
                further[_SECTIONS] = _sections(rope, "mrope_section")
    if architecture.startswith("qwen3vl"):
        layers = fields.object("vision_config").layer_numbers("deepstack_visual_indexes")
        further[_DEEPSTACK] = len(layers or ())
    return architecture, further


def _in_file(folder: Path, file: Path, architecture: str) -> tuple[str, dict[str, Any]]:
    """The same for a model of a GGUF file. folder: the cached folder of the file."""
    stored = read_json(folder / GGUF_INDEX)["metadata"]
    of_file = stored["general.architecture"]
    prefix = f"{of_file}."
    fields = ConfigFields({key.removeprefix(prefix): value for key, value in stored.items()}, {}, str(file))
    further: dict[str, Any] = {}
    if fields.get(_SECTIONS) is not None:
        further[_SECTIONS] = _sections(fields, _SECTIONS)
    if fields.get(_DEEPSTACK) is not None:
        further[_DEEPSTACK] = fields.count(_DEEPSTACK, least=0)
    return of_file if of_file in FAMILY_IN_WHOLE else architecture, further


def _sections(fields: ConfigFields, name: str) -> list[int]:
    """The numbers of frequencies for time, height, width and a fourth axis."""
    sections = fields.get(name)
    is_list = isinstance(sections, list) and len(sections) <= 4
    if not is_list or not all(type(n) is int and 0 <= n < 2**16 for n in sections):
        raise fields.wrong(name, "up to 4 integers")
    return sections + [0] * (4 - len(sections))


def _whole_config(model: "Decoder") -> ConfigFields:
    """The config.json of the whole model; that of the language model if it is alone."""
    folder = model.source.folder
    if not model.source.part_of or folder is None:
        return ConfigFields(model.source.config, {}, f"{folder}: config.json")
    return ConfigFields(read_json(folder / "config.json"), {}, f"{folder / 'config.json'}")


def remark_about_tower(model: "Decoder", taken_from: str, source: Path, kind: str) -> str:
    """A line about what llama.cpp needs to read images with a model; "" for a model that reads texts alone.

    taken_from: model_type of the multimodal model whose language model the run in the folder `source` trained alone, or
    ""; kind: of the GGUF file.
    """
    name = model.source.part_of
    if not name and taken_from:
        return (
            f"\nThe run trained the language model of {taken_from} alone, and the file is for text alone. To read "
            "images, export the whole model, and then that folder: leanft export "
            f"{quote(str(source))} FOLDER --keep-vision && leanft export FOLDER FILE --gguf {kind}"
        )
    if not name:
        return ""
    is_pixtral = name == "llava" and _whole_config(model).object("vision_config").get("model_type") == "pixtral"
    if name in _WITH_MMPROJ or is_pixtral:
        return (
            f"\nThe language model is that of {name}. To read images, llama.cpp also needs the vision tower: an mmproj "
            "file of the original model, or one that this writes: convert_hf_to_gguf.py "
            f"{quote(str(model.source.folder))} --mmproj"
        )
    return (
        f"\nThe language model is that of {name}, for text alone: llama.cpp's converter writes no file of this "
        "family's vision tower (mmproj)."
    )
