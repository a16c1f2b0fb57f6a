"""Conversion of axolotl's configurations into lean_ft presets."""

import re

from lean_ft.settings.converted_preset import Preset, Values, flat
from lean_ft.settings.joined_settings import join_axolotl, join_axolotl_source
from lean_ft.settings.other_tools import by_name, table

_SOURCES = {
    "datasets": "data.source",
    "pretraining_dataset": "data.source",
    "test_datasets": "data.validation_source",
}


def convert_axolotl(read: Values) -> Preset:
    """Convert supervised fine-tuning, DPO and its variants, KTO and reward models. Raise ValueError for a wrong value."""
    preset, left = Preset("axolotl"), flat({key: value for key, value in read.items() if key not in _SOURCES})
    lists = {key: flat({key: read[key]}).get(key, flat({"": read[key]})) for key in _SOURCES if read.get(key)}
    rewards = left.get("trl.reward_funcs")
    if isinstance(rewards, list):  # module.function
        left["trl.reward_funcs"] = [re.sub(r"^([\w.]+)\.(\w+)$", _as_file, str(name)) for name in rewards]
    join_axolotl(left, preset)
    preset.take_training(left, first=("rl", "reward_model", "kd_trainer"))
    for key, given in lists.items():
        entries = given if isinstance(given, list) else [given]
        if not all(isinstance(one, dict) for one in entries):
            raise ValueError(f"{key} is {repr(given)[:100]}; expected a list of data sets, each with a path.")
        sources = [source for one in entries for source in _sources(key, one, preset)]
        _cut_texts(sources, preset)
        preset.set_sources(_SOURCES[key], sources)
    return preset


def _cut_texts(sources: list[Values], preset: Preset) -> None:
    """axolotl cuts a text of `type: completion` into pieces of sequence_len, and drops no part of it."""
    if not any(source.get("format") == "text" for source in sources):
        return
    if preset.settings.get("data.packing") == "bfd" and all(source.get("format") == "text" for source in sources):
        preset.settings["data.packing"] = "bfd_split"
        preset.settings.pop("data.overflow", None)
    elif preset.settings.get("data.packing") != "bfd_split":
        preset.remark(
            "datasets: axolotl cuts a text into pieces of sequence_len. The preset leaves out the rest of longer texts; "
            "data.packing=bfd_split keeps it."
        )


def _as_file(name: re.Match[str]) -> str:
    return f"{name[1].replace('.', '/')}.py:{name[2]}"


def _sources(key: str, theirs: Values, preset: Preset) -> list[Values]:
    """Convert a data set into entries of data.source: one for each of its files."""
    theirs = {name.lstrip("."): value for name, value in theirs.items()}
    if key == "pretraining_dataset":
        theirs = {"type": "pretrain", "field": theirs.pop("text_column", None)} | theirs
    kinds = by_name(table("axolotl")["datasets.type"])  # pyright: ignore[reportArgumentType]
    kind = str(theirs.pop("type", None) or "")
    if kind:
        theirs = {"type": kind if kind in kinds else re.split("[.:]", kind)[0]} | theirs
    paths = theirs.pop("data_files", None) or theirs.pop("path", None) or ""
    join_axolotl_source(theirs, preset)
    entry, shared = preset.source("datasets", theirs)
    preset.share(shared)
    chat = "conversations" if entry.get("format") == "sharegpt" else "messages"
    if preset.recipe != "finetune":
        entry.pop("format", None)
        chat = "prompt"
    entry["columns"] = {chat if ours == "messages" else ours: field for ours, field in entry["columns"].items()}
    return [entry | {"path": path} for path in (paths if isinstance(paths, list) else [paths])]
