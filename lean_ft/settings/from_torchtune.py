"""Conversion of torchtune configurations into lean_ft presets.

Keys that are null or false are ignored. Every other key without an exact equivalent gets a remark. Defaults that differ
(AdamW's weight decay, a missing schedule) are written out.
"""

import re
from fnmatch import fnmatch
from pathlib import Path

from lean_ft.settings.converted_preset import MAX_CHARACTERS, Preset, Values, flat
from lean_ft.settings.other_tools import RECIPE
from lean_ft.settings.text import preset_values
from lean_ft.system import catalog

_INSTRUCT_COLUMNS = {"input": "prompt", "output": "completion"}  # other datasets use lean_ft's names
# Prefix of a folder made by `tune download` -> organization on the Hub.
_OWNERS = {"Llama": "meta-llama", "Meta-Llama": "meta-llama", "Qwen": "Qwen", "gemma": "google", "Mistral": "mistralai"}
_OWNERS |= dict.fromkeys(("Phi", "phi"), "microsoft")

# What the conversion computes with, by the names of keys.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "a group with _component_": (
        (),
        "model optimizer checkpointer loss kd_loss tokenizer teacher_model teacher_checkpointer lr_scheduler quantizer profiler",
    ),
    "a name": (str, "*._component_ *checkpointer.checkpoint_dir dtype ac_mode"),
    "a list": (list, "model.lora_attn_modules"),
    "a number": ((int, float), "kd_ratio epochs max_steps_per_epoch"),
    "a whole number": (int, "ac_option batch_size forward_batch_size grpo_samples"),
}


def convert_torchtune(read: Values, file: Path) -> Preset:
    """Convert a torchtune training configuration: full, LoRA and QLoRA fine-tuning, QAT, DPO, distillation or GRPO.

    Raise ValueError for images, which cannot be converted.
    """
    left = {key: value for key, value in flat(read).items() if value is not None or key == "seed"}
    for key, value in left.items():
        for _ in range(16):  # a value may refer to itself
            if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
                break
            if (found := re.search(r"\$\{([\w.]+)\}", value)) is None or found[1] not in left:
                break
            value = value.replace(found[0], str(left[found[1]])[:MAX_CHARACTERS], 1)
        left[key] = value
        for expected, (kind, names) in _KINDS.items():
            if not isinstance(value, kind) and any(fnmatch(key, name) for name in names.split()):
                raise ValueError(f"{file}: {key} is {repr(value)[:100]}; expected {expected}.")
    datasets = left.get("dataset", [])
    if not isinstance(datasets, list) or not all(isinstance(one, dict) for one in datasets):
        raise ValueError(
            f"{file}: dataset is {repr(datasets)[:100]}; expected a group with _component_, or a list of them."
        )
    if re.search("vision|multimodal", f"{left.get('model._component_')} {left.get('dataset._component_')}"):
        raise ValueError(f"{file} trains a model on images. lean_ft trains language models only.")
    preset = Preset("torchtune")
    _convert_objective(left, preset)
    _convert_model(left, preset)
    _convert_data(left, preset)
    _convert_steps(left, preset)
    if "nproc_per_node" in file.read_text(encoding="utf-8"):
        preset.remark(
            "gradient_accumulation_steps: torchtune counts per process. Multiply it by the number of processes."
        )
    of_a_pass = left.pop("forward_batch_size", None) or 1
    preset.take_all(left)
    if preset.recipe == "grpo":
        _convert_batches_of_prompts(of_a_pass, preset)
    return preset


def _component(left: Values, group: str) -> str:
    return str(left.pop(f"{group}._component_", "")).rpartition(".")[2]


def _convert_objective(left: Values, preset: Preset) -> None:
    name, distilled = _component(left, "loss"), _component(left, "kd_loss")
    uses = "The preset uses the cross-entropy of finetune."
    settings = preset.component("kd_loss" if distilled else "loss", distilled or name, uses) or {}
    preset.recipe = settings.pop(RECIPE, "finetune")
    preset.settings |= settings
    if preset.recipe == "distill":
        left.setdefault("kd_ratio", 0.5)
    if preset.recipe == "grpo":
        preset.settings["rewards"] = [{"function": "exact_answer", "pattern": r"(?:#### |<answer>)([^<\n]*)"}]
        preset.remark("rewards: torchtune's need a prompt that asks for tags. The preset uses exact_answer.")


