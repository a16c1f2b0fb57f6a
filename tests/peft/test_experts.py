"""Adapters of a mixture's experts equal PEFT's `target_parameters`, when read, written and merged."""

import copy
import shutil
from itertools import cycle

import pytest
import torch

from lean_ft import load_model
from lean_ft.models.frozen_weight import quantized_weights
from lean_ft.peft import adapted_layers, apply_lora, load_adapter, load_merged, quantize_as_loaded
from lean_ft.settings import LoRAConfig
from tests.models.family_cases import with_all_experts
from tests.models.test_dequantized import BLOCK, edit, in_4_bits, in_8_bits
from tests.peft.conftest import IDS, MIXTURES, assert_peft_computes_it, from_peft, loss_of, randomize

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROUTERS = {"gpt_oss": "router", "granitemoehybrid": "router", "gemma4_text_experts": "router.proj"}
ROUTERS["llama4_text"] = ROUTERS["phimoe"] = "router"
ROUTERS |= dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_swa"), "router")
ROUTERS["afmoe"] = "router"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


# One projection alone in layouts that differ: separate experts, stacks, and stacks with the input first.
ADAPTED = [(family, EXPERTS) for family in MIXTURES]
ADAPTED += [(family, [projection]) for family in ("mixtral", "gpt_oss", "llama4_text") for projection in EXPERTS]


@pytest.mark.first(3)
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


@pytest.mark.first(2)
@pytest.mark.parametrize("family", [*MIXTURES, "qwen3_moe_some_layers", "nemotron_h_experts"])
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


@pytest.mark.first(2)
@pytest.mark.parametrize(("family", "settings"), list(zip(MIXTURES, ROUTER_SETTINGS)), ids=str)  # noqa: B905
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
    *(("qwen3_moe_some_layers", {"targets": [target], "dora": True}, A_PARAMETER) for target in ("mlp.gate",
        "gate_proj")),
    *(("mixtral", {name: value}, "is a stack of experts") for name,
        value in (("dora", True), ("dropout", 0.1), ("init", "pissa"))),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "message"), REFUSED, ids=str)
def test_what_pefts_format_lacks_is_refused(family, settings, message, make_checkpoint):
    model = load_model(make_checkpoint(family)[0])
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(**settings))
    assert all(p.requires_grad for p in model.parameters())
    apply_lora(model, LoRAConfig(**{**settings, "targets": ATTENTION}))


# The case, the quantization of its folder, lora.quantize, and the forms of the weights: of experts, of linear layers.
QUANTIZED = [
    ("qwen3_moe", None, "nf4", ("nf4", "nf4")),
    ("mixtral", None, "float8", ("float8", "float8")),
    ("llama4_text", None, "nf4", ("nf4", "nf4")),
    ("gpt_oss", "mxfp4", "auto", ("mxfp4",)),
    ("gpt_oss", "mxfp4", "nf4", ("mxfp4", "nf4")),
    ("gpt_oss", "mxfp4", "none", ()),
    ("qwen3_moe", "fp8", "as_stored", ("float8", "float8")),
    ("qwen3_moe", "fp8", "nf4", ("nf4", "nf4")),
]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}


def quantized_folder(make_checkpoint, case, method, destination):
    """A copy of a case's folder with quantized weights, and transformers' model with the dequantized weights in
    float32."""
    folder, base = make_checkpoint(case, dtype=torch.bfloat16, **SIZES)
    shutil.copytree(folder, destination)
    if method == "mxfp4":
        expected = edit(destination, in_4_bits, {"quant_method": "mxfp4"})
        base.load_state_dict(expected, strict=False)
    elif method == "fp8":
        edit(destination, in_8_bits(BLOCK), {"quant_method": "fp8", "weight_block_size": BLOCK})
    return destination, base.float()


@pytest.mark.first(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "method", "quantize", "forms"), QUANTIZED, ids=str)
def test_quantized_weights_compute_what_dequantized_ones_do(
    case, method, quantize, forms, dtype, make_checkpoint, tmp_path
):
    """Outputs and all gradients bitwise, with adapters on experts and linear layers."""
    folder, _ = quantized_folder(make_checkpoint, case, method, tmp_path / "base")
    cfg = LoRAConfig(rank=3, quantize=quantize)
    model = load_model(folder, dtype=dtype, quantize=quantize_as_loaded(cfg.quantize))
    weights = quantized_weights(model)
    of_experts, of_layers = (
        {w.form.kind for n, w in weights.items() if ("experts" in n) is is_of} for is_of in (True, False)
    )
    assert (*of_experts, *of_layers) == forms
    reference = load_model(folder, dtype=dtype)
    for name, weight in weights.items():
        whole = weight.frozen.whole()
        if method is not None and weight.form.kind in ("mxfp4", "float8"):
            assert torch.equal(whole, reference.get_parameter(name)), name
        reference.get_parameter(name).data = whole
    for each in (model, reference):
        apply_lora(each, cfg)
        randomize(each)
    results = []
    for each in (model, reference):
        logits = each(IDS)
        loss_of(logits).backward()
        results.append({"": logits} | {n: p.grad for n, p in each.named_parameters() if p.requires_grad})
    assert results[0].keys() == results[1].keys() and len(results[0]) > 8
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.long
def test_gpt_oss_in_4_bits_trains_as_transformers_and_peft_do(make_checkpoint, tmp_path):
    """With dequantized weights there: logits, and 20 steps. PEFT opens the trained adapter, and a merge computes the
    same."""
    folder, base = quantized_folder(make_checkpoint, "gpt_oss", "mxfp4", tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=ATTENTION, target_parameters=EXPERTS)
    reference = peft.get_peft_model(copy.deepcopy(base), config)
    randomize(reference)
    reference.save_pretrained(tmp_path / "start")
    model = load_model(folder, quantize=quantize_as_loaded("auto"))
    assert {w.form.kind for w in quantized_weights(model).values()} == {"mxfp4"}
    load_adapter(model, tmp_path / "start")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    courses = []
    for each, logits_of in ((model, lambda m: m(IDS)), (reference, lambda m: m(IDS).logits)):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-3)
        courses.append([])
        for _ in range(20):
            loss = loss_of(logits_of(each))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            courses[-1].append(loss.item())
    assert courses[0] == pytest.approx(courses[1], rel=1e-4)
    assert courses[0][-1] < courses[0][0] - 0.1
    assert_peft_computes_it(model, base, tmp_path / "trained", 2e-3)
    merged, _ = load_merged(tmp_path / "trained", folder, dtype=torch.float32)
    torch.testing.assert_close(merged(IDS), model(IDS), atol=5e-4, rtol=5e-4)


REFUSED_SIZES = [
    ("mixtral", {"hidden_size": 24, "intermediate_size": 6}, "nf4", "blocks of 64 values, .* Set lora.quantize=float8"),
    ("mixtral", {}, "as_stored", "config.json is absent. Set lora.quantize=nf4, float8 or none"),
]


@pytest.mark.parametrize(("case", "sizes", "quantize", "message"), REFUSED_SIZES, ids=str)
def test_experts_that_cannot_be_quantized_are_refused(case, sizes, quantize, message, make_checkpoint):
    folder, _ = make_checkpoint(case, **sizes)
    with pytest.raises(ValueError, match=message):
        load_model(folder, quantize=quantize_as_loaded(quantize))
