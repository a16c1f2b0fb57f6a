"""Conversion of torchtune configurations into presets that the recipes accept, with remarks on the other keys."""

import copy
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lean_ft.cli.main import run_command_line
from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings.from_other_tools import convert_config
from tests.settings.test_from_other_tools import converted

# Keys that all torchtune configurations have, from llama3_2/1B_full_single_device.yaml.
BASE = """
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
"""
ALPACA = {"source": "yahma/alpaca-cleaned", "format": "alpaca", "train_on": "all", "packing": "bfd", "max_length": 512}
FULL = {
    "recipe": "finetune",
    "output_dir": "runs/here",
    "model": {"path": "meta-llama/Llama-3.2-1B-Instruct"},
    "data": ALPACA,
    "optimizer": {"name": "paged_adamw_8bit", "lr": 2e-5, "weight_decay": 0.01, "in_backward": True},
    "schedule": {"name": "constant"},
    "memory": {"activation_checkpointing": "full", "activation_offload": True},
    "batch_size": 4,
    "epochs": 2,
    "seed": 3,
    "compile": True,
}
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
ALL_BUT_K = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTER = {"targets": ALL_BUT_K, "rank": 8, "alpha": 64, "dropout": 0.1, "dora": True}
ADAMW = "optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 3e-4, weight_decay: 0.05}"
COSINE = (
    "lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 9}"
)
TEACHER = "{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/Meta-Llama-3.1-8B-Instruct/}"

