"""finetune: a few lines more than the smallest recipe, bitwise equal to it without an adapter, and adapters stored
alone."""

import difflib
import json
import re
import shutil

import pytest
import torch

from lean_ft.generation import Sampling, sample
from lean_ft.hub.paths import resolve_model_path
from lean_ft.models import load_model, save_model
from lean_ft.models.stored_weights import stored_dtype
from lean_ft.peft import load_adapter
from lean_ft.system.catalog import copy_to, find_recipe, load_recipe, recipes
from lean_ft.tokenizers import load_tokenizer
from tests.recipes.cases import CHATS
from tests.recipes.conftest import config_of, recipe_module, run_recipe

RECIPE, SIBLING, ALIAS = "finetune", "full_finetune_single_device", "lora_finetune_single_device"
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def own_settings():
    return ("lora.rank=4", "schedule.name=constant")


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


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_without_an_adapter_it_equals_the_smallest_recipe_bitwise(tmp_path, dtype):
    settings = (
        f"model.dtype={dtype}",
        "data.packing=bfd",
        "gradient_accumulation_steps=2",
        "batch_size=2",
        "max_steps=3",
    )
    for name in (RECIPE, SIBLING):
        run_recipe(name, tmp_path / name, *CHATS, *settings)
    files = [tmp_path / name / "step_00000003" / "model.safetensors" for name in (RECIPE, SIBLING)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_alias_turns_the_adapter_on(tmp_path):
    run_recipe(ALIAS, tmp_path / "run", *CHATS, "max_steps=2")
    checkpoint = tmp_path / "run" / "step_00000002"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert json.loads((checkpoint / "training_state" / "training_state.json").read_text())["recipe"] == RECIPE
    assert len(run_recipe(ALIAS, tmp_path / "run", *CHATS, "max_steps=3")) == 3
    copy = copy_to(find_recipe(ALIAS), str(tmp_path / "mine.py"))
    assert load_recipe(copy).Config.model_fields["lora"].default.rank == 16


def test_an_adapter_resumes_only_on_its_base_weights(train, tmp_path):
    tiny = resolve_model_path("tiny")
    base, dtype = shutil.copytree(tiny, tmp_path / "base"), stored_dtype(tiny)
    settings = (f"model.path={base}", "max_steps=2")
    train(*settings, "max_steps=1", output="parts")
    other = load_model("tiny", dtype=dtype)
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    save_model(other, base)
    with pytest.raises(ValueError, match="step_00000001 holds an adapter of another model"):
        train(*settings, output="parts")

    save_model(load_model("tiny", dtype=dtype), base, max_shard_bytes=400_000)  # the same weights in other files
    assert len(train(*settings, output="parts")) == 2


@pytest.mark.long
def test_generation_uses_the_adapter(train, tmp_path, capsys):
    train("optimizer.lr=1e-2")
    said = capsys.readouterr().out
    checkpoint = tmp_path / "run" / "step_00000006"
    assert f"leanft chat {checkpoint.parent}\n" in said

    def answer(*settings: str) -> str:
        given = ["model.path=tiny", "model.dtype=float32", "device=cpu", "max_new_tokens=8", "chat=false"]
        recipe_module("generate").main(config_of("generate", *given, "prompt=The capital of Zanemar is", *settings))
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
