"""Conversion of configurations of torchtune, axolotl and LLaMA-Factory into lean_ft presets."""

from pathlib import Path

from lean_ft.settings.converted_preset import Preset
from lean_ft.settings.from_axolotl import convert_axolotl
from lean_ft.settings.from_llama_factory import convert_llama_factory
from lean_ft.settings.from_torchtune import convert_torchtune
from lean_ft.settings.strict_yaml import read_yaml_file


def convert_config(file: Path) -> Preset:
    """Convert a training configuration, whose tool is known by its keys. Raise ValueError for other files, and for what
    cannot be converted."""
    read, _ = read_yaml_file(file)
    keys = read.keys() if isinstance(read, dict) else set[str]()
    if {"optimizer", "checkpointer", "model", "dataset"} <= keys:
        return convert_torchtune(read, file)
    is_llama_factory = {"stage", "finetuning_type", "template", "cutoff_len", "dataset"} & keys
    if "base_model" in keys or ("model_name_or_path" in keys and is_llama_factory):
        try:
            return convert_axolotl(read) if "base_model" in keys else convert_llama_factory(read, file)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    raise ValueError(
        f"{file} is not a training configuration of torchtune (model, checkpointer, dataset and optimizer), axolotl "
        "(base_model) or LLaMA-Factory (model_name_or_path and stage). Images and PPO of torchtune are not supported. For "
        "TRL and unsloth see docs/coming_from_trl.md and docs/coming_from_others.md."
    )
