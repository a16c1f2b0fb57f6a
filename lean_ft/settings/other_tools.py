"""Recognize the configuration files of other tools, which `leanft convert-config` converts."""

from pathlib import Path

from lean_ft.settings.strict_yaml import read_yaml_file
from lean_ft.settings.text import RECIPE, dotted

_SIGNS = {"base_model": "axolotl", "model_name_or_path": "LLaMA-Factory"}  # keys that lean_ft's presets do not have


def refuse_other_tools(preset: Path) -> None:
    """Raise ValueError with the command that converts it, if `preset` is a configuration of another tool."""
    values, _ = read_yaml_file(preset)
    if not isinstance(values, dict) or RECIPE in values:
        return
    is_torchtune = any(key.endswith("_component_") for key, _ in dotted(values))
    if tool := "torchtune" if is_torchtune else next((_SIGNS[key] for key in values if key in _SIGNS), None):
        raise ValueError(
            f"{preset} is a configuration of {tool}. Convert it: leanft convert-config {preset} -o converted.yaml, and then "
            "leanft run converted.yaml"
        )
