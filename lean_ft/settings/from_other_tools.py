"""Conversion of configurations of torchtune, axolotl and LLaMA-Factory into lean_ft presets."""

from pathlib import Path
from shlex import quote
from typing import Any

from lean_ft.settings.converted_preset import Preset
from lean_ft.settings.from_axolotl import convert_axolotl
from lean_ft.settings.from_llama_factory import convert_llama_factory
from lean_ft.settings.from_torchtune import convert_torchtune
from lean_ft.settings.other_tools import RECIPE
from lean_ft.settings.strict_yaml import read_yaml_file
from lean_ft.settings.text import dotted


def convert_config(file: Path) -> Preset:
    """Convert a training configuration, whose tool is known by its keys. Raise ValueError for other files, and for what
    cannot be converted."""
    read, _ = read_yaml_file(file)
    tool = _tool_of(read)
    if tool == "torchtune" and {"optimizer", "checkpointer", "model", "dataset"} <= read.keys():
        return convert_torchtune(read, file)
    try:
        if tool == "axolotl":
            return convert_axolotl(read)
        if tool == "LLaMA-Factory":
            return convert_llama_factory(read, file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    raise ValueError(
        f"{file} is not a training configuration of torchtune (model, checkpointer, dataset and optimizer), axolotl "
        "(base_model) or LLaMA-Factory (model_name_or_path and stage). Images and PPO of torchtune are not supported. For "
        "TRL and unsloth see docs/coming_from_trl.md and docs/coming_from_others.md."
    )


def refuse_other_tools(preset: Path) -> None:
    """Raise ValueError with the command that converts it, if `preset` is a configuration of another tool."""
    if tool := _tool_of(read_yaml_file(preset)[0]):
        raise ValueError(
            f"{preset} is a configuration of {tool}. Convert it: leanft convert-config {quote(str(preset))} -o converted.yaml, and then "
            "leanft run converted.yaml"
        )


def _tool_of(values: Any) -> str | None:
    """Return the tool whose configuration has these keys; None for a preset of lean_ft and for other files."""
    if not isinstance(values, dict) or RECIPE in values:
        return None
    if any(key.endswith("_component_") for key, _ in dotted(values)):
        return "torchtune"
    if "base_model" in values:
        return "axolotl"
    is_llama_factory = {"stage", "finetuning_type", "template", "cutoff_len", "dataset"} & values.keys()
    return "LLaMA-Factory" if "model_name_or_path" in values and is_llama_factory else None
