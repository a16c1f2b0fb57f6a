"""Adapters equal PEFT's in logits and gradients, and each library reads the other's files."""

import json
import re
from pathlib import Path

import pytest
import torch

from lean_ft import load_model
from lean_ft.models.names_on_disk import module_on_disk
from lean_ft.peft import apply_lora, load_adapter, peft_format, save_adapter
from lean_ft.settings import LoRAConfig
from tests.peft.conftest import FAMILIES, IDS, loss_of, randomize

peft = pytest.importorskip("peft")

KINDS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
# PEFT refuses an adapter of Mamba-2's output projection in these families.
EXCLUDED = {"exclude_modules": ["out_proj"]}
MAMBA = {"falcon_h1": EXCLUDED, "nemotron_h": EXCLUDED}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_an_adapter_of_peft_has_its_logits_and_gradients(kind, family, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules="all-linear", **KINDS[kind], **MAMBA.get(family, {}))
    reference = peft.get_peft_model(base, config)
    randomize(reference)
    reference.save_pretrained(tmp_path)
    model = load_model(folder)
    plain = model(IDS)
    load_adapter(model, tmp_path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base_layer" not in name and "lora" in name)
    expected, logits = reference(IDS).logits, model(IDS)
    assert (expected - plain).norm() > 0.2 * plain.norm()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)

    loss_of(expected).backward()
    loss_of(logits).backward()
    expected_grads = {_name(name): p.grad for name, p in reference.named_parameters() if p.requires_grad}
    own = model.source.config
    grads = {module_on_disk(own, name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).norm() <= 1e-3 * expected_grads[name].norm(), name


def _name(name: str) -> str:
    """Our name of PEFT's parameter."""
    name = name.removeprefix("base_model.model.").replace(".default", "")
    return name if "embedding" in name else name.removesuffix(".weight")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_reads_what_was_saved(kind, family, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family)
    model = load_model(folder)
    settings = {name.removeprefix("use_"): value for name, value in KINDS[kind].items()}
    apply_lora(model, LoRAConfig(rank=5, alpha=7, **settings))
    randomize(model)
    save_adapter(model, tmp_path)
    reference = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(reference(IDS).logits, model(IDS), atol=2e-4, rtol=2e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 7)


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
    model = adapted(**settings)
    save_adapter(model, tmp_path)
    _, base = make_checkpoint("llama_biases")
    reference = peft.PeftModel.from_pretrained(base, tmp_path)
    logits = model(IDS)
    torch.testing.assert_close(reference(IDS).logits, logits, atol=5e-4, rtol=5e-4)

    again = load_model(model.source.folder)
    load_adapter(again, tmp_path)
    torch.testing.assert_close(again(IDS), logits, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_embedding_and_output_have_the_gradients_of_peft(kind, make_checkpoint, tmp_path):
    folder, base = make_checkpoint("llama")
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=["embed_tokens", "lm_head", "q_proj"], **KINDS[kind])
    reference = peft.get_peft_model(base, config)
    randomize(reference)
    reference.save_pretrained(tmp_path)  # also saves the embedding's weight
    model = load_model(folder)
    load_adapter(model, tmp_path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base_layer" not in name and "lora" in name)
    logits, expected = model(IDS), reference(IDS).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    loss_of(logits).backward()
    loss_of(expected).backward()
    expected_grads = {_name(n).replace("_embedding", ""): p.grad for n, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert (parameter.grad - expected_grads[name]).norm() <= 1e-3 * expected_grads[name].norm(), name


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
    reference = peft.get_peft_model(base, config)
    randomize(reference)
    reference.save_pretrained(tmp_path)
    model = load_model(folder)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=2e-4, rtol=2e-4)
    save_adapter(model, tmp_path / "again")
    _, fresh = make_checkpoint("qwen2")
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "again")
    torch.testing.assert_close(again(IDS).logits, model(IDS), atol=2e-4, rtol=2e-4)


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


def test_pissa_starts_as_peft_does(make_checkpoint, monkeypatch):
    monkeypatch.setattr("lean_ft.peft.layers._PISSA_ITERATIONS", 60)  # random weights have no dominant directions
    folder, base = make_checkpoint("llama")
    model = load_model(folder)
    before = model(IDS)
    torch.manual_seed(0)
    apply_lora(model, LoRAConfig(rank=4, alpha=6, init="pissa"))
    reference = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights="pissa")
    )
    logits, expected = model(IDS), reference(IDS).logits
    torch.testing.assert_close(logits, before, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)
    loss_of(logits).backward()
    loss_of(expected).backward()
    grads = {_name(name): (p, p.grad) for name, p in reference.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A pair of singular vectors may have the opposite sign, and so may its gradient.
            theirs, grad = grads[name]
            turned = (parameter * theirs).sum(0 if "lora_B" in name else 1).sign()
            turned = turned if "lora_B" in name else turned[:, None]
            assert (parameter * turned - theirs).norm() <= 0.02 * theirs.norm(), name
            assert (parameter.grad * turned - grad).norm() <= 0.02 * grad.norm(), name


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({}, 16),
        ({"q_proj": 2}, 2),
        ({"proj": 2}, 16),
        ({"self_attn.q_proj": 3, "q_proj": 2}, 3),
        ({"q_proj$": 2, "self_attn.q_proj": 3}, 2),
        ({"^model.layers.1.self_attn.q_proj": 4}, 4),
        ({r"^model\.layers\.1\.self_attn\.q_proj$": 4}, 4),
        ({"^self_attn.q_proj": 4}, 16),
        ({r".*\.q_proj": 5}, 5),
    ],
)
def test_alpha_patterns_match_as_pefts_do(patterns, expected):
    layer = "model.layers.1.self_attn.q_proj"
    matching = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    assert next(matching, 16) == expected
    config = {"lora_alpha": 16, "alpha_pattern": peft_format._alphas(patterns, Path())}
    assert peft_format._stored_shape(config, layer, 8).alpha == expected


@pytest.mark.parametrize(
    "patterns",
    [{"(a+)+$|(.*)*(.*)*x": 2}, {"(": 2}, {"q_proj": float("nan")}, {"q_proj": -1}, {"q_proj": True}, [1], "x"],
)
def test_other_alpha_patterns_are_refused(patterns):
    with pytest.raises(ValueError, match="alpha_pattern has"):
        peft_format._alphas(patterns, Path())