def _convert_model(left: Values, preset: Preset) -> None:
    settings, builder = preset.settings, _component(left, "model")

    def folder_of(key: str, builder: str) -> str:
        """Return the folder if it exists, otherwise the Hub repository by its name or by the builder's preset."""
        folder = str(left.pop(f"{key}.checkpoint_dir", None) or "").rstrip("/")
        name, shipped = Path(folder).name, catalog.presets().get(f"{re.sub('^q?lora_', '', builder)}/full")
        owner = next((owner for start, owner in _OWNERS.items() if name.startswith(start)), None)
        hub = f"{owner}/{name}" if owner else preset_values(shipped)["model.path"] if shipped and not folder else None
        if hub is None or (Path(folder) / "config.json").is_file():
            return folder
        missing = f"no model in {folder}" if folder else "not set"
        preset.remark(f"{key}.checkpoint_dir: {missing}. The preset uses {hub} of the Hub.")
        return hub

    reference = left.pop("ref_checkpointer.checkpoint_dir", None)
    if reference not in (None, left.get("checkpointer.checkpoint_dir")):
        preset.remark(f"ref_checkpointer: the reference is the model before training, not {reference}.")
    folder, tokenizer = str(left.get("checkpointer.checkpoint_dir") or ""), left.get("tokenizer.path")
    if folder and isinstance(tokenizer, str) and not Path(tokenizer).is_relative_to(folder):
        preset.remark(
            f"tokenizer.path: {tokenizer} is in another folder. The preset uses the tokenizer of the model's folder."
        )
    settings["model.path"] = folder_of("checkpointer", builder)
    if preset.recipe == "distill":
        settings["distill.teacher"] = folder_of("teacher_checkpointer", _component(left, "teacher_model"))
    targets = ["o_proj" if name == "output_proj" else name for name in left.pop("model.lora_attn_modules", [])]
    targets += ["gate_proj", "up_proj", "down_proj"] if left.pop("model.apply_lora_to_mlp", False) else []
    targets += ["lm_head"] if left.pop("model.apply_lora_to_output", False) else []
    if targets:
        quantized = left.pop("model.quantize_base", False) or builder.startswith("qlora")
        settings |= {"lora.targets": targets, "lora.quantize": "nf4" if quantized else "auto"}
    quantizer, group_size = _component(left, "quantizer"), left.pop("quantizer.groupsize", 256)
    if quantizer and targets:
        preset.remark(f"quantizer: {quantizer} is not supported with an adapter.")
    elif quantizer and (found := preset.component("quantizer", quantizer, "The preset does not quantize.")):
        settings |= found | {"quantize.group_size": group_size}


def _convert_data(left: Values, preset: Preset) -> None:
    settings, recipe = preset.settings, preset.recipe

    def below(group: str) -> Values:
        return {key.removeprefix(f"{group}."): left.pop(key) for key in list(left) if key.startswith(f"{group}.")}

    found = [_source(dict(one), preset) for one in left.pop("dataset", None) or [below("dataset")]]
    first, shared = found[0]
    for name in ("train_on", "packing", "system"):
        if any(other.get(name) != shared.get(name) for _, other in found):
            preset.remark(f"dataset: {name} differs between datasets. The preset uses the value of the first one.")
    if recipe in ("finetune", "distill") and shared.get("train_on") != "all":
        shared["train_on"] = "completion" if first.get("format") == "prompt_completion" else "assistant"
    settings |= {f"data.{name}": value for name, value in shared.items()}
    preset.set_sources("data.source", [source for source, _ in found])
    if held_out := below("dataset_val"):
        source, own = _source(held_out, preset)
        preset.set_sources("data.validation_source", [source])
        if own.get("train_on", shared.get("train_on")) == "all" != shared.get("train_on"):
            preset.remark("dataset_val.train_on_input: held-out rows are trained on like the others (data.train_on).")
    if left.get("tokenizer.max_seq_len") is None and recipe != "grpo":
        preset.remark("tokenizer.max_seq_len: null is no limit in torchtune. The preset uses data.max_length=2048.")


