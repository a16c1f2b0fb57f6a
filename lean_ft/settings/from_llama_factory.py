"""Conversion of LLaMA-Factory's configurations into lean_ft presets."""

from pathlib import Path
from typing import Any

from lean_ft.settings.converted_preset import Preset, Values, flat, plain
from lean_ft.settings.strict_yaml import read_yaml_file

# Their name of a column -> ours, for rows of instructions and for chats, and its default.
_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
_ALWAYS = ("system", "tools", "history", "chosen", "rejected", "kto_tag")


def convert_llama_factory(read: Values, file: Path) -> Preset:
    """Convert pre-training, supervised fine-tuning, DPO, KTO, reward models and PPO. Raise ValueError for a wrong value."""
    preset, left = Preset("llama_factory"), flat(read)
    if isinstance(left.get("lora_target"), str) and left["lora_target"] != "all":
        left["lora_target"] = [name.strip() for name in left["lora_target"].split(",")]
    preset.take_defaults(left)
    if left.get("lora_alpha") is None and isinstance(left["lora_rank"], int):
        left["lora_alpha"] = 2 * left["lora_rank"]
    betas = [left.pop("adam_beta1", None) or 0.9, left.pop("adam_beta2", None) or 0.999]
    preset.settings["optimizer.betas"] = betas
    folder = str(left.get("dataset_dir") or "data")
    names = {key: left.pop(key, None) for key in ("dataset", "eval_dataset")}
    max_samples = left.pop("max_samples", None)
    preset.take_all(left, first=("stage",))
    preset.remark_on_processes(left)
    for key, ours in (("dataset", "data.source"), ("eval_dataset", "data.validation_source")):
        given = names[key] or []
        listed = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"{key} is {repr(given)[:100]}; expected names separated by commas.")
        sources = [_source(name, folder, file, preset) for name in listed]
        if max_samples is not None and key == "dataset":
            for source in sources:
                source["split"] = f"{source.get('split', 'train')}[:{max_samples}]"
        preset.set_sources(ours, sources)
    if preset.recipe == "ppo":
        preset.remark(
            "rewards: set a reward model, a run of `reward` or a folder. LLaMA-Factory's adapter of one is not read."
        )
    return preset


def _source(name: str, folder: str, file: Path, preset: Preset) -> Values:
    """Convert a data set's description in dataset_info.json into an entry of data.source."""
    places = [Path(folder) / "dataset_info.json", file.parent / folder / "dataset_info.json"]
    info = next((place for place in places if place.is_file()), None)
    described, _ = read_yaml_file(info) if info else ({}, {})
    one = described.get(name) if isinstance(described, dict) else None
    if not isinstance(one, dict):
        preset.remark(f"dataset: no {info or places[0]} describes {name}. Set data.source to its path or repository.")
        return {"path": name}
    given: Any = flat(one)
    formatting = str(given.get("formatting", "alpaca"))
    columns = {ours: str(given.get(f"columns.{theirs}", ours)) for theirs, ours in _COLUMNS.get(formatting, {}).items()}
    columns |= {ours: str(given[f"columns.{ours}"]) for ours in _ALWAYS if given.get(f"columns.{ours}")}
    format_ = formatting
    if given.get("tags.role_tag") == "role":
        columns["messages"], format_ = columns.pop("conversations"), "messages"
    if preset.settings.get("data.format") == "text":
        columns, format_ = {"text": str(given.get("columns.prompt", "text"))}, "text"
    if given.get("ranking") or preset.recipe in ("dpo", "reward"):
        columns.pop("output", None)
        format_ = "preference"
    if "kto_tag" in columns:
        columns["label"], format_ = columns.pop("kto_tag"), "unpaired"
    if given.get("num_samples") is not None:
        preset.remark(
            f"dataset: {name} has num_samples={given['num_samples']}, which has no equivalent. Use a slice in split."
        )
    repository = given.get("hf_hub_url") or given.get("ms_hub_url")
    place = (
        str(info.parent / str(given.get("file_name")))
        if info and given.get("file_name") and not repository
        else repository
    )
    source = {"path": str(place or name), "format": format_, "subset": given.get("subset"), "split": given.get("split")}
    source["columns"] = {ours: field for ours, field in columns.items() if ours != field} or None
    return {key: plain(value) for key, value in source.items() if value is not None}
