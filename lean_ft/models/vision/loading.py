"""Whether the vision tower of a folder's model is loaded."""

from pathlib import Path
from typing import Literal, TypedDict

from lean_ft.images.rules import image_rules
from lean_ft.models.vision.config import VISION_FAMILIES
from lean_ft.system.whole_files import read_json

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class TowerOptions(TypedDict, total=False):
    """Options of `load_model`."""

    images: Literal["frozen"]


def has_tower(folder: Path) -> bool:
    """Whether the folder's model has a vision tower that lean_ft knows, and a file of its image processor."""
    is_known = str(read_json(folder / "config.json").get("model_type")) in VISION_FAMILIES
    return is_known and any((folder / name).is_file() for name in PROCESSOR_FILES)


def options_of_towers(folder: Path) -> TowerOptions:
    """Options that load a folder's model with the towers that lean_ft knows, frozen."""
    return {"images": "frozen"} if has_tower(folder) else {}


def tower_of(folder: Path) -> Literal["none", "frozen"]:
    """The option `images` of a folder's model, where it is `auto`. Raises ValueError if its tower cannot be used."""
    if not has_tower(folder):
        return "none"
    try:
        image_rules(folder)
    except ValueError as error:
        raise ValueError(f"{error} To read texts alone, set model.images=none (`leanft serve`: --no-images).") from None
    return "frozen"
