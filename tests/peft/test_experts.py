"""Adapters of a mixture's experts equal PEFT's `target_parameters`, when read, written and merged."""

from itertools import cycle

import pytest
import torch

from lean_ft import load_model
from lean_ft.peft import adapted_layers, apply_lora, load_merged, quantize_as_loaded
from lean_ft.settings import LoRAConfig
from tests.models.family_cases import with_all_experts
from tests.peft.conftest import IDS, MIXTURES, assert_peft_computes_it, from_peft, loss_of, randomize

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROUTERS = {"gpt_oss": "router", "granitemoehybrid": "router", "gemma4_text_experts": "router.proj"}
ROUTERS["llama4_text"] = ROUTERS["phimoe"] = "router"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


# One projection alone in layouts that differ: separate experts, stacks, and stacks with the input first.
ADAPTED = [(family, EXPERTS) for family in sorted(MIXTURES)]
ADAPTED += [(family, [projection]) for family in ("mixtral", "gpt_oss", "llama4_text") for projection in EXPERTS]


@pytest.mark.parametrize(("family", "targets"), ADAPTED, ids=str)
def test_an_adapter_of_peft_has_its_logits_and_gradients(family, targets, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family)
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=ATTENTION, target_parameters=targets, use_rslora=True)
    model, reference = from_peft(folder, base, tmp_path, config)
    plain = load_model(folder)(IDS)
    expected, logits = reference(IDS).logits, model(IDS)
    assert (expected - plain).norm() > 0.2 * plain.norm()
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=5e-4)

    loss_of(expected).backward()
    loss_of(logits).backward()
    expected_grads = sorted((p.shape, p.grad.norm().item()) for p in reference.parameters() if p.requires_grad)
    grads = sorted((p.shape, p.grad.norm().item()) for p in model.parameters() if p.requires_grad)
    assert [shape for shape, _ in grads] == [shape for shape, _ in expected_grads]
    for (_, grad), (_, expected_grad) in zip(grads, expected_grads, strict=True):
        assert grad == pytest.approx(expected_grad, rel=5e-3)


def test_the_default_targets_of_peft_name_routers_too(make_checkpoint, tmp_path):
    folder, base = make_checkpoint("mixtral")
    model, reference = from_peft(folder, base, tmp_path, peft.LoraConfig(r=3, target_modules="all-linear"))
    assert "model.layers.0.mlp.gate" in adapted_layers(model)
    torch.testing.assert_close(model(IDS), reference(IDS).logits, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("family", [*sorted(MIXTURES), "qwen3_moe_some_layers", "nemotron_h_experts"])
def test_peft_reads_what_was_saved_and_a_merge_computes_the_same(family, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family)
    model = load_model(folder)
    apply_lora(model, LoRAConfig(rank=3, alpha=5))
    assert any(name.endswith(".experts.down_proj") for name in adapted_layers(model))
    torch.testing.assert_close(model(IDS), load_model(folder)(IDS))
    randomize(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_peft_computes_it(model, base, tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged, report = load_merged(tmp_path, dtype=torch.float32)
    assert report.num_layers == len(adapted_layers(model))
    assert dict(merged.named_parameters()).keys() == dict(load_model(folder).named_parameters()).keys()
    torch.testing.assert_close(merged(IDS), model(IDS), atol=5e-4, rtol=5e-4)


ROUTER_SETTINGS = cycle([{}, {"rslora": True}, {"init": "pissa"}, {"dropout": 0.1}])


@pytest.mark.parametrize(("family", "settings"), list(zip(sorted(MIXTURES), ROUTER_SETTINGS)), ids=str)  # noqa: B905
def test_peft_reads_the_adapter_of_a_router(family, settings, make_checkpoint, tmp_path):
    folder, base = make_checkpoint(family, **with_all_experts(family))
    model = load_model(folder)
    router = ROUTERS.get(family, "gate")
    apply_lora(model, LoRAConfig(rank=2, alpha=5, targets=[router, "o_proj"], **settings))
    randomize(model)
    assert_peft_computes_it(model.eval(), base, tmp_path)
    assert (model(IDS) - load_model(folder)(IDS)).abs().max() > 0.1


A_PARAMETER = r"mlp\.gate.* is a parameter to PEFT.* only plain LoRA: lora\.dora is not"
REFUSED = [
    *(("qwen3_moe_some_layers", {"targets": [target], "dora": True}, A_PARAMETER) for target in ("mlp.gate", "gate_proj")),
    *(("mixtral", {name: value}, "is a stack of experts") for name, value in (("dora", True), ("dropout", 0.1), ("init", "pissa"))),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "message"), REFUSED, ids=str)
def test_what_pefts_format_lacks_is_refused(family, settings, message, make_checkpoint):
    model = load_model(make_checkpoint(family)[0])
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(**settings))
    assert all(p.requires_grad for p in model.parameters())
    apply_lora(model, LoRAConfig(**{**settings, "targets": ATTENTION}))


def test_stacks_are_not_quantized(make_checkpoint):
    folder, _ = make_checkpoint("mixtral")
    with pytest.raises(ValueError, match="does not support this model.s stacked experts"):
        load_model(folder, after_module=quantize_as_loaded(LoRAConfig(quantize="nf4")))
