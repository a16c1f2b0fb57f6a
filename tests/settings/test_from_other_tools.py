"""Conversion of axolotl's and LLaMA-Factory's configurations into presets that the recipes accept."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lean_ft.settings.converted_preset import flat
from lean_ft.settings.from_other_tools import convert_config
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
LORA_OF_AXOLOTL = {
    "recipe": "finetune",
    "model": {"path": "NousResearch/Llama-3.2-1B"},
    "lora": {"dropout": 0.05, "targets": ["gate_proj", "q_proj"]},
    "data": {"source": "teknium/GPT4-LLM-Cleaned", "format": "alpaca", "packing": "bfd", "overflow": "drop"}
    | {"validation_fraction": 0.1},
    "output_dir": "./outputs/lora-out",
    "gradient_accumulation_steps": 2,
    "optimizer": {"name": "adamw_8bit", "lr": 0.0002},
    "schedule": {"warmup_ratio": 0.1},
    "memory": {"activation_checkpointing": "full"},
    "eval_every": 0.25,
    "save_every": "epoch",
    "clip_grad_norm": 1.0,
}
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
LORA_OF_FACTORY = {
    "recipe": "finetune",
    "model": {"path": "Qwen/Qwen3-4B-Instruct-2507"},
    "lora": {"rank": 8, "alpha": 16},
    "data": {"source": "FOLDER/a.json", "format": "messages", "columns": {"messages": "talk"}, "split": "train[:1000]"}
    | {"num_processes": 16},
    "output_dir": "saves/sft",
    "log_every": 10,
    "save_every": 500,
    "batch_size": 1,
    "gradient_accumulation_steps": 8,
    "optimizer": {"lr": 1e-4},
    "epochs": 3.0,
    "schedule": {"warmup_ratio": 0.1},
    "memory": {"activation_checkpointing": "full"},
    "clip_grad_norm": 1.0,
}
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
SHAREGPT = (
    "{path: a/b, type: chat_template, field_messages: talk, message_property_mappings: {role: from, content: value}}"
)
ADAPTER_OFF = {"lora": None}

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {  # tool, what differs, how the preset differs, remarks
    "axolotl": (
        "axolotl",
        "",
        {},
        "defaults of axolotl: max_grad_norm=1.0, excess_length_strategy=drop|loss_watchdog_threshold: not supported: max_bad|"
        "not needed in lean_ft: eval_sample_packing, attn_implementation",
    ),
    "qlora, chats, tuned optimizer": (
        "axolotl",
        f"adapter: qlora\nload_in_4bit: true\ndatasets: [{SHAREGPT}]\nchat_template: chatml\nadam_beta2: 0.95\n"
        "optimizer: paged_adamw_32bit\nwandb_project: mine\nwandb_mode: offline\nsequence_len: null\nnum_epochs: 3\n"
        "warmup_ratio: null\nwarmup_steps: 10\nlora_target_linear: true\nlora_target_modules: null\ndeepspeed: zero3.json",
        {
            "lora.quantize": "nf4",
            "lora.targets": None,
            "data.source": "a/b",
            "data.format": "sharegpt",
            "data.columns": {"conversations": "talk"},
            "data.max_length": 512,
            "optimizer": {"lr": 0.0002, "betas": [0.9, 0.95]},
            "log": {"to": ["wandb"], "project": "mine", "offline": True},
            "epochs": 3,
            "schedule": {"warmup_steps": 10},
        },
        "optimizer.state=streamed keeps|chat_template: not supported: the model's own template|axolotl counts per process",
    ),
    "all parameters, texts": (
        "axolotl",
        "adapter: null\ndatasets: [{path: json, data_files: [a.jsonl, b.jsonl], type: completion, field: story}]\n"
        "test_datasets: [{path: held.jsonl, type: completion}]\nval_set_size: 0\nmax_steps: 7\nmy_key: {a: [1]}",
        {
            "lora": None,
            "data.source": [
                {"path": x, "format": "text", "columns": {"text": "story"}} for x in ("a.jsonl", "b.jsonl")
            ],
            "data.format": None,
            "data.packing": "bfd_split",
            "data.overflow": None,
            "data.validation_source": [{"path": "held.jsonl", "format": "text"}],
            "data.validation_fraction": None,
            "max_steps": 7,
        },
        "max_steps: the lower of epochs and max_steps ends the run|my_key.a: [1] has no equivalent",
    ),
    "dpo": (
        "axolotl",
        "rl: dpo\nrl_beta: 0.2\nsample_packing: false\ndatasets: [{path: a/b, type: chat_template.default, split: train_prefs, "
        "field_messages: conversation, field_chosen: good, field_rejected: rejected, roles: {user: [user]}}]",
        {
            "recipe": "dpo",
            "loss": {"beta": 0.2},
            "data.source": "a/b",
            "data.packing": None,
            "data.format": None,
            "data.columns": {"prompt": "conversation", "chosen": "good"},
            "data.split": "train_prefs",
        },
        "",
    ),
    "orpo of another format": (
        "axolotl",
        "rl: orpo\norpo_alpha: 0.1\ndatasets: [{path: a/b, type: chatml.intel}]",
        {
            "recipe": "dpo",
            "loss": {"name": "orpo", "beta": 0.1},
            "data.source": "a/b",
            "data.format": None,
            "data.columns": {"prompt": "question"},
        },
        "",
    ),
    "kto": (
        "axolotl",
        "rl: kto\nmicro_batch_size: 1",
        {"recipe": "kto", "data.format": None, "gradient_accumulation_steps": None},
        "batch_size: kto compares",
    ),
    "reward model": ("axolotl", "reward_model: true", {"recipe": "reward", "data.format": None}, ""),
    "grpo": (
        "axolotl",
        "rl: grpo\ntrl: {reward_funcs: [rewards.exact], num_generations: 4, max_completion_length: 64, beta: 0.01}\n"
        "sample_packing: false",
        {
            "recipe": "grpo",
            "batch_size": 2,
            "rewards": ["rewards.py:exact"],
            "generation": {"num_answers": 4, "max_new_tokens": 64},
            "loss": {"kl_weight": 0.01},
            "data.format": None,
            "data.packing": None,
            "data.overflow": None,
            "data.max_prompt_length": 2048,
            "schedule.name": "cosine",
        },
        "",
    ),
    "LLaMA-Factory": (
        "factory",
        "",
        {},
        "not needed in lean_ft: trust_remote_code, do_train, dataloader_num_workers, plot_loss|template: not supported: the model's own",
    ),
    "all parameters, several sources": (
        "factory",
        "finetuning_type: full\ndataset: alpaca, unknown\neval_dataset: chats\nmax_samples: null\nneat_packing: true\n"
        "quantization_bit: null\noptim: adamw_torch\nlr_scheduler_type: null\nlearning_rate: null\nlora_rank: null\ndeepspeed: z.json",
        {
            "lora": None,
            "data": {
                "source": [
                    {
                        "path": "org/alpaca",
                        "format": "alpaca",
                        "subset": "en",
                        "columns": {"instruction": "q", "system": "s"},
                    },
                    {"path": "unknown"},
                ],
                "validation_source": [{"path": "FOLDER/a.json", "format": "messages", "columns": {"messages": "talk"}}],
                "num_processes": 16,
                "packing": "bfd",
            },
            "optimizer.lr": 5e-5,
            "schedule.name": "linear",
        },
        "describes unknown. Set data.source|defaults of LLaMA-Factory: lora_rank=8, learning_rate=5.0e-05, lr_scheduler_type|"
        "LLaMA-Factory counts per process",
    ),
    "dpo of LLaMA-Factory": (
        "factory",
        "stage: dpo\npref_beta: 0.3\npref_loss: simpo\nsimpo_gamma: 0.5\ndataset: pairs\nlora_target: 'q_proj, v_proj'",
        {
            "recipe": "dpo",
            "loss": {"name": "simpo", "beta": 0.3, "gamma": 0.5},
            "lora.targets": ["q_proj", "v_proj"],
            "data.source": "FOLDER/p.jsonl",
            "data.format": "preference",
            "data.columns": {"chosen": "good"},
        },
        "",
    ),
    "kto of LLaMA-Factory": (
        "factory",
        "stage: kto\ndataset: good_or_bad",
        {
            "recipe": "kto",
            "data.source": "FOLDER/k.jsonl",
            "data.format": "unpaired",
            "data.columns": {"prompt": "q", "completion": "output", "label": "liked"},
            "batch_size": None,
            "gradient_accumulation_steps": 4,
        },
        "batch_size: kto compares the completions",
    ),
    "pre-training": (
        "factory",
        "stage: pt\ndataset: texts\npacking: true",
        {"data.source": "FOLDER/t.jsonl", "data.format": "text", "data.packing": "wrapped", "data.columns": None},
        "dataset: texts: these keys of FOLDER/dataset_info.json have no equivalent: script_url.",
    ),
    "ppo": (
        "factory",
        "stage: ppo\nreward_model: saves/reward",
        {
            "recipe": "ppo",
            "rewards": [{"model": "saves/reward"}],
            "value": {"path": "saves/reward"},
            "data.format": None,
            "data.max_prompt_length": 2048,
            "data.num_processes": None,
            "schedule.name": "cosine",
        },
        "preprocessing_num_workers: 16 has no equivalent in the recipe ppo",
    ),
}


# What two settings mean together, and values that mean something else here: configuration -> settings of the preset, remark.
TOGETHER: list[tuple[str, str, dict[str, Any], str]] = [
    ("axolotl", "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]", {"lora.targets": None}, ""),
    (
        "axolotl",
        "adapter: lora\nlora_target_modules: [q_proj, lm_head]\nlora_target_linear: true",
        {"lora.targets": ["all-linear", "lm_head"]},
        "",
    ),
    (
        "axolotl",
        "adapter: lora\nlora_target_modules: [q_proj]\nlora_target_parameters: [mlp.experts.down_proj]",
        {"lora.targets": ["q_proj", "mlp.experts.down_proj"]},
        "",
    ),
    ("axolotl", r"lora_target_modules: layers.[\d]+.(q|k)_proj", {"lora.targets": None}, "is a regular expression"),
    ("axolotl", "chat_template: tokenizer_default", {"data.chat_template": None}, ""),
    ("axolotl", "DATASET chat_template: tokenizer_default", {"data.chat_template": None}, ""),
    (
        "axolotl",
        "DATASET chat_template: tokenizer_default_fallback_chatml",
        {"data.chat_template": None},
        "own template is used",
    ),
    (
        "axolotl",
        "DATASET chat_template: llama3",
        {"data.chat_template": None},
        "not supported: the model's own template",
    ),
    ("axolotl", "chat_template_jinja: t.jinja\nchat_template: jinja", {"data.chat_template": "t.jinja"}, ""),
    ("axolotl", "DATASET chat_template: jinja, chat_template_jinja: t.jinja", {"data.chat_template": "t.jinja"}, ""),
    (
        "axolotl",
        "chat_template: jinja\nchat_template_jinja: '{{ x }}'",
        {"data.chat_template": None},
        "Save it as a file",
    ),
    (
        "axolotl",
        "chat_template: chatml\nchat_template_jinja: t.jinja",
        {"data.chat_template": None},
        "own template is used",
    ),
    ("axolotl", "DATASET train_on_eos: last", {}, "train_on_eos: not supported"),
    ("axolotl", "DATASET roles_to_train: [user, assistant]", {}, "roles_to_train: not supported"),
    ("axolotl", "DATASET shards: 10", {}, "shards: not supported"),
    ("axolotl", "num_epochs: 4\neval_steps: 0.1\nsave_steps: 0.1", {"eval_every": 0.4, "save_every": 0.4}, ""),
    ("axolotl", "num_epochs: 4\neval_steps: 0.25", {"eval_every": "epoch"}, ""),
    ("axolotl", "num_epochs: 4\neval_steps: 0.5", {"eval_every": "epoch"}, "every 2 epochs has no equivalent"),
    ("axolotl", "max_steps: 25\neval_steps: 0.1\nlogging_steps: 0.1", {"eval_every": 3, "log_every": 3}, ""),
    ("axolotl", "num_epochs: 2\nlogging_steps: 0.1", {"log_every": None}, "logging_steps: a share of the run"),
    ("axolotl", "save_steps: 50.0\nsave_strategy: epoch", {"save_every": 50}, ""),
    ("axolotl", "saves_per_epoch: 4\nsave_steps: 50", {"save_every": 0.25}, ""),
    ("axolotl", "a: null", {"schedule.warmup_ratio": 0.03}, "3 % of the run's steps, and at most 100"),
    ("axolotl", "warmup_steps: 0", {"schedule.warmup_ratio": None}, ""),
    ("axolotl", "warmup_ratio: 0.1\nwarmup_steps: 5", {"schedule.warmup_ratio": None, "schedule.warmup_steps": 5}, ""),
    ("axolotl", "batch_size: 12\nmicro_batch_size: 4", {"gradient_accumulation_steps": 3, "batch_size": 4}, ""),
    ("axolotl", "bf16: false", {"model.dtype": "float32"}, ""),
    ("axolotl", "fp16: true\nbf16: auto", {"model.dtype": "float16"}, ""),
    ("axolotl", "bf16: false\nfp16: false\nfloat16: true", {"model.dtype": "float16"}, ""),
    ("axolotl", "bf16: auto", {"model.dtype": None}, ""),
    ("axolotl", "sample_packing: true\nbatch_flattening: auto", {"data.packing": "bfd"}, ""),
    ("axolotl", "batch_flattening: true\nsample_packing: false", {"data.packing": "padding_free"}, ""),
    (
        "axolotl",
        "qat: {activation_dtype: int8, weight_dtype: int4}",
        {"quantize.train": "int8_dynamic_int4_weight"},
        "",
    ),
    (
        "axolotl",
        "tokens: [<a>]\nspecial_tokens: {additional_special_tokens: [<b>]}",
        {"model.new_tokens": ["<a>", "<b>"]},
        "",
    ),
    ("axolotl", "use_wandb: true\nuse_tensorboard: true", {"log.to": ["wandb", "tensorboard"]}, ""),
    ("axolotl", "shuffle_merged_datasets: true\nshuffle_before_merging_datasets: false", {"data.shuffle": None}, ""),
    (
        "axolotl",
        "overrides_of_model_config: {rope_scaling: {type: yarn, factor: 4.0}}",
        {},
        "overrides_of_model_config: not supp",
    ),
    (
        "axolotl",
        "model_config: {output_router_logits: true}",
        {},
        "not supported: the model's config.json decides. model.router_aux",
    ),
    ("axolotl", "revision_of_model: abc", {"model.path": "org/m@abc"}, ""),
    ("axolotl", "s2_attention: true", {}, "s2_attention: not supported"),
    ("axolotl", "plugins: [axolotl.integrations.liger.LigerPlugin, my.Plugin]", {}, "plugins: not supported"),
    (
        "axolotl",
        "sequence_len: 512\nmax_packed_sequence_len: 2048",
        {},
        "sequence_len and max_packed_sequence_len both set data.max_l",
    ),
    (
        "axolotl",
        "rl: grpo\ntrl: {reward_funcs: [r.a, r.b], reward_weights: [1.0, 0.5], vllm_server_host: h, vllm_server_port: 9, use_vllm: true}",
        {
            "rewards": [{"function": "r.py:a", "weight": 1.0}, {"function": "r.py:b", "weight": 0.5}],
            "generation.engine_url": "http://h:9",
        },
        "",
    ),
    ("factory", "eval_strategy: epoch\neval_steps: 10", {"eval_every": "epoch"}, ""),
    ("factory", "save_steps: 10\nsave_strategy: 'no'", {"save_every": 0}, ""),
    ("factory", "num_train_epochs: 2.0\nsave_steps: 0.1", {"save_every": 0.2}, ""),
    ("factory", "packing: true\nneat_packing: true", {"data.packing": "bfd"}, ""),
    ("factory", "neat_packing: true\npacking: false", {"data.packing": "bfd"}, ""),
    ("factory", "stage: pt", {"data.packing": "wrapped"}, ""),
    ("factory", "mask_history: true\ntrain_on_prompt: false", {"data.train_on": "last"}, ""),
    ("factory", "add_tokens: '<a>, <b>'\nadd_special_tokens: <c>", {"model.new_tokens": ["<a>", "<b>", "<c>"]}, ""),
    (
        "factory",
        "freeze_vision_tower: true\nfreeze_multi_modal_projector: false",
        {"model.images": "frozen"},
        "no equivalent. freeze",
    ),
    (
        "factory",
        "freeze_vision_tower: false\nfreeze_language_model: true",
        {"model.images": "train", "freeze": ["model", "vision.*merger*"]},
        "",
    ),
    ("factory", "use_apollo: true\noptim: adamw_torch\nfinetuning_type: full", {"optimizer.name": "apollo_mini"}, ""),
    (
        "factory",
        "double_quantization: false\nquantization_bit: 4",
        {"lora.quantize": "nf4"},
        "double_quantization: not supported",
    ),
    ("factory", "mix_strategy: interleave_under", {"data.source": None}, "mix_strategy: not supported"),
    ("factory", "model_revision: abc", {"model.path": "org/m@abc"}, ""),
    ("factory", "adam_beta1: 0.0", {"optimizer.betas": [0.0, 0.999]}, ""),
    ("factory", "finetuning_type: full\nbf16: true", {"model.dtype": None}, "keeps trained weights in float32"),
]


@pytest.mark.first(30)
@pytest.mark.parametrize(
    ("tool", "theirs", "ours", "said"), TOGETHER, ids=[f"{one[0]}: {one[1][:60]}" for one in TOGETHER]
)
def test_settings_that_act_together(tool, theirs, ours, said, tmp_path):
    start = {"axolotl": "base_model: org/m", "factory": "model_name_or_path: org/m\ntemplate: x"}[tool]
    if theirs.startswith("DATASET"):
        theirs = f"datasets: [{{path: x, type: chat_template, {theirs.removeprefix('DATASET ')}}}]"
    (tmp_path / "theirs.yaml").write_text(f"{start}\n{theirs}\n")
    preset = convert_config(tmp_path / "theirs.yaml")
    written = flat(yaml.safe_load(preset.text("theirs.yaml")))
    assert {key: written.get(key) for key in ours} == ours
    assert said in "\n".join(preset.remarks)


def converted(text: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Convert a configuration, load the preset, and return its values and comments."""
    theirs, ours = folder / "theirs.yaml", folder / "ours.yaml"
    theirs.write_text(text)
    preset = convert_config(theirs)
    ours.write_text(preset.text(theirs.name))
    load_config(load_recipe(preset.recipe).Config, ours)
    said = [line for line in ours.read_text().splitlines() if line.startswith("#")]
    assert said[1:] == [f"# {remark}" for remark in preset.remarks]
    return yaml.safe_load(ours.read_text()), "\n".join(said)


