"""Conversion of configurations of torchtune, axolotl and LLaMA-Factory: by the table, and with a remark on every other
key."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lean_ft.settings.converted_config import Preset, convert_config, flat
from lean_ft.settings.text import load_config
from tests.settings.cases import load_recipe

# Keys of axolotl's examples: LoRA of a small model, and what most of them set.
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}]
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, q_proj]
wandb_project:
wandb_name:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
loss_watchdog_threshold: 5.0
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens: {pad_token: <|end_of_text|>}
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: chats
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 1800
resume_from_checkpoint: null
"""
DATASET_INFO = {
    "chats": {
        "file_name": "a.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "alpaca": {"hf_hub_url": "org/alpaca", "subset": "en", "columns": {"prompt": "q", "query": "input", "system": "s"}},
    "pairs": {"file_name": "p.jsonl", "ranking": True, "formatting": "sharegpt", "columns": {"chosen": "good"}},
    "good_or_bad": {"file_name": "k.jsonl", "columns": {"kto_tag": "liked", "prompt": "q"}},
    "texts": {"file_name": "t.jsonl", "columns": {"prompt": "text"}, "script_url": "x"},
}
# Keys that all torchtune configurations have, from llama3_2/1B_full_single_device.yaml.
TORCHTUNE = """
output_dir: runs/here
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /tmp/Llama-3.2-1B-Instruct/tokenizer.model, max_seq_len: 512}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: True}
seed: 3
shuffle: True
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/Llama-3.2-1B-Instruct/
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3_2
resume_from_checkpoint: False
batch_size: 4
epochs: 2
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
max_steps_per_epoch: null
gradient_accumulation_steps: 1
optimizer_in_bwd: True
compile: True
device: cuda
enable_activation_checkpointing: True
enable_activation_offloading: True
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}/logs"}
log_every_n_steps: 1
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False, output_dir: x, wait_steps: 5}
"""  # noqa: E501
LORA = """
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 64
  lora_dropout: 0.1
  use_dora: True
"""
BASES = {"axolotl": AXOLOTL, "factory": FACTORY, "torchtune": TORCHTUNE}
WHOLE: dict[str, dict[str, Any]] = {  # configuration -> its preset by dotted key
    "axolotl": {
        "recipe": "finetune",
        "model.path": "NousResearch/Llama-3.2-1B",
        "lora.dropout": 0.05,
        "lora.targets": ["gate_proj", "q_proj"],
        "data.source": "teknium/GPT4-LLM-Cleaned",
        "data.packing": "bfd",
        "data.overflow": "drop",
        "data.validation_fraction": 0.1,
        "output_dir": "./outputs/lora-out",
        "gradient_accumulation_steps": 2,
        "optimizer.name": "adamw_8bit",
        "optimizer.lr": 0.0002,
        "schedule.warmup_ratio": 0.1,
        "memory.activation_checkpointing": "full",
        "eval_every": 0.25,
        "save_every": "epoch",
        "clip_grad_norm": 1,
    },
    "factory": {
        "recipe": "finetune",
        "model.path": "Qwen/Qwen3-4B-Instruct-2507",
        "lora.rank": 8,
        "lora.alpha": 16,
        "data.source": "FOLDER/a.json",
        "data.split": "train[:1000]",
        "data.num_processes": 16,
        "output_dir": "saves/sft",
        "log_every": 10,
        "save_every": 500,
        "batch_size": 1,
        "gradient_accumulation_steps": 8,
        "optimizer.lr": 1e-4,
        "epochs": 3,
        "schedule.warmup_ratio": 0.1,
        "memory.activation_checkpointing": "full",
        "clip_grad_norm": 1,
    },
    "torchtune": {
        "recipe": "finetune",
        "output_dir": "runs/here",
        "model.path": "/tmp/Llama-3.2-1B-Instruct/",
        "data.source": "yahma/alpaca-cleaned",
        "data.format": "alpaca",
        "data.train_on": "all",
        "data.packing": "bfd",
        "data.max_length": 512,
        "optimizer.name": "paged_adamw_8bit",
        "optimizer.lr": 2e-5,
        "optimizer.weight_decay": 0.01,
        "optimizer.in_backward": True,
        "schedule.name": "constant",
        "memory.activation_checkpointing": "full",
        "memory.activation_offload": True,
        "batch_size": 4,
        "epochs": 2,
        "seed": 3,
        "compile": True,
    },
}
# What differs from a base -> how the preset differs by dotted key (None: absent), and remarks.
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "axolotl",
        "a: null",
        {},
        "defaults of axolotl: max_grad_norm=1.0, excess_length_strategy=drop|loss_watchdog_threshold: not supported: "
        "max_bad|not needed in lean_ft: eval_sample_packing, special_tokens.pad_token, attn_impl|type: alpaca "
        "(data.format=alpaca)",
    ),
    (
        "axolotl",
        "adapter: qlora\ndatasets: [{path: a/b, split: s, type: chat_template, field_messages: talk, train_on_eos: "
        "last}]\nadam_beta2: 0.95\noptimizer: paged_adamw_32bit\nwandb_project: mine\nsequence_len: null\ndeepspeed: "
        "z.json",
        {
            "lora.quantize": "nf4",
            "data.source": "a/b",
            "data.split": "s",
            "optimizer.betas": [0.9, 0.95],
            "optimizer.name": None,
            "log.to": ["wandb"],
            "log.project": "mine",
            "data.max_length": 512,
        },
        "optimizer.state=streamed keeps|datasets: a/b: not converted: type: chat_template (data.format=messages), "
        "field_messages: talk (data.columns.messages=talk), train_on_eos: last (not supported: |deepspeed: not "
        "supported",
    ),
    (
        "axolotl",
        "adapter: null\ndatasets: [{path: json, data_files: [a.jsonl, b.jsonl], name: en}]\ntest_datasets: [{path: "
        "held.jsonl}]\nval_set_size: 0\nmy_key: {a: [1]}",
        {
            "lora.dropout": None,
            "lora.targets": None,
            "data.source": [{"path": "a.jsonl", "subset": "en"}, {"path": "b.jsonl", "subset": "en"}],
            "data.validation_source": ["held.jsonl"],
            "data.validation_fraction": None,
        },
        "my_key.a: [1] has no equivalent",
    ),
    ("axolotl", "rl: dpo\nrl_beta: 0.2", {"recipe": "dpo", "loss.beta": 0.2}, ""),
    ("axolotl", "rl: orpo\norpo_alpha: 0.3", {"recipe": "dpo", "loss.name": "orpo", "loss.beta": 0.3}, ""),
    ("axolotl", "reward_model: true", {"recipe": "reward"}, ""),
    (
        "axolotl",
        "rl: grpo\ntrl: {reward_funcs: [r.py:a], num_generations: 4, beta: 0.01}",
        {
            "recipe": "grpo",
            "rewards": ["r.py:a"],
            "generation.num_answers": 4,
            "batch_size": 2,
            "loss.kl_weight": 0.01,
            "data.max_prompt_length": 2048,
            "data.packing": None,
            "data.overflow": None,
            "schedule.name": "cosine",
        },
        "sample_packing: true has no equivalent in the recipe grpo",
    ),
    # several keys for one setting
    ("axolotl", "lora_target_linear: true", {"lora.targets": ["gate_proj", "q_proj", "all-linear"]}, "also beside"),
    (
        "axolotl",
        "lora_target_modules: 'layers.(q|k)_proj'",
        {"lora.targets": None},
        "lora_target_modules: not supported",
    ),
    (
        "axolotl",
        "tokens: [<a>]\nspecial_tokens: {additional_special_tokens: [<b>]}",
        {"model.new_tokens": ["<b>", "<a>"]},
        "",
    ),
    ("axolotl", "use_wandb: true\nuse_tensorboard: true", {"log.to": ["tensorboard", "wandb"]}, ""),
    (
        "axolotl",
        "max_packed_sequence_len: 4096",
        {},
        "max_packed_sequence_len and sequence_len both set data.",
    ),
    ("axolotl", "fp16: true", {"model.dtype": "float16"}, ""),
    ("axolotl", "bf16: false", {"model.dtype": "float32"}, "axolotl's dtype without bf16 and fp16"),
    ("axolotl", "warmup_ratio: null", {"schedule.warmup_ratio": 0.03}, "warmup_ratio=0.03"),
    ("axolotl", "warmup_ratio: null\nwarmup_steps: 9", {"schedule.warmup_ratio": None, "schedule.warmup_steps": 9}, ""),
    (
        "axolotl",
        "warmup_ratio: null\nwarmup_steps: 0.2",
        {"schedule.warmup_ratio": 0.2, "schedule.warmup_steps": None},
        "",
    ),
    # values that mean something else here
    (
        "axolotl",
        "evals_per_epoch: null\neval_steps: 0.1",
        {"eval_every": None},
        "eval_steps: not supported: a share of the run",
    ),
    ("axolotl", "saves_per_epoch: null\nsave_steps: 50.0", {"save_every": 50}, ""),
    ("axolotl", "batch_size: 12", {}, "batch_size: not supported: set gradient_accumulation_steps"),
    (
        "axolotl",
        "chat_template: tokenizer_default",
        {"data.chat_template": None},
        ", chat_template",
    ),
    ("axolotl", "chat_template: llama3", {"data.chat_template": None}, "not supported: the model's own template"),
    (
        "axolotl",
        "chat_template_jinja: t.jinja\nchat_template: jinja",
        {"data.chat_template": "t.jinja"},
        "a Jinja file",
    ),
    ("axolotl", "chat_template_jinja: '{{ x }}'", {"data.chat_template": None}, "save the template as a file"),
    (
        "axolotl",
        "val_set_size: 100",
        {"data.validation_fraction": None},
        "val_set_size is not converted: data.validation_fraction",
    ),
    (
        "axolotl",
        "learning_rate: fast",
        {"optimizer.lr": None},
        "learning_rate is not converted: optimizer.lr: expected number",
    ),
    (
        "axolotl",
        "overrides_of_model_config: {rope_scaling: {factor: 4.0}}",
        {},
        "overrides_of_model_config.rope_scaling.factor: not",
    ),
    ("axolotl", "revision_of_model: abc", {}, "revision_of_model: not supported: write model.path=org/name@revision"),
    ("axolotl", "plugins: [axolotl.integrations.liger.LigerPlugin]", {}, "plugins: not supported"),
    (
        "factory",
        "lora_rank: null\nlearning_rate: null",
        {"optimizer.lr": 5e-5},
        "defaults of LLaMA-Factory: lora_rank=8, learning_rate=5.0e-05, max_grad_norm=1.0|template: not supported: "
        "the model's own|trust_remote_code, dataset_dir, plot_loss|a.json: not converted: formatting: sharegpt, "
        "columns.messages: talk",
    ),
    (
        "factory",
        "finetuning_type: full\ndataset: alpaca, unknown\neval_dataset: chats\nmax_samples: null\nneat_packing: "
        "true\npacking: true",
        {
            "lora.rank": None,
            "lora.alpha": None,
            "data.split": None,
            "data.source": [{"path": "org/alpaca", "subset": "en"}, "unknown"],
            "data.validation_source": ["FOLDER/a.json"],
            "data.packing": "bfd",
        },
        "packing and neat_packing both set data.packing",
    ),
    ("factory", "lora_rank: 16", {"lora.rank": None, "lora.alpha": None}, ""),  # our defaults
    ("factory", "lora_target: 'q_proj, v_proj'", {"lora.targets": ["q_proj", "v_proj"]}, ""),
    ("factory", "add_tokens: '<a>, <b>'\nadd_special_tokens: <c>", {"model.new_tokens": ["<a>", "<b>", "<c>"]}, ""),
    (
        "factory",
        "stage: dpo\npref_beta: 0.3\npref_loss: simpo\nsimpo_gamma: 0.5",
        {"recipe": "dpo", "loss.name": "simpo", "loss.beta": 0.3, "loss.gamma": 0.5},
        "",
    ),
    ("factory", "stage: kto", {"recipe": "kto"}, "kto refuses this preset: batch_size=1: kto needs another"),
    ("factory", "stage: pt", {"data.format": "text", "data.packing": "wrapped"}, ""),
    (
        "factory",
        "stage: ppo\nreward_model: saves/r",
        {
            "recipe": "ppo",
            "rewards": [{"model": "saves/r"}],
            "value.path": "saves/r",
            "data.max_prompt_length": 2048,
            "data.num_processes": None,
            "schedule.name": "cosine",
        },
        "preprocessing_num_workers: 16 has no equivalent in the recipe ppo",
    ),
    (
        "factory",
        "eval_strategy: epoch\neval_steps: 10",
        {"eval_every": "epoch"},
        "eval_steps and eval_strategy both set",
    ),
    ("factory", "mask_history: true\ntrain_on_prompt: false", {"data.train_on": "last"}, ""),
    ("factory", "freeze_vision_tower: false", {"model.images": "train"}, "the projector trains too, unless"),
    ("factory", "adam_beta1: 0.0", {"optimizer.betas": [0.0, 0.999]}, ""),
    ("torchtune", "a: null", {}, "Alpaca prompt|not needed in lean_ft: |micro-batches of all processes"),
    (
        "torchtune",
        LORA,
        {
            "lora.targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "lora.rank": 8,
            "lora.alpha": 64,
            "lora.dropout": 0.1,
            "lora.dora": True,
        },
        "",
    ),
    ("torchtune", "model: {_component_: torchtune.models.llama3_2.qlora_llama3_2_1b}", {"lora.quantize": "nf4"}, ""),
    (
        "torchtune",
        "optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 3e-4, weight_decay: 0.05}\nlr_scheduler: "
        "{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 9}",
        {
            "optimizer.name": None,
            "optimizer.lr": 3e-4,
            "optimizer.weight_decay": 0.05,
            "schedule.name": None,
            "schedule.warmup_steps": 9,
        },
        "",
    ),
    (
        "torchtune",
        "loss: {_component_: torchtune.rlhf.loss.RSOLoss, gamma: 0.2}\nref_checkpointer: {checkpoint_dir: /tmp/other}\n"
        "dataset: {_component_: torchtune.datasets.preference_dataset, source: json, data_files: mine.json, "
        "column_map: {chosen: better}}",
        {
            "recipe": "dpo",
            "loss.name": "hinge",
            "loss.beta": 0.2,
            "data.source": "mine.json",
            "data.format": "preference",
            "data.train_on": None,
            "data.packing": None,
        },
        "ref_checkpointer.checkpoint_dir: not supported: the reference is the model|dataset.column_map.chosen: better "
        "has no equivalent",
    ),
    (
        "torchtune",
        "teacher_checkpointer: {checkpoint_dir: t}\nkd_loss: {_component_: torchtune.modules.loss.ReverseKLLoss}",
        {
            "recipe": "distill",
            "distill.teacher": "t",
            "distill.divergence": "reverse_kl",
            "distill.cross_entropy_weight": 0.5,
        },
        "",
    ),
    (
        "torchtune",
        "loss: {_component_: torchtune.dev.grpo.loss.GRPOSimpleLoss, epsilon: 0.1}\ngrpo_samples: 16\ntop_k: 50",
        {
            "recipe": "grpo",
            "loss.name": "grpo",
            "loss.kl": "k3",
            "loss.epsilon": 0.1,
            "generation.num_answers": 16,
            "generation.top_k": 50,
            "data.source": None,
            "data.format": None,
            "data.train_on": None,
            "data.packing": None,
            "data.max_length": None,
            "schedule.name": None,
        },
        "batch_size counts prompts|rewards is required",
    ),
    (
        "torchtune",
        "quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer}",
        {"quantize.train": "int8_dynamic_int4_weight", "quantize.group_size": 256},
        "",
    ),
    (
        "torchtune",
        "dataset:\n- {_component_: torchtune.datasets.instruct_dataset, source: a/b, split: 'train[:9%]'}\n- {source: "
        "c/d}",
        {
            "data.source": [{"path": "a/b", "split": "train[:9%]"}, "c/d"],
            "data.format": None,
            "data.train_on": None,
            "data.packing": None,
        },
        "dataset: a/b: not converted: _component_: torchtune.datasets.instruct_dataset",
    ),
    (
        "torchtune",
        "dataset: {_component_: torchtune.datasets.alpaca_dataset}\nseed: null\nmax_steps_per_epoch: 9\noutput_dir: "
        "${nowhere}/x\ncheckpointer: {checkpoint_dir: '${base}/m'}\nbase: b",
        {
            "data.source": "tatsu-lab/alpaca",
            "data.packing": None,
            "model.path": "b/m",
            "seed": None,
            "output_dir": "${nowhere}/x",
        },
        "seed: not supported: a run has a fixed seed|max_steps_per_epoch: not supported",
    ),
    (
        "torchtune",
        "optimizer: {_component_: torch.optim.Rprop, lr: 1.0, etas: [0.5, 1.2]}\nloss: {_component_: mine.Loss}\n"
        "metric_logger: {_component_: x.CometLogger}\ndataset: {_component_: mine.data}\nbatch_size: abc",
        {
            "optimizer.name": None,
            "optimizer.lr": 1,
            "optimizer.weight_decay": None,
            "data.source": None,
            "data.format": None,
            "data.train_on": None,
            "data.packing": None,
            "batch_size": None,
        },
        "optimizer._component_ is not converted|optimizer.etas: [0.5, 1.2] has|loss._component_: mine.Loss has no "
        "equivalent in|metric_logger._component_: not supported|dataset._component_ is not converted|batch_size is "
        "not converted: batch_size: expected whole|data.source is required",
    ),
]


