"""`leanft convert-config`: conversion of a configuration into a preset that `leanft validate` accepts and that
trains."""

import json

import pytest
import yaml

from lean_ft.hub.paths import resolve_model_path
from lean_ft.settings.run import LOGGER_PACKAGES
from tests.settings.test_converted_config import TORCHTUNE


def test_what_it_writes_is_valid_and_what_it_leaves_out_is_told(leanft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    here = {
        "/tmp/Llama-3.2-1B-Instruct/\n": f"{resolve_model_path('tiny')}\n",
        "torchtune.datasets.alpaca_cleaned_dataset": "torchtune.datasets.chat_dataset, conversation_style: openai, "
        "conversation_column: messages, source: json, data_files: tiny/train.jsonl",
    }
    # Activation offloading is not valid on a CPU.
    here["enable_activation_offloading: True"] = "enable_activation_offloading: False"
    text = TORCHTUNE
    for there, path in here.items():
        assert there in text
        text = text.replace(there, path)
    theirs.write_text(text + "my_own_key: 3\n")
    converted = leanft.ok("convert-config", theirs, "--output", ours)
    assert "my_own_key: 3 has no equivalent" in converted.err
    listed, *remarks = converted.err.splitlines()
    assert listed.startswith("converted: ") and "batch_size" in listed
    assert all(f"# {remark}" in ours.read_text() for remark in remarks)
    assert converted.out == f"wrote {ours}. Run it: leanft run finetune --config {ours}\n"
    assert leanft("convert-config", theirs).out == ours.read_text()
    leanft.ok("validate", "--config", ours)
    assert leanft("convert-config", theirs, "-o", ours).code == 2  # no overwriting
    assert leanft("convert-config", ours).code == 2  # not a torchtune configuration


CHAT = [{"role": "user", "content": "What is 6 x 7?"}, {"role": "assistant", "content": "It is 42."}]
AXOLOTL = """
base_model: tiny
adapter: qlora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
datasets: [{path: chats.jsonl, type: chat_template}]
val_set_size: 0.2
sequence_len: 64
sample_packing: true
optimizer: adamw_torch_fused
learning_rate: 0.001
evals_per_epoch: 2
gradient_checkpointing: true
flash_attention: true
output_dir: run
"""
LLAMA_FACTORY = """
model_name_or_path: tiny
stage: sft
finetuning_type: full
dataset: chats
dataset_dir: .
template: qwen
cutoff_len: 64
max_samples: 8
per_device_train_batch_size: 2
learning_rate: 1.0e-3
num_train_epochs: 1.0
lr_scheduler_type: cosine
report_to: none
output_dir: run
"""


@pytest.mark.long
@pytest.mark.parametrize("theirs", [LLAMA_FACTORY, AXOLOTL], ids=["LLaMA-Factory", "axolotl"])
def test_a_converted_configuration_trains(theirs, leanft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 20)
    info = {"file_name": "chats.jsonl", "formatting": "sharegpt"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"chats": info}))
    (tmp_path / "theirs.yaml").write_text(theirs)
    leanft.ok("convert-config", "theirs.yaml", "-o", "ours.yaml")
    leanft.ok("run", "finetune", "--config", "ours.yaml", "plan=false", "device=cpu", f"data.cache_dir={tmp_path}")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == (6 if "base_model" in theirs else 4)
    assert losses[-1] < losses[0]
    assert any("eval_loss" in row for row in rows) == ("base_model" in theirs)


def test_a_logger_need_not_be_installed_to_convert_its_settings(leanft, tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_PACKAGES, "wandb", "not_installed_here")
    (tmp_path / "theirs.yaml").write_text(
        "base_model: tiny\nwandb_project: mine\ndatasets: [{path: rows.jsonl, type: chat_template}]\n"
    )
    converted = leanft.ok("convert-config", tmp_path / "theirs.yaml")
    assert yaml.safe_load(converted.out)["log"] == {"project": "mine", "to": ["wandb"]}
