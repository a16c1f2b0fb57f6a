"""Language models of models that read images, as llama.cpp's converter writes them.

llama.cpp has the vision tower in a second file, an mmproj file. It fits a file of the language model that has the right
architecture, the sections of positions with three axes, and the number of layers that get outputs of the tower.

Source: llama.cpp, conversion/*.py and src/llama-model.cpp (the order of rotated features).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_ft.gguf.cache import GGUF_INDEX, gguf_file
from lean_ft.gguf.open import FAMILY_IN_WHOLE, GGUF_FAMILIES
from lean_ft.gguf.rows import GGUFFamily
from lean_ft.models.vision.config import VISION_FAMILIES
from lean_ft.system.whole_files import read_json

if TYPE_CHECKING:
    from lean_ft.models import Decoder

# The model that reads images, and the architecture of its language model alone -> that of the language model in it.
_ARCHITECTURES = {
    ("mistral3", "llama"): "mistral3", ("paddleocr_vl", "llama"): "paddleocr", ("qwen2_vl", "qwen2"): "qwen2vl",
    ("qwen2_5_vl", "qwen2"): "qwen2vl", ("qwen2_5_omni_thinker", "qwen2"): "qwen2vl", ("qwen3_vl", "qwen3"): "qwen3vl",
    ("qwen3_vl_moe", "qwen3moe"): "qwen3vlmoe",
}  # fmt: skip
_SECTIONS, _DEEPSTACK = "rope.dimension_sections", "n_deepstack_layers"
# Models for whose tower llama.cpp's converter writes an mmproj file.
_WITH_MMPROJ = {*VISION_FAMILIES} | {
    "exaone4_5", "gemma3n", "glm4v", "glm4v_moe", "glm_ocr", "idefics3", "internvl", "janus", "kimi_k25", "lighton_ocr", "llama4",
    "minicpmv4_6", "paddleocr_vl", "qwen2_vl", "qwen2_5_omni_thinker",
}  # fmt: skip


def row_of(model: "Decoder") -> GGUFFamily:
    """Return the row of a model's family, with the architecture and the metadata of a language model in a model that reads images.

    The family must be one of `GGUF_FAMILIES`. Raises ValueError if config.json lacks or misspells what the row needs.
    """
    family, folder = GGUF_FAMILIES[model.source.config["model_type"]], model.source.folder
    if family.architecture_of is not None:
        family = family._replace(architecture=family.architecture_of(model.config))
    if folder is not None and gguf_file(folder) is not None:
        stored = read_json(folder / GGUF_INDEX)["metadata"]
        architecture = stored["general.architecture"]
        further = {key: stored.get(f"{architecture}.{key}") for key in (_SECTIONS, _DEEPSTACK)}
        architecture = architecture if architecture in FAMILY_IN_WHOLE else family.architecture
    else:
        config = _whole_config(model)
        architecture = _ARCHITECTURES.get((model.source.part_of, family.architecture), family.architecture)
        further: dict[str, Any] = {_SECTIONS: _sections(config, folder)}
        if architecture.startswith("qwen3vl"):
            further[_DEEPSTACK] = len(config.get("vision_config", {}).get("deepstack_visual_indexes") or ())
    further = {key: value for key, value in further.items() if value is not None}
    if architecture in FAMILY_IN_WHOLE and _SECTIONS not in further:
        raise ValueError(
            f"{folder}: config.json has no mrope_section in its rotary settings, which llama.cpp's architecture {architecture} needs."
        )
    # llama.cpp rotates features i and i + R / 2 of a head wherever positions have three axes.
    pairs_neighbors = family.pairs_neighbors and _SECTIONS not in further
    return family._replace(
        architecture=architecture,
        metadata=lambda model: family.metadata(model) | further,
        pairs_neighbors=pairs_neighbors,
    )


def _whole_config(model: "Decoder") -> dict[str, Any]:
    """The config.json of the whole model; that of the language model if it is alone."""
    folder = model.source.folder
    return read_json(folder / "config.json") if model.source.part_of and folder is not None else model.source.config


def _sections(config: Mapping[str, Any], folder: Path | None) -> list[int] | None:
    """The numbers of frequencies for time, height, width and a fourth axis, or None if positions have one axis."""
    text = config.get("text_config", config)
    ropes = [text.get(name) for name in ("rope_parameters", "rope_scaling")]
    found = next((rope["mrope_section"] for rope in ropes if isinstance(rope, dict) and "mrope_section" in rope), None)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > 4 or not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{folder}: mrope_section is {found!r}; expected up to 4 integers.")
    return found + [0] * (4 - len(found))


def remark_about_images(model: "Decoder") -> str:
    """What llama.cpp needs beside the file of a language model in order to read images; nothing for other models."""
    name = model.source.part_of
    if not name:
        return ""
    tower = _whole_config(model).get("vision_config", {})
    if name in _WITH_MMPROJ or (name == "llava" and tower.get("model_type") == "pixtral"):
        return (
            f"\nThe file has the language model of {name}. To read images, llama.cpp also needs the vision tower: an mmproj file of "
            f"the original model, or that of: convert_hf_to_gguf.py {model.source.folder} --mmproj"
        )
    return (
        f"\nThe file has the language model of {name}, for text alone: llama.cpp's converter writes no file of this family's vision "
        "tower (mmproj)."
    )