def converted(tool: str, changes: str, folder: Path) -> tuple[Preset, dict[str, Any], dict[str, Any]]:
    """Convert a base with changes. Return the preset, its text's settings by dotted key, and the configuration's."""
    theirs = yaml.safe_load(BASES[tool]) | (yaml.safe_load(changes) or {})
    theirs |= {"dataset_dir": str(folder)} if tool == "factory" else {}
    (folder / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    (folder / "theirs.yaml").write_text(yaml.safe_dump(theirs, sort_keys=False))
    preset = convert_config(folder / "theirs.yaml")
    text = preset.text("theirs.yaml")
    assert [line for line in text.splitlines() if line.startswith("#")][1:] == [f"# {one}" for one in preset.remarks]
    return preset, flat(yaml.safe_load(text)), flat(theirs)


@pytest.mark.first(30)
@pytest.mark.parametrize(("tool", "changes", "differences", "said"), CASES, ids=[f"{c[0]}: {c[1][:50]}" for c in CASES])
def test_a_configuration_becomes_a_preset_and_no_key_is_swallowed(tool, changes, differences, said, tmp_path):
    preset, written, theirs = converted(tool, changes, tmp_path)
    expected = {key: value for key, value in (WHOLE[tool] | differences).items() if value is not None}
    assert written == json.loads(json.dumps(expected).replace("FOLDER", str(tmp_path)))
    remarks = "\n".join(preset.remarks)
    for part in filter(None, said.split("|")):
        assert part in remarks
    for key, value in theirs.items():  # each key is converted, or a remark names it or its group
        named = key in preset.converted or key in remarks or key.partition(".")[0] in remarks
        assert value in (None, False) or named or key == "base", key
    if " refuses this preset" not in remarks and " is required" not in remarks:
        (tmp_path / "ours.yaml").write_text(preset.text("theirs.yaml"))
        load_config(load_recipe(preset.recipe).Config, tmp_path / "ours.yaml")


def test_a_key_that_is_not_known_is_told_in_every_group(tmp_path):
    for group, inside in yaml.safe_load(TORCHTUNE).items():
        if isinstance(inside, dict):
            preset, _, _ = converted("torchtune", yaml.safe_dump({group: inside | {"surprise": 7}}), tmp_path)
            assert f"{group}.surprise" in "\n".join(preset.remarks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base_model: x\nrl: ebft", "theirs.yaml: rl: ebft is not supported: use the recipe grpo."),
        ("base_model: x\ndatasets: 5", r"theirs.yaml: datasets is \[5\]; expected a list of data sets"),
        ("model_name_or_path: x\nstage: other", "theirs.yaml: stage: other is not supported: the recipes are finetune"),
        ("model_name_or_path: x\ndataset: [1]", r"theirs.yaml: dataset is \[1\]; expected names separated by commas"),
        ("model_name_or_path: x\nfinetuning_type: oft", "theirs.yaml: finetuning_type: oft is not supported"),
        (
            "optimizer: {}\ncheckpointer: {}\ndataset: {}\nmodel: {_component_: "
            "torchtune.models.x.llama3_2_vision_11b}",
            "model._component_: .* is not supported: lean_ft trains torchtune's language models only",
        ),
        ("model: {_component_: x}\ntasks: [truthfulqa_mc2]", "PPO of torchtune is not supported"),
        ("a: 1", "is not a training configuration of torchtune .*, axolotl .* or LLaMA-Factory"),
    ],
)
def test_what_is_not_converted_is_refused(text, said, tmp_path):
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        convert_config(tmp_path / "theirs.yaml")


