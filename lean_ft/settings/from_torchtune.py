"""Conversion of torchtune configurations into lean_ft presets.

The tables use the names of torchtune 0.6. Keys that are null or false are ignored. Every other key without an exact
equivalent gets a remark. Defaults that differ (AdamW's weight decay, a missing schedule) are written out.
"""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lean_ft.settings.strict_yaml import Plain, read_yaml_file, to_yaml
from lean_ft.settings.text import RECIPE, describe, dotted, preset_values
from lean_ft.system import catalog

Values = dict[str, Any]  # dotted key -> value

# Last part of a component's name -> recipe and lean_ft settings.
_LOSSES: dict[str, tuple[str, Values]] = {
    **dict.fromkeys(("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss"), ("finetune", {})),
    **dict.fromkeys(("ForwardKLLoss", "ForwardKLWithChunkedOutputLoss"), ("distill", {})),
    **dict.fromkeys(
        ("ReverseKLLoss", "ReverseKLWithChunkedOutputLoss"), ("distill", {"distill.divergence": "reverse_kl"})
    ),
    "DPOLoss": ("dpo", {}),
    "RSOLoss": ("dpo", {"loss.name": "hinge"}),
    **dict.fromkeys(("GRPOLoss", "GRPOSimpleLoss"), ("grpo", {"loss.name": "grpo", "loss.kl": "k3"})),
}
_DECAYED: Values = {"optimizer.weight_decay": 0.01}  # torchtune's default
_OPTIMIZERS: dict[str, Values] = {
    "torch.optim.AdamW": _DECAYED,
    "bitsandbytes.optim.PagedAdamW": _DECAYED,
    "bitsandbytes.optim.AdamW8bit": {"optimizer.name": "adamw_8bit", **_DECAYED},
    "bitsandbytes.optim.PagedAdamW8bit": {"optimizer.name": "paged_adamw_8bit", **_DECAYED},
    "torchao.optim.AdamW8bit": {"optimizer.name": "adamw_8bit_torchao", **_DECAYED},
    "torchao.optim.AdamW4bit": {"optimizer.name": "adamw_4bit", **_DECAYED},
    "torch.optim.SGD": {"optimizer.name": "sgd"},
}
_DATASETS: dict[str, Values] = {
    "alpaca_dataset": {"path": "tatsu-lab/alpaca", "format": "alpaca", "train_on_input": True},
    "alpaca_cleaned_dataset": {"path": "yahma/alpaca-cleaned", "format": "alpaca", "train_on_input": True},
    "instruct_dataset": {"format": "prompt_completion", "columns": {"prompt": "input", "completion": "output"}},
    "chat_dataset": {"format": "sharegpt"},
    "slimorca_dataset": {"path": "Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
    "text_completion_dataset": {"format": "text"},
    "preference_dataset": {"format": "preference"},
    "hh_rlhf_helpful_dataset": {"path": "RLHFlow/HH-RLHF-Helpful-standard", "format": "preference"},
    "stack_exchange_paired_dataset": {
        "path": "lvwerra/stack-exchange-paired",
        "format": "preference",
        "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    },
    "gsm8k_dataset": {"path": "openai/gsm8k", "subset": "main", "columns": {"prompt": "question"}},
}
_INSTRUCT_COLUMNS = {"input": "prompt", "output": "completion"}  # other datasets use lean_ft's names
_LOGGERS = {"DiskLogger": [], "StdoutLogger": [], "WandBLogger": ["wandb"], "TensorBoardLogger": ["tensorboard"]}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
# Prefix of a folder made by `tune download` -> organization on the Hub.
_OWNERS = {"Llama": "meta-llama", "Meta-Llama": "meta-llama", "Qwen": "Qwen", "gemma": "google", "Mistral": "mistralai"}
_OWNERS |= dict.fromkeys(("Phi", "phi"), "microsoft")

_RENAMED = {
    **{f"optimizer.{name}": f"optimizer.{name}" for name in ("lr", "weight_decay", "eps", "betas", "momentum")},
    **{name: name for name in ("batch_size", "gradient_accumulation_steps", "clip_grad_norm", "epochs", "seed")},
    **{name: name for name in ("compile", "output_dir", "loss.beta", "loss.label_smoothing", "loss.epsilon")},
    "tokenizer.max_seq_len": "data.max_length",
    "tokenizer.truncation_type": "data.truncation_side",
    "lr_scheduler.num_warmup_steps": "schedule.warmup_steps",
    "optimizer_in_bwd": "optimizer.in_backward",
    "enable_activation_offloading": "memory.activation_offload",
    "enable_async_checkpointing": "save_async",
    "log_every_n_steps": "log_every",
    "save_every_n_steps": "save_every",
    "run_val_every_n_steps": "eval_every",
    "checkpointer.keep_last_n_checkpoints": "keep_last",
    "tensor_parallel_dim": "parallel.tensor",
    "context_parallel_dim": "parallel.context",
    "data_parallel_replicate_dim": "parallel.replicate",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "metric_logger.project": "log.project",
    "profiler.enabled": "profile",
    "model.lora_rank": "lora.rank",
    "model.lora_alpha": "lora.alpha",
    "model.lora_dropout": "lora.dropout",
    "model.use_dora": "lora.dora",
    "loss.gamma": "loss.beta",
    "loss.kl_coeff": "loss.kl_weight",
    "grpo_samples": "generation.num_answers",
    "max_generated_tokens": "generation.max_new_tokens",
    "temperature": "generation.temperature",
    "top_k": "generation.top_k",
    "ppo_epochs": "generation.passes",
    "num_steps": "max_steps",
}
# Keys that need no lean_ft setting; see docs/coming_from_torchtune.md.
_NEEDLESS = """
    *checkpointer._component_ *checkpointer.checkpoint_files* *checkpointer.model_type *checkpointer.output_dir
    resume_from_checkpoint save_adapter_weights_only tokenizer._component_ tokenizer.path tokenizer.*_file tokenizer.*_path
    *num_output_chunks optimizer.fused device shuffle log_peak_memory_stats metric_logger.log_dir log_level profiler.*
    batch_size_val data_parallel_shard_dim custom_sharded_layers tensor_parallel_plan.* teacher_model._component_
    base_model_path
"""
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
_MAX_REMARKS, _MAX_CHARACTERS = 200, 1000


@dataclass
class Preset:
    """A converted configuration: a recipe, its settings, and remarks on the other keys."""

    recipe: str = "finetune"
    settings: Values = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def remark(self, text: str) -> None:
        if len(self.remarks) < _MAX_REMARKS:
            self.remarks.append(_one_line(text))

    def equivalent(self, table: dict[str, Any], key: str, name: str, default: Any, uses: str) -> Any:
        """Return a component's entry in a table. If there is none, return the default and remark what the preset uses."""
        if name not in table:
            self.remark(f"{key}: {name} has no equivalent. {uses}" if name else f"{key}: not set. {uses}")
        return table.get(name, default)

    def text(self, source: str) -> str:
        """Return the preset as YAML without default values. Remarks become comments."""
        defaults = {s.key: s.default for s in describe(catalog.load_recipe(catalog.recipes()[self.recipe]).Config)}
        nested: Values = {RECIPE: self.recipe}
        for key, value in self.settings.items():
            if value is not None and (key == "optimizer.lr" or defaults.get(key) != value):
                inside = nested
                for group in key.split(".")[:-1]:
                    inside = inside.setdefault(group, {})
                inside[key.rpartition(".")[2]] = value
        lines = (_one_line(f"From torchtune's {source}."), *self.remarks)
        return "".join(f"# {line}\n" for line in lines) + to_yaml(nested)


def _one_line(text: str) -> str:
    """Escape line breaks, which would end a comment, and other control characters."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:_MAX_CHARACTERS])


def convert_config(file: Path) -> Preset:
    """Convert a torchtune training configuration: full, LoRA and QLoRA fine-tuning, QAT, DPO, distillation or GRPO.

    Raise ValueError for other files, and for images and PPO, which cannot be converted.
    """
    read, _ = read_yaml_file(file)
    if not isinstance(read, dict) or not {"optimizer", "checkpointer", "model", "dataset"} <= read.keys():
        raise ValueError(
            f"{file} is not a torchtune training configuration: expected model, checkpointer, dataset and optimizer. Images and "
            "PPO are not supported. For axolotl, unsloth and LLaMA-Factory see docs/coming_from_others.md, for TRL "
            "docs/coming_from_trl.md."
        )
    left = {key: value for key, value in _flat(read).items() if value is not None or key == "seed"}
    for key, value in left.items():
        for _ in range(16):  # a value may refer to itself
            if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
                break
            if (found := re.search(r"\$\{([\w.]+)\}", value)) is None or found[1] not in left:
                break
            value = value.replace(found[0], str(left[found[1]])[:_MAX_CHARACTERS], 1)
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
    preset = Preset()
    _convert_objective(left, preset)
    _convert_model(left, preset)
    _convert_data(left, preset)
    _convert_steps(left, preset)
    if "nproc_per_node" in file.read_text(encoding="utf-8"):
        preset.remark(
            "gradient_accumulation_steps: torchtune counts per process. Multiply it by the number of processes."
        )
    preset.settings |= {_RENAMED[key]: left.pop(key) for key in list(left) if key in _RENAMED and left[key] is not None}
    if preset.recipe == "grpo":
        _convert_batches_of_prompts(left, preset)
    _remark_on_the_rest(left, preset)
    return preset


def _flat(values: Values) -> Values:
    return {key: _plain(value) for key, value in dotted(values) if value != {}}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_flat(item) if isinstance(item, dict) else _plain(item) for item in value]
    return value.value() if isinstance(value, Plain) else value


def _component(left: Values, group: str) -> str:
    return str(left.pop(f"{group}._component_", "")).rpartition(".")[2]


def _convert_objective(left: Values, preset: Preset) -> None:
    name, distilled = _component(left, "loss"), _component(left, "kd_loss")
    uses = "The preset uses the cross-entropy of finetune."
    preset.recipe, settings = preset.equivalent(_LOSSES, "loss", distilled or name, ("finetune", {}), uses)
    preset.settings |= settings
    if preset.recipe == "distill":
        preset.settings["distill.cross_entropy_weight"] = round(1 - left.pop("kd_ratio", 0.5), 6)
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
    settings["model.path"] = folder_of("checkpointer", builder)
    if preset.recipe == "distill":
        settings["distill.teacher"] = folder_of("teacher_checkpointer", _component(left, "teacher_model"))
    settings["model.dtype"] = _DTYPES.get(dtype := left.pop("dtype", "bf16"), dtype)
    targets = ["o_proj" if name == "output_proj" else name for name in left.pop("model.lora_attn_modules", [])]
    targets += ["gate_proj", "up_proj", "down_proj"] if left.pop("model.apply_lora_to_mlp", False) else []
    targets += ["lm_head"] if left.pop("model.apply_lora_to_output", False) else []
    if targets:
        quantized = left.pop("model.quantize_base", False) or builder.startswith("qlora")
        settings |= {"lora.targets": targets, "lora.quantize": "nf4" if quantized else "none"}
    quantizer, group_size = _component(left, "quantizer"), left.pop("quantizer.groupsize", 256)
    if quantizer == "Int8DynActInt4WeightQATQuantizer" and not targets:
        settings |= {"quantize.train": "int8_dynamic_int4_weight", "quantize.group_size": group_size}
    elif quantizer:
        preset.remark(f"quantizer: {quantizer} is not supported{' with an adapter' if targets else ''}.")


def _convert_data(left: Values, preset: Preset) -> None:
    settings, recipe = preset.settings, preset.recipe

    def below(group: str) -> Values:
        return {key.removeprefix(f"{group}."): left.pop(key) for key in list(left) if key.startswith(f"{group}.")}

    sources = [_source(dict(one), preset) for one in left.pop("dataset", None) or [below("dataset")]]
    shared = [{name: source.pop(name, None) for name in ("train_on_input", "packed", "system")} for source in sources]
    for name, value in shared[0].items():
        if any(other[name] != value for other in shared):
            preset.remark(f"dataset: {name} differs between datasets. The preset uses the value of the first one.")
    if recipe in ("finetune", "distill"):
        of_format = "completion" if sources[0].get("format") == "prompt_completion" else "assistant"
        settings["data.train_on"] = "all" if shared[0]["train_on_input"] else of_format
    settings |= {"data.packing": shared[0]["packed"] or None, "data.system": shared[0]["system"]}
    settings["data.source"] = sources if len(sources) > 1 else sources[0].pop("path", "")
    settings |= {f"data.{name}": value for name, value in sources[0].items()} if len(sources) == 1 else {}
    if held_out := below("dataset_val"):
        source = _source(held_out, preset)
        settings["data.validation_source"] = [{k: v for k, v in source.items() if k not in shared[0]}]
    if left.get("tokenizer.max_seq_len") is None and recipe != "grpo":
        preset.remark("tokenizer.max_seq_len: null is no limit in torchtune. The preset uses data.max_length=2048.")


def _source(theirs: Values, preset: Preset) -> Values:
    """Convert a dataset into an entry of data.source, with the extra keys `train_on_input`, `packed` and `system`."""
    name = str(theirs.pop("_component_", "")).rpartition(".")[2]
    uses = "Set data.source and data.format; see docs/data.md."
    found = dict(preset.equivalent(_DATASETS, "dataset", name, {}, uses))
    if name.startswith("alpaca"):
        preset.remark(
            f"dataset: torchtune's {name} adds the Alpaca prompt ('Below is an instruction ...'). lean_ft uses the instruction and "
            "the input alone. docs/coming_from_torchtune.md has a data.format with the Alpaca prompt."
        )
    columns = dict(found.get("columns", {}))
    for key in [key for key in theirs if key.startswith("column_map.")]:
        ours = key.removeprefix("column_map.")
        columns[_INSTRUCT_COLUMNS.get(ours, ours) if name == "instruct_dataset" else ours] = theirs.pop(key)
    if theirs.pop("conversation_style", "sharegpt") == "openai":
        found["format"] = "messages"
    chat = "messages" if found.get("format") == "messages" else "conversations"
    for key, ours in (("column", "text"), ("conversation_column", chat)):
        columns |= {ours: theirs.pop(key)} if theirs.get(key) is not None else {}
    named = {"path": theirs.pop("source", None), "system": theirs.pop("new_system_prompt", None)}
    named |= {"path": files} if (files := theirs.pop("data_files", None)) else {}
    named |= {name: theirs.pop(name, None) for name in ("subset", "split", "packed", "train_on_input")}
    named |= {"subset": subset} if (subset := theirs.pop("name", None)) else {}
    splits = theirs.pop("split_across_pack", name == "text_completion_dataset")
    if named["packed"]:
        named["packed"] = "bfd_split" if splits else "bfd"
    if named["packed"] == "bfd_split":
        preset.remark(
            "dataset.packed: torchtune cuts each text at tokenizer.max_seq_len - 1 tokens before it packs them. data.packing=bfd_split "
            "keeps the rest, and bfd drops it."
        )
    if theirs.pop("add_eos", True) is False:
        preset.remark("dataset.add_eos: false has no equivalent. lean_ft ends every text with eos.")
    named["columns"] = {ours: yours for ours, yours in columns.items() if ours != yours} or None
    for key, value in theirs.items():
        if value:
            preset.remark(f"dataset.{key}: {value} has no equivalent.")
    return found | {key: value for key, value in named.items() if value is not None}


def _convert_steps(left: Values, preset: Preset) -> None:
    settings, schedule = preset.settings, _component(left, "lr_scheduler")
    name = re.sub(r"^torchao\.prototype\.low_bit_optim", "torchao.optim", left.pop("optimizer._component_", ""))
    settings |= preset.equivalent(_OPTIMIZERS, "optimizer", name, _DECAYED, "The preset uses adamw.")
    if name.endswith("PagedAdamW"):
        preset.remark("optimizer: the state stays on the device. optimizer.state=streamed keeps it in host memory.")
    schedules = {"": "constant", "get_cosine_schedule_with_warmup": "cosine"}
    uses = "The preset uses cosine."
    settings["schedule.name"] = preset.equivalent(schedules, "lr_scheduler", schedule, "cosine", uses)
    steps, epochs = left.pop("max_steps_per_epoch", None), left.get("epochs") or 1
    if steps is not None:
        settings["max_steps"] = steps * epochs
        if epochs > 1:
            preset.remark("max_steps_per_epoch: the preset limits the steps of the run, not of each epoch.")
    if left.pop("enable_activation_checkpointing", False):
        settings["memory.activation_checkpointing"] = "full"
    if left.pop("ac_mode", None) == "selective" and (every := int(left.pop("ac_option", 1))) > 1:
        settings |= {"memory.activation_checkpointing": "every_n", "memory.checkpoint_every_n": every}
    uses = "log.to supports csv, tensorboard, wandb and mlflow."
    logger = _component(left, "metric_logger")
    settings["log.to"] = preset.equivalent({"": []} | _LOGGERS, "metric_logger", logger, [], uses) or None
    if _component(left, "profiler") and left.get("profiler.enabled"):
        settings["profile_steps"] = [left.pop(f"profiler.{name}_steps", 1) for name in ("wait", "warmup", "active")]
    settings["device"] = "cpu" if left.get("device") == "cpu" else None
    settings["data.shuffle"] = False if left.pop("shuffle", True) is False else None
    if "seed" in left and left["seed"] is None:
        preset.remark("seed: null is a random seed in torchtune. The preset uses 0.")


def _convert_batches_of_prompts(left: Values, preset: Preset) -> None:
    """Convert GRPO's batches and lengths: torchtune counts prompts per batch, lean_ft counts completions."""
    settings = preset.settings
    prompts, of_a_pass = settings.pop("batch_size", 1), left.pop("forward_batch_size", None) or 1
    settings["batch_size"] = of_a_pass * settings.get("generation.num_answers", 8)
    settings["gradient_accumulation_steps"] = -(-prompts // of_a_pass)
    if "generation.top_k" in settings:
        settings["loss.correction"] = "token_truncate"
        preset.remark("top_k: torchtune's loss ignores it. The preset corrects the loss (loss.correction).")
    if (length := settings.pop("data.max_length", None)) is not None:
        lengths = "data.max_prompt_length and generation.max_new_tokens"
        preset.remark(f"tokenizer.max_seq_len: {length} has no equivalent. Set {lengths}.")


def _remark_on_the_rest(left: Values, preset: Preset) -> None:
    rest = {key: value for key, value in left.items() if value is not None and value is not False}
    needless = [key for key in rest if any(fnmatch(key, pattern) for pattern in _NEEDLESS.split())]
    if needless:
        preset.remark(f"not needed in lean_ft: {', '.join(needless)}")
    for key in [key for key in rest if key not in needless][:_MAX_REMARKS]:
        preset.remark(f"{key}: {to_yaml(rest[key], flow=True)} has no equivalent.")