def _source(theirs: Values, preset: Preset) -> tuple[Values, Values]:
    """Convert a dataset into an entry of data.source, and settings for all rows."""
    name = str(theirs.pop("_component_", "")).rpartition(".")[2]
    known = preset.component("dataset", name, "Set data.source and data.format; see docs/data.md.") or {}
    if name.startswith("alpaca"):
        preset.remark(
            f"dataset: torchtune's {name} adds the Alpaca prompt ('Below is an instruction ...'). lean_ft uses the instruction and "
            "the input alone. docs/coming_from_torchtune.md has a data.format with the Alpaca prompt."
        )
    theirs.setdefault("train_on_input", known.pop("data.train_on", "") == "all")
    if theirs.get("data_files"):
        theirs.pop("source", None)  # the kind of the files
    splits = theirs.pop("split_across_pack", name == "text_completion_dataset")
    renamed = {key.removeprefix("column_map."): theirs.pop(key) for key in [*theirs] if key.startswith("column_map.")}
    entry, shared = preset.source("dataset", theirs)
    if shared.get("packing") == "bfd" and splits:
        shared["packing"] = "bfd_split"
        preset.remark(
            "dataset.packed: torchtune cuts each text at tokenizer.max_seq_len - 1 tokens before it packs them. data.packing=bfd_split "
            "keeps the rest, and bfd drops it."
        )
    columns = {key.removeprefix("data.columns."): known.pop(key) for key in [*known] if key.startswith("data.columns.")}
    for ours, field in renamed.items():
        columns[_INSTRUCT_COLUMNS.get(ours, ours) if name == "instruct_dataset" else ours] = field
    known = {key.removeprefix("data.").replace("source", "path"): value for key, value in known.items()}
    found = entry | known | {key: value for key, value in entry.items() if value}
    columns |= entry["columns"]
    if found.get("format") == "messages" and "conversations" in columns:
        columns["messages"] = columns.pop("conversations")
    return found | {"columns": columns}, shared


def _convert_steps(left: Values, preset: Preset) -> None:
    settings, schedule = preset.settings, _component(left, "lr_scheduler")
    name = re.sub(r"^torchao\.prototype\.low_bit_optim", "torchao.optim", left.pop("optimizer._component_", ""))
    found = preset.component("optimizer", name, "The preset uses adamw.")
    settings |= {"optimizer.weight_decay": 0.01} if found is None else found
    settings |= preset.component("lr_scheduler", schedule, "The preset uses cosine.") or {}
    steps, epochs = left.pop("max_steps_per_epoch", None), left.get("epochs") or 1
    if steps is not None:
        settings["max_steps"] = steps * epochs
        if epochs > 1:
            preset.remark("max_steps_per_epoch: the preset limits the steps of the run, not of each epoch.")
    if left.pop("ac_mode", None) == "selective" and (every := int(left.pop("ac_option", 1))) > 1:
        settings |= {"memory.activation_checkpointing": "every_n", "memory.checkpoint_every_n": every}
    if logger := _component(left, "metric_logger"):
        settings |= preset.component("metric_logger", logger, "log.to lists loggers.") or {}
    steps = [left.pop(f"profiler.{name}_steps", 1) for name in ("wait", "warmup", "active")]
    if _component(left, "profiler") and left.get("profiler.enabled"):
        settings["profile_steps"] = steps
    if "seed" in left and left["seed"] is None:
        preset.remark("seed: null is a random seed in torchtune. The preset uses 0.")


def _convert_batches_of_prompts(of_a_pass: int, preset: Preset) -> None:
    """Convert GRPO's batches and lengths: torchtune counts prompts per batch, lean_ft counts completions."""
    settings = preset.settings
    prompts = settings.pop("batch_size", 1)
    settings["batch_size"] = of_a_pass * settings.get("generation.num_answers", 8)
    settings["gradient_accumulation_steps"] = -(-prompts // of_a_pass)
    if "generation.top_k" in settings:
        settings["loss.correction"] = "token_truncate"
        preset.remark("top_k: torchtune's loss ignores it. The preset corrects the loss (loss.correction).")
