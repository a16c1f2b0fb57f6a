"""Adapters equal PEFT's in logits and gradients, and each library reads the other's files."""

import json
from pathlib import Path

import pytest
import torch

from lean_ft import load_model
from lean_ft.peft import adapted_layers, apply_lora, load_adapter, stored_adapter
from lean_ft.settings import LoRAConfig
from tests.peft.conftest import FAMILIES, IDS, assert_peft_computes_it, from_peft, loss_of, randomize

peft = pytest.importorskip("peft")

KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
# PEFT refuses an adapter of Mamba-2's output projection in these families.
EXCLUDED = {"exclude_modules": ["out_proj"]}
MAMBA = {"falcon_h1": EXCLUDED, "nemotron_h": EXCLUDED}


OUTSIDE = ["embed_tokens", "lm_head", "q_proj"]
ADAPTED: list[tuple[str, str, str | list[str]]] = [("llama", "dora", OUTSIDE)]
ADAPTED += [(family, kind, "all-linear") for family in FAMILIES for kind in ("rslora", "dora")]
ADAPTED += [("llama", "lora", OUTSIDE)]


@pytest.mark.first(4)
@pytest.mark.parametrize(("family", "kind", "targets"), ADAPTED, ids=str)
def test_an_adapter_of_peft_has_its_logits_and_gradients(family, kind, targets, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=targets, **KINDS[kind], **MAMBA.get(family, {}))
    model, reference = from_peft(folder, base, tmp_path, config)
    plain = load_model(folder)(IDS)
    expected, logits = reference(IDS).logits, model(IDS)
    assert (expected - plain).norm() > 0.2 * plain.norm()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)

    loss_of(expected).backward()
    loss_of(logits).backward()
    expected_grads = {_name(name): p.grad for name, p in reference.named_parameters() if p.requires_grad}
    grads = {model.source.module_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).norm() <= 1e-3 * expected_grads[name].norm(), name


def _name(name: str) -> str:
    """Our name of PEFT's parameter."""
    return (
        name.removeprefix("base_model.model.").replace(".default", "").replace("_embedding", "").removesuffix(".weight")
    )


@pytest.mark.first(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_reads_what_was_saved(kind, family, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family)
    model = load_model(folder)
    settings = {name.removeprefix("use_"): value for name, value in KINDS[kind].items()}
    apply_lora(model, LoRAConfig(rank=5, alpha=7, **settings))
    randomize(model)
    assert_peft_computes_it(model, base, tmp_path, 2e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 7)


@pytest.mark.first(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ["q_proj", "model.layers.1.*.down_proj"]},
        {"targets": ["all-linear", "lm_head", "embed_tokens"]},
        {"targets": ["lm_head", "embed_tokens"], "dora": True},
        {"init": "pissa"},
        {"init": "pissa", "rslora": True},
        {"init": "pissa", "dora": True},
    ],
    ids=str,
)
def test_peft_reads_every_choice_of_targets_and_starts(settings, adapted, make_checkpoint, tmp_path):
    _, base = make_checkpoint("llama_biases")
    assert_peft_computes_it(adapted(**settings), base, tmp_path)


def test_ranks_and_alphas_that_differ_by_layer_are_read(make_checkpoint, tmp_path):
    folder, base = make_checkpoint("qwen2")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
        layers_to_transform=[1],
    )
    model, reference = from_peft(folder, base, tmp_path, config)
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=2e-4, rtol=2e-4)
    assert_peft_computes_it(model, make_checkpoint("qwen2")[1], tmp_path / "again", 2e-4)


def test_several_adapters_add_up_as_with_peft(make_checkpoint, tmp_path):
    folder, base = make_checkpoint("qwen2")
    targets = {"first": ["q_proj", "up_proj"], "second": ["q_proj", "o_proj"]}
    reference = None
    for seed, (name, modules) in enumerate(targets.items()):
        config = peft.LoraConfig(r=3 + seed, lora_alpha=5, target_modules=modules)
        if reference is None:
            reference = peft.get_peft_model(base, config, adapter_name=name)
        else:
            reference.add_adapter(name, config)
        reference.set_adapter(name)
        randomize(reference, seed)
    reference.save_pretrained(tmp_path)
    reference.base_model.set_adapter(list(targets))
    model = load_model(folder)
    load_adapter(model, tmp_path / "first", tmp_path / "second")
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=2e-4, rtol=2e-4)


def test_a_dot_of_an_alpha_pattern_matches_any_character_as_in_peft(make_checkpoint, tmp_path):
    """`q.proj` is the pattern of q_proj too, and `layers.1` that of layers.1 alone, since a name's parts are whole."""
    folder, base = make_checkpoint("qwen2")
    patterns = {"layers.0.self_attn.q.proj": 3, r"layers\.[1-9]\..*(down|up).proj": 5, ".proj": 11, "q..roj": 7}
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"], alpha_pattern=patterns
    )
    model, _ = from_peft(folder, base, tmp_path, config)
    reference = peft.PeftModel.from_pretrained(make_checkpoint("qwen2")[1], tmp_path)  # PEFT has sorted the patterns
    alphas = {name: layer.shape.alpha for name, layer in adapted_layers(model).items()}
    layers = reference.base_model.model.named_modules()
    expected = {name: layer.lora_alpha["default"] for name, layer in layers if hasattr(layer, "lora_alpha")}
    assert alphas == expected and set(alphas.values()) == {3, 5, 7, 8}
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "patterns", [{"(a": 2}, {r"(q)\1": 2}, {"q_proj": float("nan")}, {"q_proj": -1}, {"q_proj": True}, [1], "x", 2]
)
def test_other_alpha_patterns_are_refused(patterns):
    with pytest.raises(ValueError, match="adapter_config.json: alpha_pattern"):
        stored_adapter._alphas(patterns, Path("adapter_config.json"))
