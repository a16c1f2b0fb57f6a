"""Conversion of LLaMA-Factory's configurations into lean_ft presets."""

from pathlib import Path

from lean_ft.settings.converted_preset import Preset, Values, flat
from lean_ft.settings.joined_settings import join_llama_factory
from lean_ft.settings.strict_yaml import read_yaml_file

_INSTRUCTIONS = {"prompt": "instruction", "query": "input", "response": "output"}  # their columns -> our fields
_ALWAYS = {name: name for name in ("system", "tools", "history", "chosen", "rejected")} | {"kto_tag": "label"}
# Keys of messages and roles that lean_ft reads.
_TAGS = (
    *("from", "role", "value", "content", "human", "user", "gpt", "assistant", "observation", "tool"),
    *("function_call", "system"),
)


def convert_llama_factory(read: Values, file: Path) -> Preset:
    """Convert pre-training, supervised fine-tuning, DPO, KTO, reward models and PPO. Raise ValueError for a wrong value."""
    preset, left = Preset("llama_factory"), flat(read)
    if isinstance(left.get("lora_target"), str) and left["lora_target"] != "all":
        left["lora_target"] = [name.strip() for name in left["lora_target"].split(",")]
    if left.get("lora_alpha") is None and isinstance(rank := left.get("lora_rank") or 8, int):
        left["lora_alpha"] = 2 * rank
    folder = str(left.get("dataset_dir") or "data")
    names = {key: left.pop(key, None) for key in ("dataset", "eval_dataset")}
    max_samples = left.pop("max_samples", None)
    join_llama_factory(left, preset)
    preset.take_training(left, first=("stage", "finetuning_type"))
    for key, ours in (("dataset", "data.source"), ("eval_dataset", "data.validation_source")):
        given = names[key] or []
        listed = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"{key} is {repr(given)[:100]}; expected names separated by commas.")
        sources = [_source(name, folder, file, preset) for name in listed]
        if max_samples is not None and key == "dataset":
            for source in sources:
                source["split"] = f"{source.get('split') or 'train'}[:{max_samples}]"
        preset.set_sources(ours, sources)
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
    given, is_chat = flat(one), one.get("formatting") == "sharegpt"
    has_roles = given.get("tags.role_tag") == "role"
    given = {k: v for k, v in given.items() if k != "formatting" and not (k.startswith("tags.") and v in _TAGS)}
    format_ = ("messages" if has_roles else "sharegpt") if is_chat else "alpaca"
    fields = {"messages": "messages" if has_roles else "conversations"} if is_chat else dict(_INSTRUCTIONS)
    if preset.settings.get("data.format") == "text":
        format_, fields = "text", {"prompt": "text"}
    elif given.pop("ranking", False) or preset.recipe in ("dpo", "reward"):
        format_ = "preference"
    elif preset.recipe == "kto":
        format_, fields = "unpaired", {"prompt": "prompt", "response": "completion"}
    elif preset.recipe == "ppo":
        format_, fields = None, {"messages": "messages"} if is_chat else {"prompt": "prompt"}
    defaults = _INSTRUCTIONS | {"messages": "conversations"}
    columns = {ours: given.pop(f"columns.{theirs}", defaults[theirs]) for theirs, ours in fields.items()}
    columns |= {ours: field for theirs, ours in _ALWAYS.items() if (field := given.pop(f"columns.{theirs}", None))}
    if format_ == "preference":
        columns.pop("output", None)
    if "input" in columns:
        preset.remark(
            "dataset: LLaMA-Factory joins an instruction and its input by a line break, and lean_ft by an empty line."
        )
    repository, file_name = given.pop("hf_hub_url", None), given.pop("file_name", None)
    place = repository or (info and file_name and str(info.parent / str(file_name))) or name
    source = {"path": place, "format": format_, "subset": given.pop("subset", None), "split": given.pop("split", None)}
    if given:
        preset.remark(f"dataset: {name}: these keys of {info} have no equivalent: {', '.join(given)}.")
    return source | {"columns": columns}