# Differences of a configuration from BASE -> differences of the preset (None: missing key), and the remark.
CASES = {
    "full_single": ("", {}, "checkpointer.checkpoint_dir: no model in /tmp/Llama-3.2-1B-Instruct. |device, "),
    "full_distributed": (
        "# tune run --nproc_per_node 4 full_finetune_distributed\nfsdp_cpu_offload: True\ntensor_parallel_dim: 2\n"
        "max_steps_per_epoch: 50\nsave_every_n_steps: 20\noptimizer_in_bwd: False",
        {"parallel.tensor": 2, "max_steps": 100, "save_every": 20, "optimizer.in_backward": None},
        "fsdp_cpu_offload: not supported: optimizer.state=streamed|gradient_accumulation_steps: torchtune counts per process|not of each epoch",
    ),
    "lora": (
        f"{LORA}\n{ADAMW}\n{COSINE}",
        {
            "lora": ADAPTER,
            "optimizer": {"lr": 3e-4, "weight_decay": 0.05, "in_backward": True},
            "schedule": {"warmup_steps": 9},
        },
        "",
    ),
    "qlora": (LORA.replace("lora_llama", "qlora_llama"), {"lora": ADAPTER | {"quantize": "nf4"}}, ""),
    "lora_dpo": (
        f"{LORA}\ndataset: {{_component_: torchtune.datasets.stack_exchange_paired_dataset}}\n"
        "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05, label_smoothing: 0.1}",
        {
            "recipe": "dpo",
            "loss": {"beta": 0.05, "label_smoothing": 0.1},
            "lora": ADAPTER,
            "data": {
                "source": "lvwerra/stack-exchange-paired",
                "format": "preference",
                "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
                "max_length": 512,
            },
        },
        "",
    ),
    "full_dpo": (
        "loss: {_component_: torchtune.rlhf.loss.RSOLoss, gamma: 0.2}\nref_checkpointer: {checkpoint_dir: /tmp/other}\n"
        "dataset: {_component_: torchtune.datasets.preference_dataset, source: json, data_files: mine.json, "
        "column_map: {chosen: better}}",
        {
            "recipe": "dpo",
            "loss": {"name": "hinge", "beta": 0.2},
            "data": {"source": "mine.json", "format": "preference", "columns": {"chosen": "better"}, "max_length": 512},
        },
        "ref_checkpointer: the reference is the model before training, not /tmp/other",
    ),
    "distillation": (
        f"{LORA}\nteacher_model: {{_component_: torchtune.models.llama3_1.llama3_1_8b}}\nkd_ratio: 0.3\n"
        f"teacher_checkpointer: {TEACHER}\nkd_loss: {{_component_: torchtune.modules.loss.ReverseKLLoss}}",
        {
            "recipe": "distill",
            "lora": ADAPTER,
            "distill": {
                "teacher": "meta-llama/Meta-Llama-3.1-8B-Instruct",
                "divergence": "reverse_kl",
                "cross_entropy_weight": 0.7,
            },
        },
        "",
    ),
    "grpo": (
        "loss: {_component_: torchtune.dev.grpo.loss.GRPOSimpleLoss, kl_coeff: 0.01, epsilon: 0.1}\nbatch_size: 3\n"
        "grpo_samples: 16\nforward_batch_size: 1\nmax_generated_tokens: 64\ntemperature: 0.9\ntop_k: 50\nppo_epochs: 2\n"
        "num_steps: 200\ndataset: {_component_: torchtune.dev.grpo.gsm8k.gsm8k_dataset, partition: 1-9/10}",
        {
            "recipe": "grpo",
            "loss": {"name": "grpo", "kl": "k3", "kl_weight": 0.01, "epsilon": 0.1, "correction": "token_truncate"},
            "generation": {"num_answers": 16, "max_new_tokens": 64, "temperature": 0.9, "top_k": 50, "passes": 2},
            "batch_size": 16,
            "gradient_accumulation_steps": 3,
            "max_steps": 200,
            "rewards": [{"function": "exact_answer", "pattern": r"(?:#### |<answer>)([^<\n]*)"}],
            "schedule": None,
            "data": {"source": "openai/gsm8k", "subset": "main", "columns": {"prompt": "question"}},
        },
        "rewards: torchtune's|top_k: torchtune's|dataset.partition: not supported: data.split takes a slice|512 has no equivalent",
    ),
    "qat": (
        "quantizer: {_component_: torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer, groupsize: 64}",
        {"quantize": {"train": "int8_dynamic_int4_weight", "group_size": 64}},
        "",
    ),
    "several_sources": (
        "dataset:\n- {_component_: torchtune.datasets.instruct_dataset, source: a/b, column_map: {input: q}, split: 'train[:9%]'}\n"
        "- {_component_: torchtune.datasets.chat_dataset, source: c/d, conversation_style: openai, conversation_column: talk}\n"
        "dataset_val: {_component_: torchtune.datasets.instruct_dataset, source: a/b, split: test}\nrun_val_every_n_steps: 7",
        {
            "data.source": [
                {"path": "a/b", "format": "prompt_completion", "columns": {"prompt": "q", "completion": "output"}}
                | {"split": "train[:9%]"},
                {"path": "c/d", "format": "messages", "columns": {"messages": "talk"}},
            ],
            "data.format": None,
            "data.packing": None,
            "data.train_on": "completion",
            "data.validation_source": [
                {"path": "a/b", "format": "prompt_completion", "columns": {"prompt": "input", "completion": "output"}}
                | {"split": "test"}
            ],
            "eval_every": 7,
        },
        "",
    ),
    "profiled": (
        "profiler: {_component_: p, enabled: True, wait_steps: 5, warmup_steps: 3, active_steps: 2, with_flops: True}\n"
        "metric_logger: {_component_: torchtune.training.metric_logging.TensorBoardLogger, log_dir: x}\ndevice: cpu",
        {"profile": True, "profile_steps": [5, 3, 2], "log": {"to": ["tensorboard"]}, "device": "cpu"},
        "",
    ),
    "held_out": (
        "dataset: {_component_: torchtune.datasets.alpaca_dataset, source: json, data_files: a.json, split: 'train[:95%]'}\n"
        "dataset_val: {_component_: torchtune.datasets.alpaca_dataset, source: json, data_files: a.json, split: 'train[95%:]'}\n"
        "seed: null",
        {
            "data": {
                "source": "a.json",
                "format": "alpaca",
                "split": "train[:95%]",
                "train_on": "all",
                "max_length": 512,
            }
            | {"validation_source": [{"path": "a.json", "format": "alpaca", "split": "train[95%:]"}]},
            "seed": None,
        },
        "alpaca_dataset adds the Alpaca prompt|seed: null is a random seed",
    ),
    "unknown": (
        "optimizer: {_component_: torch.optim.Rprop, lr: 1.0, etas: [0.5, 1.2]}\nloss: {_component_: mine.Loss}\n"
        "lr_scheduler: {_component_: mine.schedule}\nmy_key: {a: [1]}\nmetric_logger: {_component_: x.CometLogger}\n"
        "dataset: {_component_: mine.data}\nshuffle: False",
        {
            "optimizer": {"lr": 1.0, "weight_decay": 0.01, "in_backward": True},
            "schedule": None,
            "data": {"source": "", "max_length": 512, "shuffle": False},
        },
        "torch.optim.Rprop has no equivalent|optimizer.etas: [0.5, 1.2]|Loss has no equivalent|lr_scheduler: schedule has no|my_key.a: [1]|"
        "CometLogger has no equivalent|data has no equivalent",
    ),
}


