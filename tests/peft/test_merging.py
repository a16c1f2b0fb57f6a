"""Merged weights compute what the adapter did, within the reported rounding error."""

import pytest
import torch

from lean_ft import load_model
from lean_ft.peft import (
    adapted_layers,
    apply_lora,
    load_adapter,
    load_merged,
    quantize_as_loaded,
    save_adapter,
)
from lean_ft.settings import LoRAConfig
from tests.peft.conftest import IDS, randomize

KINDS = [{}, {"dora": True}, {"init": "pissa"}, {"targets": ["all-linear", "lm_head", "embed_tokens"]}]


@torch.no_grad()
def with_weights(folder, weights):
    model = load_model(folder)
    for name, tensor in weights.items():
        model.get_parameter(name).copy_(tensor)
    return model


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_merged_logits_equal_the_adapters(settings, adapted, tmp_path):
    model = adapted(**settings)
    expected = model(IDS)
    save_adapter(model, tmp_path)
    loaded, report = load_merged(tmp_path, dtype=torch.float32)
    assert report.num_layers == len(adapted_layers(model))
    assert report.rounding_error == 0.0
    assert report.change > 0.1
    plain = load_model(model.source.folder)
    assert dict(loaded.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    torch.testing.assert_close(loaded(IDS), expected, atol=5e-4, rtol=5e-4)


def test_the_report_states_what_rounding_costs(adapted, tmp_path):
    model = adapted(dtype=torch.bfloat16)
    save_adapter(model, tmp_path)
    loaded, report = load_merged(tmp_path)
    merged = dict(loaded.named_parameters())
    exact, error, size = 0.0, 0.0, 0.0
    for name, layer in adapted_layers(model).items():
        weight, tensor = layer.base_layer.weight.double(), merged[f"{name}.weight"]
        wanted = weight + layer.shape.scaling * layer.lora_B.double() @ layer.lora_A.double()
        assert tensor.dtype == torch.bfloat16
        error += (tensor.double() - wanted).square().sum().item()
        exact += (wanted - weight).square().sum().item()
        size += weight.square().sum().item()
    assert report.rounding_error == pytest.approx((error / size) ** 0.5, rel=1e-3)
    assert report.change == pytest.approx((exact / size) ** 0.5, rel=1e-3)
    assert "bfloat16" in str(report)

    # In float32, the rounded weights change the logits by a few times the rounding error.
    unrounded = {f"{name}.weight": layer.merged_weight() for name, layer in adapted_layers(model).items()}
    reference = with_weights(model.source.folder, {n: t.float() for n, t in (merged | unrounded).items()})
    rounded = with_weights(model.source.folder, merged)
    moved = (rounded(IDS) - reference(IDS)).norm() / reference(IDS).norm()
    assert 0 < moved < 30 * report.rounding_error


def test_an_adapter_of_a_quantized_model_is_merged_into_the_unquantized_model(tiny_folder, tmp_path):
    cfg = LoRAConfig(rank=4, quantize="nf4")
    model = load_model(tiny_folder, quantize=quantize_as_loaded(cfg.quantize))
    apply_lora(model, cfg)
    randomize(model)
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="is quantized, and an adapter can be merged only into unquantized weights"):
        load_merged(tmp_path, quantize=quantize_as_loaded(cfg.quantize))
    merged, _ = load_merged(tmp_path, dtype=torch.float32)
    reference = load_model(tiny_folder)
    load_adapter(reference, tmp_path)
    torch.testing.assert_close(merged(IDS), reference(IDS), atol=5e-4, rtol=5e-4)