LINES = ["\n", "\r", "\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\0", "\ud7ff", "\ufeff"]


@pytest.mark.first(3)
@pytest.mark.parametrize("line", LINES)
def test_a_strangers_text_adds_no_setting(line, tmp_path):
    """Wherever the text stands: as a key, a value, a component, a path or the name of the file."""
    bad = f"zzz{line}neftune_alpha: 99{line}#"
    theirs = yaml.safe_load(TORCHTUNE) | {bad: 5, "my_key": bad, "metric_logger": {"_component_": bad}}
    theirs["dataset"] |= {bad: 1, "more": bad}
    theirs["optimizer"]["_component_"] = theirs["checkpointer"]["checkpoint_dir"] = bad
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    text = convert_config(tmp_path / "theirs.yaml").text(f"theirs{line}seed: 9.yaml")
    assert text.startswith("# From torchtune's theirs")
    assert flat(yaml.safe_load(text)).keys() <= WHOLE["torchtune"].keys() and yaml.safe_load(text)["seed"] == 3
    comments = [one for one in text.splitlines() if one.startswith("#")]
    assert sum("neftune_alpha" in one for one in comments) > 3


@pytest.mark.long
def test_a_large_configuration_is_fast(tmp_path):
    theirs = yaml.safe_load(TORCHTUNE) | {f"k{i}": "${k0}" * 3 + "${" + f"k{i + 1}" + "}" for i in range(6000)}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    started = time.process_time()
    assert len(convert_config(tmp_path / "theirs.yaml").text("x")) < 300_000
    assert time.process_time() - started < 20