TEXTS = (
    "dataset: {_component_: torchtune.datasets.text_completion_dataset, source: json, data_files: a.txt, packed: True"
)
CASES |= {
    "texts": (
        TEXTS + "}",
        {
            "data": {
                "source": "a.txt",
                "format": "text",
                "packing": "bfd_split",
                "max_length": 512,
            }
        },
        "data.packing=bfd_split keeps the rest",
    ),
    "whole_texts": (
        TEXTS + ", split_across_pack: False, add_eos: False}",
        {"data": {"source": "a.txt", "format": "text", "packing": "bfd", "max_length": 512}},
        "dataset.add_eos: not supported: every text ends with eos",
    ),
    "no_loss": ("loss: null\nlr_scheduler: null", {}, "loss: not set. The preset uses the cross-entropy of finetune."),
}


def presets_of(text: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Convert BASE updated by `text`, load the preset, and return its values and comments."""
    comments = [line for line in text.splitlines() if line.startswith("#")]
    updated = yaml.safe_dump(yaml.safe_load(BASE) | (yaml.safe_load(text) or {}))
    return converted("\n".join([updated, *comments]), folder)


@pytest.mark.first(6)
@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_a_preset(name, tmp_path):
    text, changes, said = CASES[name]
    expected = copy.deepcopy(FULL)
    for key, value in changes.items():
        *groups, last = key.split(".")
        inside = expected
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[last] = value
        if value is None:
            del inside[last]
    preset, comments = presets_of(text, tmp_path)
    assert preset == expected
    for part in filter(None, said.split("|")):
        assert part in comments


def test_a_key_that_is_not_known_is_told_in_every_group(tmp_path):
    for group, told in yaml.safe_load(BASE).items():
        if isinstance(told, dict):
            _, comments = presets_of(yaml.safe_dump({group: told | {"surprise": 7}}), tmp_path)
            assert f"{group}.surprise" in comments


def test_what_is_here_is_taken_and_the_rest_comes_from_the_hub(tmp_path):
    tiny = str(resolve_model_path("tiny"))
    for folder, path in ((tiny, tiny), ("/tmp/Qwen3-8B", "Qwen/Qwen3-8B"), ("my/own", "my/own")):
        preset, _ = presets_of(f"checkpointer: {{checkpoint_dir: {folder}}}", tmp_path)
        assert preset["model"]["path"] == path
    preset, _ = presets_of(
        "checkpointer: {}\nmodel: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_0_5b}", tmp_path
    )
    assert preset["model"]["path"] == "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {_component_: torchtune.models.llama3_2_vision.llama3_2_vision_11b}", "images"),
        ("optimizer: null\ntasks: [truthfulqa_mc2]", "Images and PPO"),
    ],
)
def test_what_is_not_converted_is_refused(text, said, tmp_path):
    theirs = {key: value for key, value in (yaml.safe_load(BASE) | yaml.safe_load(text)).items() if value is not None}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    with pytest.raises(ValueError, match=said):
        convert_config(tmp_path / "theirs.yaml")


WRONG = {
    "model: 5": "model is 5; expected a group with _component_",
    "optimizer: [1]": r"optimizer is \[1\]; expected a group",
    "dataset: 5": "dataset is 5; expected a group with _component_, or a list of them",
    "dataset: [a]": r"dataset is \['a'\]; expected a group",
    "loss: x": "loss is 'x'; expected a group",
    "model: {_component_: 3}": "model._component_ is 3; expected a name",
    "optimizer: {_component_: [1]}": r"optimizer._component_ is \[1\]; expected a name",
    "model: {_component_: x, lora_attn_modules: 5}": "model.lora_attn_modules is 5; expected a list",
    "kd_ratio: x": "kd_ratio is 'x'; expected a number",
    "epochs: [1]": r"epochs is \[1\]; expected a number",
    "max_steps_per_epoch: x": "max_steps_per_epoch is 'x'; expected a number",
    "dtype: [a]": r"dtype is \['a'\]; expected a name",
    "{ac_mode: selective, ac_option: x}": "ac_option is 'x'; expected a whole number",
    "batch_size: abc": "batch_size is 'abc'; expected a whole number",
    "seed: '${seed}x'": "seed .* expected whole number >= 0, found",
    "clip_grad_norm: abc": "clip_grad_norm .* expected number > 0",
    "optimizer: {_component_: torch.optim.SGD, lr: {a: 1}}": "",
}


@pytest.mark.first(6)
@pytest.mark.parametrize("text", WRONG)
def test_wrong_values_get_a_message_that_names_the_file(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(yaml.safe_dump(yaml.safe_load(BASE) | yaml.safe_load(text)))
    with pytest.raises(SystemExit) as exited:
        run_command_line(["convert-config", "theirs.yaml", "-o", "ours.yaml"])
    message = " ".join(capsys.readouterr().err.split())
    if WRONG[text]:
        assert exited.value.code == 2 and re.search(WRONG[text], message), message
        assert (
            "theirs.yaml" in message
            and "preset.yaml" not in message
            and "/tmp" not in message.replace("/tmp/Llama", "")
        )
    assert "Traceback" not in message and exited.value.code in (0, 2)


LINES = ["\n", "\r", "\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\0", "\ud7ff", "\ufeff"]


@pytest.mark.first(3)
@pytest.mark.parametrize("line", LINES)
def test_a_strangers_text_adds_no_setting(line, tmp_path):
    """Wherever the text stands: as a key, a value, a component, a path or the name of the file."""
    bad = f"zzz{line}neftune_alpha: 99{line}#"
    theirs = yaml.safe_load(BASE) | {bad: 5, "my_key": bad, "metric_logger": {"_component_": bad}}
    theirs["dataset"] |= {bad: 1, "more": bad}
    theirs["optimizer"]["_component_"] = theirs["checkpointer"]["checkpoint_dir"] = bad
    theirs["ref_checkpointer"] = {"checkpoint_dir": bad + "x"}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    text = convert_config(tmp_path / "theirs.yaml").text(f"theirs{line}seed: 9.yaml")
    assert text.startswith("# From torchtune's theirs")
    assert yaml.safe_load(text).keys() <= FULL.keys() and yaml.safe_load(text)["seed"] == 3
    comments = [one for one in text.splitlines() if one.startswith("#")]
    assert sum("neftune_alpha" in one for one in comments) > 4


@pytest.mark.long
def test_a_large_configuration_is_fast(tmp_path):
    theirs = yaml.safe_load(BASE) | {f"k{i}": "${k0}" * 3 + "${" + f"k{i + 1}" + "}" for i in range(6000)}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs))
    started = time.process_time()
    assert len(convert_config(tmp_path / "theirs.yaml").text("x")) < 300_000
    assert time.process_time() - started < 20