@pytest.mark.first(6)
@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_a_preset(name, tmp_path):
    tool, changes, differences, said = CASES[name]
    base, expected = (AXOLOTL, LORA_OF_AXOLOTL) if tool == "axolotl" else (FACTORY, LORA_OF_FACTORY)
    (tmp_path / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    expected = json.loads(json.dumps(expected | {"data": {**expected["data"]}}))
    for key, value in differences.items():
        group, _, last = key.rpartition(".")
        inside = expected.setdefault(group, {}) if group else expected
        inside[last] = value
        if value is None:
            del inside[last]
    theirs = yaml.safe_load(base) | (yaml.safe_load(changes) or {})
    theirs |= {} if tool == "axolotl" else {"dataset_dir": str(tmp_path)}
    preset, comments = converted(yaml.safe_dump(theirs, sort_keys=False), tmp_path)
    assert preset == json.loads(json.dumps(expected).replace("FOLDER", str(tmp_path)))
    for part in filter(None, said.split("|")):
        assert part.replace("FOLDER", str(tmp_path)) in comments


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base_model: x\nrl: ebft", "theirs.yaml: rl: ebft is not supported: use the recipe grpo."),
        ("base_model: x\ndatasets: 5", r"theirs.yaml: datasets is 5; expected a list of data sets"),
        ("model_name_or_path: x\nstage: other", "theirs.yaml: stage: other is not supported: the recipes are finetune"),
        ("model_name_or_path: x\ndataset: [1]", r"theirs.yaml: dataset is \[1\]; expected names separated by commas"),
        ("model_name_or_path: x\nfinetuning_type: oft", "theirs.yaml: finetuning_type: oft is not supported"),
        ("a: 1", "is not a training configuration of torchtune .*, axolotl .* or LLaMA-Factory"),
    ],
)
def test_what_is_not_converted_is_refused(text, said, tmp_path):
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        convert_config(tmp_path / "theirs.yaml")
