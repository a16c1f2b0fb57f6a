"""finetune: a few lines more than the smallest recipe, bitwise equal to it without an adapter, and adapters stored alone."""

import difflib
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from lean_ft.generation import Sampling, sample
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.models.hf_format import stored_dtype
from lean_ft.peft import load_adapter
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import copy_to, find_recipe, load_recipe, recipes
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.checkpoint import _manifest, write_json
from tests.recipes.test_full_finetune_single_device import SETTINGS, numbers

RECIPE, SIBLING, ALIAS = "finetune", "full_finetune_single_device", "lora_finetune_single_device"
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def own_settings():
    return ("model.dtype=float32", "lora.rank=4", "schedule.name=constant")


def test_it_is_the_smallest_recipe_plus_adapters_and_ranks():
    """Compare lines below the docstring: added lines name adapters or ranks, and few lines change."""

    def code(name: str) -> list[str]:
        return [line for line in recipes()[name].read_text().split('"""', 2)[2].splitlines() if line.strip()]

    lines = [line for line in difflib.ndiff(code(SIBLING), code(RECIPE)) if line[0] in "+-"]
    taken, added = [x for x in lines if x[0] == "-"], [x for x in lines if x[0] == "+"]
    assert len(taken) <= 8, taken
    assert len(added) <= 18, added
    names = r"lora|adapter|rank|parallel|last|^\+ +(run = Run\(|\))$"
    assert all(re.search(names, line, re.IGNORECASE) for line in added), added
    assert len(recipes()[SIBLING].read_text().splitlines()) <= 85
    assert len(recipes()[RECIPE].read_text().splitlines()) <= 110


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_without_an_adapter_it_equals_the_smallest_recipe_bitwise(tmp_path, dtype):
    settings = (f"model.dtype={dtype}", "data.packing=bfd", "gradient_accumulation_steps=2", "batch_size=2")
    for name in (RECIPE, SIBLING):
        module = load_recipe(recipes()[name])
        module.main(load_config(module.Config, None, [*SETTINGS, *settings, f"output_dir={tmp_path / name}"]))
    files = [tmp_path / name / "step_00000008" / "model.safetensors" for name in (RECIPE, SIBLING)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_alias_turns_the_adapter_on(tmp_path):
    """A run stored under the alias resumes too."""
    recipe = load_recipe(find_recipe(ALIAS))
    given = [*SETTINGS, "model.dtype=float32", f"output_dir={tmp_path / 'run'}"]
    recipe.main(load_config(recipe.Config, None, [*given, "max_steps=2"]))
    checkpoint = tmp_path / "run" / "step_00000002"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    state_file = checkpoint / "training_state" / "training_state.json"
    state = json.loads(state_file.read_text())
    assert state["recipe"] == RECIPE
    write_json(state_file, {**state, "recipe": ALIAS})
    (checkpoint / "manifest.json").unlink()
    write_json(checkpoint / "manifest.json", _manifest(checkpoint, 2))
    recipe.main(load_config(recipe.Config, None, [*given, "max_steps=3"]))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    copy = copy_to(find_recipe(ALIAS), str(tmp_path / "mine.py"))
    assert load_recipe(copy).Config.model_fields["lora"].default.rank == 16


def test_an_adapter_resumes_only_on_its_base_weights(train, tmp_path):
    base, dtype = (
        shutil.copytree(resolve_model_path("tiny"), tmp_path / "base"),
        stored_dtype(resolve_model_path("tiny")),
    )
    settings = (f"model.path={base}",)
    whole = train(*settings, output="whole")
    train(*settings, "max_steps=3", output="parts")
    other = load_model("tiny", dtype=dtype)
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    save_model(other, base)
    with pytest.raises(
        ValueError, match=r"step_00000003 holds an adapter of another model.*\n  fingerprint of the weights "
    ):
        train(*settings, output="parts")

    save_model(load_model("tiny", dtype=dtype), base, max_shard_bytes=400_000)  # the same weights in other files
    train(*settings, "max_steps=5", output="parts")
    checkpoint = tmp_path / "parts" / "step_00000005"
    state_file = checkpoint / "training_state" / "training_state.json"
    state = json.loads(state_file.read_text())
    assert state.pop("base_fingerprint")  # earlier versions did not write it
    write_json(state_file, state)
    (checkpoint / "manifest.json").unlink()
    write_json(checkpoint / "manifest.json", _manifest(checkpoint, 5))
    assert numbers(train(*settings, output="parts")) == numbers(whole)


def test_memory_settings_change_no_number(train):
    plain = train("lora.dropout=0.1", "data.packing=bfd")
    lean = train(
        "lora.dropout=0.1",
        "data.packing=bfd",
        "optimizer.in_backward=true",
        "memory.activation_checkpointing=selective",
        "memory.loss_chunk_tokens=16",
        output="lean",
    )
    for line, expected in zip(lean, plain, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_precision_follows_float32(train, dtype):
    for line, expected in zip(train(f"model.dtype={dtype}", output=dtype), train(), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=0.06)


def test_generation_uses_the_adapter(train, tmp_path, capsys):
    train("optimizer.lr=1e-2")
    said = capsys.readouterr().out
    checkpoint = tmp_path / "run" / "step_00000008"
    assert f"leanft chat {checkpoint}" in said
    recipe = load_recipe(recipes()["generate"])

    def answer(*settings: str) -> str:
        given = ["model.path=tiny", "model.dtype=float32", "device=cpu", "max_new_tokens=8", "chat=false"]
        given += ["prompt=The capital of Zanemar is", *settings]
        recipe.main(load_config(recipe.Config, None, given))
        return capsys.readouterr().out

    for adapters in ([checkpoint], [checkpoint, checkpoint]):
        model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
        load_adapter(model, *adapters)
        ids = tokenizer.encode("The capital of Zanemar is", add_special_tokens=True)
        assert (model(torch.tensor([ids])) - load_model("tiny")(torch.tensor([ids]))).norm() > 0.01
        (expected,) = sample(model, [ids], Sampling(8, stop_ids=frozenset({tokenizer.eos_id})))
        text = tokenizer.decode(expected.ids, skip_special_tokens=True)
        assert answer(f"adapter=[{','.join(map(str, adapters))}]") == f"{text}\n"
    assert answer(f"adapter={checkpoint}") == answer(f"adapter=[{checkpoint}]")


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GROWTH = """
import sys, torch, bitsandbytes.functional
from lean_ft.models import load_model
from lean_ft.peft import quantize_as_loaded, NF4Linear
from lean_ft.settings import LoRAConfig
from lean_ft.memory.host_memory import return_freed_memory
from lean_ft.training.process_memory import peak_memory_bytes
return_freed_memory()
NF4Linear(torch.nn.Linear(64, 64))  # memory that libraries allocate on first use
before = peak_memory_bytes(torch.device("cpu"))
model = load_model(sys.argv[1], dtype=torch.bfloat16, random_init=True,
                   after_module=quantize_as_loaded(LoRAConfig(quantize="nf4")))
print(peak_memory_bytes(torch.device("cpu")) - before)
"""


@pytest.mark.long
def test_quantizing_while_loading_never_holds_the_whole_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    layers = 12 * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096)
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth = int(done.stdout)
    assert growth < 0.6 * 2 * layers  # relative to the bfloat16 model; NF4 weights take 0.26
