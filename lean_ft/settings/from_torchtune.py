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
_COLUMNS = {"input": "prompt", "output": "completion"}  # of instruct_dataset; other datasets use lean_ft's names
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


@dataclass
class Preset:
    """A converted configuration: a recipe, its settings, and remarks on the other keys."""

    recipe: str = "finetune"
    settings: Values = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

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
        return "".join(f"# {line}\n" for line in (f"From torchtune's {source}.", *self.remarks)) + to_yaml(nested)


def convert_config(file: Path) -> Preset:
    """Convert a torchtune training configuration: full, LoRA and QLoRA fine-tuning, QAT, DPO, distillation or GRPO.

    Raise ValueError for other files, and for images and PPO, which cannot be converted.
    """
    read, _ = read_yaml_file(file)
    if not isinstance(read, dict) or not {"optimizer", "checkpointer", "model", "dataset"} <= read.keys():
        expected = (
            "expected a configuration of torchtune's that trains, with model, checkpointer, dataset and optimizer"
        )
        raise ValueError(
            f"{file}: {expected}. Images and PPO are not converted; `leanft ls` lists recipes. docs/coming_from_others.md has our "
            "names for the settings of axolotl, unsloth and LLaMA-Factory, docs/coming_from_trl.md for TRL's."
        )
    left = _flat(read)
    for key, value in left.items():
        while isinstance(value, str) and (name := re.search(r"\$\{([\w.]+)\}", value)) and name[1] in left:
            value = value.replace(name[0], str(left[name[1]]))
        left[key] = value
    if re.search("vision|multimodal", f"{left['model._component_']} {left.get('dataset._component_')}"):
        raise ValueError(f"{file}: it trains a model on images, and here language models are trained.")
    preset = Preset()
    told = preset.settings
    _convert_objective(left, preset)
    _convert_model(left, preset)
    _convert_data(left, preset)
    _convert_steps(left, preset)
    if "nproc_per_node" in file.read_text(encoding="utf-8"):
        preset.remarks.append(
            "gradient_accumulation_steps: theirs is each process's; on N processes set N times as many"
        )
    told |= {_RENAMED[key]: left.pop(key) for key in list(left) if key in _RENAMED and left[key] is not None}
    if preset.recipe == "grpo":  # torchtune's batches count prompts, lean_ft's count completions
        prompts, of_a_pass = told.pop("batch_size", 1), left.pop("forward_batch_size", None) or 1
        told["batch_size"] = of_a_pass * told.get("generation.num_answers", 8)
        told["gradient_accumulation_steps"] = -(-prompts // of_a_pass)
        if "generation.top_k" in told:
            told["loss.correction"] = "token_truncate"
            preset.remarks.append("top_k: theirs is not corrected for in the loss; loss.correction does it here")
        if (length := told.pop("data.max_length", None)) is not None:
            preset.remarks.append(
                f"tokenizer.max_seq_len: {length} is of data.max_prompt_length and the answer together"
            )
    _tell_what_is_left(left, preset)
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
    name, taught = _component(left, "loss"), _component(left, "kd_loss")
    if (name := taught or name) not in _LOSSES:
        preset.remarks.append(f"loss: there is no {name} here; finetune's cross-entropy stands for it")
    preset.recipe, settings = _LOSSES.get(name, ("finetune", {}))
    preset.settings |= settings
    if preset.recipe == "distill":
        preset.settings["distill.cross_entropy_weight"] = round(1 - left.pop("kd_ratio", 0.5), 6)
    if preset.recipe == "grpo":
        preset.settings["rewards"] = [{"function": "exact_answer", "pattern": r"(?:#### |<answer>)([^<\n]*)"}]
        preset.remarks.append("rewards: theirs come with a prompt that asks for tags; exact_answer stands for them")


def _convert_model(left: Values, preset: Preset) -> None:
    told, builder = preset.settings, _component(left, "model")

    def folder_of(key: str, builder: str) -> str:
        """Return the folder if it exists, otherwise the Hub repository by its name or by the builder's preset."""
        folder = str(left.pop(f"{key}.checkpoint_dir", None) or "").rstrip("/")
        name, shipped = Path(folder).name, catalog.presets().get(f"{re.sub('^q?lora_', '', builder)}/full")
        owner = next((owner for start, owner in _OWNERS.items() if name.startswith(start)), None)
        hub = f"{owner}/{name}" if owner else preset_values(shipped)["model.path"] if shipped and not folder else None
        if hub is None or (Path(folder) / "config.json").is_file():
            return folder
        preset.remarks.append(
            f"{key}.checkpoint_dir: {folder or 'nothing'} is not here; {hub} of the hub stands for it"
        )
        return hub

    reference = left.pop("ref_checkpointer.checkpoint_dir", None)
    if reference not in (None, left.get("checkpointer.checkpoint_dir")):
        preset.remarks.append(f"ref_checkpointer: the reference is what training begins with, and not {reference}")
    told["model.path"] = folder_of("checkpointer", builder)
    if preset.recipe == "distill":
        told["distill.teacher"] = folder_of("teacher_checkpointer", _component(left, "teacher_model"))
    told["model.dtype"] = _DTYPES.get(dtype := left.pop("dtype", "bf16"), dtype)
    targets = ["o_proj" if name == "output_proj" else name for name in left.pop("model.lora_attn_modules", [])]
    targets += ["gate_proj", "up_proj", "down_proj"] if left.pop("model.apply_lora_to_mlp", False) else []
    targets += ["lm_head"] if left.pop("model.apply_lora_to_output", False) else []
    if targets:
        quantized = left.pop("model.quantize_base", False) or builder.startswith("qlora")
        told |= {"lora.targets": targets, "lora.quantize": "nf4" if quantized else "none"}
    quantizer, group_size = _component(left, "quantizer"), left.pop("quantizer.groupsize", 256)
    if quantizer == "Int8DynActInt4WeightQATQuantizer" and not targets:
        told |= {"quantize.train": "int8_dynamic_int4_weight", "quantize.group_size": group_size}
    elif quantizer:
        preset.remarks.append(f"quantizer: {quantizer} is not done here{' beside an adapter' if targets else ''}")


def _convert_data(left: Values, preset: Preset) -> None:
    told, recipe = preset.settings, preset.recipe

    def below(group: str) -> Values:
        return {key.removeprefix(f"{group}."): left.pop(key) for key in list(left) if key.startswith(f"{group}.")}

    sources = [_source(dict(one), preset) for one in left.pop("dataset", None) or [below("dataset")]]
    beside = [{name: source.pop(name, None) for name in ("train_on_input", "packed", "system")} for source in sources]
    for name, value in beside[0].items():
        if any(other[name] != value for other in beside):
            preset.remarks.append(f"dataset: {name} differs between data sets; the first's is taken")
    if recipe in ("finetune", "distill"):
        of_format = "completion" if sources[0].get("format") == "prompt_completion" else "assistant"
        told["data.train_on"] = "all" if beside[0]["train_on_input"] else of_format
    told |= {"data.packing": "bfd" if beside[0]["packed"] else None, "data.system": beside[0]["system"]}
    told["data.source"] = sources if len(sources) > 1 else sources[0].pop("path", "")
    told |= {f"data.{name}": value for name, value in sources[0].items()} if len(sources) == 1 else {}
    if held_out := below("dataset_val"):
        source = _source(held_out, preset)
        told["data.validation_source"] = [{k: v for k, v in source.items() if k not in beside[0]}]
    if left.get("tokenizer.max_seq_len") is None and recipe != "grpo":
        preset.remarks.append("tokenizer.max_seq_len: null is no limit there; here it is data.max_length, 2048 tokens")


def _source(theirs: Values, preset: Preset) -> Values:
    """Convert a dataset into an entry of data.source, with the extra keys `train_on_input`, `packed` and `system`."""
    name = _component({"dataset._component_": theirs.pop("_component_", "")}, "dataset")
    if name not in _DATASETS:
        preset.remarks.append(f"dataset: there is no {name} here; give data.source and data.format, see docs/data.md")
    if name.startswith("alpaca"):
        preset.remarks.append(
            f"dataset: {name} writes rows into the Alpaca prompt ('Below is an instruction ...'); here the prompt is the instruction "
            "and the input alone. docs/coming_from_torchtune.md has a data.format that does the same"
        )
    found = dict(_DATASETS.get(name, {}))
    columns = dict(found.get("columns", {}))
    for key in [key for key in theirs if key.startswith("column_map.")]:
        ours = key.removeprefix("column_map.")
        columns[_COLUMNS.get(ours, ours) if name == "instruct_dataset" else ours] = theirs.pop(key)
    if theirs.pop("conversation_style", "sharegpt") == "openai":
        found["format"] = "messages"
    chat = "messages" if found.get("format") == "messages" else "conversations"
    for key, ours in (("column", "text"), ("conversation_column", chat)):
        columns |= {ours: theirs.pop(key)} if theirs.get(key) is not None else {}
    named = {"path": theirs.pop("source", None), "system": theirs.pop("new_system_prompt", None)}
    named |= {"path": files} if (files := theirs.pop("data_files", None)) else {}
    named |= {name: theirs.pop(name, None) for name in ("subset", "split", "packed", "train_on_input")}
    named |= {"subset": subset} if (subset := theirs.pop("name", None)) else {}
    named["columns"] = {ours: yours for ours, yours in columns.items() if ours != yours} or None
    preset.remarks += [f"dataset.{key}: {value} has no equivalent" for key, value in theirs.items() if value]
    return found | {key: value for key, value in named.items() if value is not None}


def _convert_steps(left: Values, preset: Preset) -> None:
    told, name, schedule = preset.settings, left.pop("optimizer._component_", ""), _component(left, "lr_scheduler")
    name = re.sub(r"^torchao\.prototype\.low_bit_optim", "torchao.optim", name)
    if name not in _OPTIMIZERS:
        preset.remarks.append(f"optimizer: there is no {name} here; adamw stands for it")
    if name.endswith("PagedAdamW"):
        preset.remarks.append(
            "optimizer: its state stays on the device; optimizer.state=streamed keeps it in host memory"
        )
    told |= _OPTIMIZERS.get(name, _DECAYED) | {"schedule.name": "cosine" if schedule else "constant"}
    if schedule not in ("", "get_cosine_schedule_with_warmup"):
        preset.remarks.append(f"lr_scheduler: there is no {schedule} here; cosine stands for it")
    steps, epochs = left.pop("max_steps_per_epoch", None), left.get("epochs") or 1
    if steps is not None:
        told["max_steps"] = steps * epochs
        preset.remarks += ["max_steps_per_epoch: here an epoch is never cut short, but the run"] if epochs > 1 else []
    if left.pop("enable_activation_checkpointing", False):
        told["memory.activation_checkpointing"] = "full"
    if left.pop("ac_mode", None) == "selective" and (every := int(left.pop("ac_option", 1))) > 1:
        told |= {"memory.activation_checkpointing": "every_n", "memory.checkpoint_every_n": every}
    logger = _component(left, "metric_logger")
    told["log.to"] = _LOGGERS.get(logger) or None
    if logger not in ("", *_LOGGERS):
        preset.remarks.append(
            f"metric_logger: there is no {logger} here; log.to has tensorboard, wandb, mlflow and csv"
        )
    if _component(left, "profiler") and left.get("profiler.enabled"):
        told["profile_steps"] = [left.pop(f"profiler.{name}_steps", 1) for name in ("wait", "warmup", "active")]
    told["device"] = "cpu" if left.get("device") == "cpu" else None


def _tell_what_is_left(left: Values, preset: Preset) -> None:
    if left.pop("shuffle", True) is False:
        preset.settings["data.shuffle"] = False
    if "seed" in left and left["seed"] is None:
        preset.remarks.append("seed: null is a random one there, and 0 here")
    told = {key: value for key, value in left.items() if value is not None and value is not False}
    needless = [key for key in told if any(fnmatch(key, pattern) for pattern in _NEEDLESS.split())]
    preset.remarks += [
        f"{key}: {to_yaml(told[key], flow=True)} has no equivalent" for key in told if key not in needless
    ]
    preset.remarks += [f"needless here: {', '.join(needless)}"] if needless else []
