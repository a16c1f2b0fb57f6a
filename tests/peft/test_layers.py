"""Adapted layers equal the plain computation in values and gradients, keep little, and work with memory techniques."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_ft import load_model
from lean_ft.memory import apply_memory
from lean_ft.models.frozen_weight import FrozenLinear
from lean_ft.peft import adapted_layers, apply_lora, quantize_as_loaded
from lean_ft.peft.layers import AdapterShape, LoRALinear
from lean_ft.quantize.nf4 import to_nf4
from lean_ft.settings import LoRAConfig, MemoryConfig
from lean_ft.system.passes import evaluating
from tests.models.conftest import kept_bytes
from tests.peft.conftest import IDS, loss_of, randomize

NUM_INPUTS, NUM_OUTPUTS = 64, 96


def linear_layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=bias)
    return linear.to(dtype).requires_grad_(False)


def adapted_layer(linear: nn.Module, **shape) -> LoRALinear:
    layer = LoRALinear(linear, AdapterShape(**{"rank": 4, "alpha": 6.0, **shape}), torch.float32)
    layer.start_at_zero()
    randomize(layer)
    return layer


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(2, 30, NUM_INPUTS, generator=torch.Generator().manual_seed(5))
    return x.to(dtype).requires_grad_()


def plainly(layer: LoRALinear, x: Tensor, weight: Tensor) -> Tensor:
    """The formula of LoRA or DoRA, the merged weight written out."""
    whole = weight + layer.shape.scaling * layer.lora_B @ layer.lora_A
    if layer.lora_magnitude_vector is not None:
        whole = whole * (layer.lora_magnitude_vector / whole.norm(dim=1).detach())[:, None]
    bias = layer.base_layer.bias
    return F.linear(x, whole, None if bias is None else bias.to(x.dtype))


def grads(layer: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    trained = [p for p in layer.parameters() if p.requires_grad]
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.dtype)
    return list(torch.autograd.grad(y, [x, *trained], seed))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_values_and_gradients_equal_the_formula(dora, bias, quantized):
    linear = linear_layer(bias)
    layer = adapted_layer(
        FrozenLinear(to_nf4(linear.weight), linear.bias) if quantized else linear, dora=dora, rslora=True
    )
    assert layer.shape.scaling == 6.0 / 2.0
    x, weight = inputs(), layer.linear_weight().clone()
    expected, y = plainly(layer, x, weight), layer(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    for grad, expected_grad in zip(grads(layer, x, y), grads(layer, x, expected), strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_bfloat16_is_as_near_as_its_rounding(dora):
    linear = linear_layer(dtype=torch.bfloat16)
    layer = adapted_layer(linear, dora=dora)
    x = inputs(torch.bfloat16)
    y = layer(x)
    wide = x.detach().float().requires_grad_()
    exact = plainly(layer, wide, linear.weight.float())
    assert y.dtype == torch.bfloat16
    for ours, theirs in zip([y, *grads(layer, x, y)], [exact, *grads(layer, wide, exact)], strict=True):
        assert (ours.float() - theirs).norm() <= 0.01 * theirs.norm()
    assert all(grad.dtype == torch.float32 for grad in grads(layer, x, layer(x))[1:])


def test_dropout_drops_inputs_of_the_adapter_alone():
    layer = adapted_layer(linear_layer(), dropout=0.25)
    x = inputs()
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    dropped = F.dropout(x, 0.25)
    low_rank = layer.shape.scaling * dropped @ layer.lora_A.T @ layer.lora_B.T
    expected = layer.base_layer(x) + low_rank
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    for grad, expected_grad in zip(grads(layer, x, y), grads(layer, x, expected), strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-4)
    torch.manual_seed(1)
    with torch.no_grad():  # the first pass of gradient caching
        assert torch.equal(layer(x), y)
    with evaluating(layer):  # in the middle of training
        torch.testing.assert_close(layer(x), plainly(layer, x, layer.linear_weight()), atol=1e-5, rtol=1e-5)


def test_autocast_computes_in_its_own_dtype():
    layer = adapted_layer(linear_layer())
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    exact = plainly(layer, x, layer.linear_weight())
    for ours, theirs in zip(grads(layer, x, y), grads(layer, x, exact), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()


@pytest.mark.parametrize("quantized", [False, True])
def test_nothing_wider_than_the_rank_is_kept(quantized):
    linear = linear_layer()
    x = inputs()
    num_tokens = x[..., 0].numel()
    layer = adapted_layer(FrozenLinear(to_nf4(linear.weight), linear.bias) if quantized else linear)
    assert kept_bytes(lambda: layer(x), layer, x) == 4 * num_tokens * layer.shape.rank
    dropping = adapted_layer(linear, dropout=0.5)
    assert (
        kept_bytes(lambda: dropping(x), dropping, x) == 4 * num_tokens * dropping.shape.rank + num_tokens * NUM_INPUTS
    )


TECHNIQUES = [("full", "attention"), ("selective", "attention"), ("selective", "products")]
SETTINGS = [{}, {"dora": True}, {"dropout": 0.3}, {"quantize": "nf4"}, {"init": "pissa"}]
CHECKPOINTED = [("llama_biases", settings, *kind) for settings in SETTINGS for kind in TECHNIQUES]


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("case", "settings", "checkpointing", "keeps"), [*CHECKPOINTED, ("olmoe", {}, "full", "attention")], ids=str
)
def test_checkpointing_changes_no_gradient(case, settings, checkpointing, keeps, make_checkpoint):
    cfg, results, (folder, _) = LoRAConfig(rank=4, **settings), [], make_checkpoint(case)
    for memory in (MemoryConfig(), MemoryConfig(activation_checkpointing=checkpointing, selective_keeps=keeps)):
        torch.manual_seed(0)
        model = load_model(folder, quantize=quantize_as_loaded(cfg.quantize))
        apply_lora(model, cfg)
        randomize(model)
        apply_memory(model, memory, compile=False)
        torch.manual_seed(1)
        loss_of(model(IDS)).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "checkpointing", "backend"),
    [
        ({"quantize": "nf4", "dropout": 0.3}, "full", "aot_eager_decomp_partition"),
        pytest.param({"quantize": "nf4", "dropout": 0.3}, "full", "inductor", marks=pytest.mark.long),
        pytest.param({"dora": True}, "selective", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_gradients_are_the_slope_of_the_loss(settings, checkpointing, backend, tiny_folder, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: real(f, **{"backend": backend, **kwargs}))
    # Two float32 losses of about 2 have errors up to 1e-6: over 2e-3 that is 5e-4 of the adapter's slope of 0.93. The
    # slope along DoRA's magnitudes is 0.13, with less curvature. Adapters on only two projections keep curvature small.
    step_length = 1e-2 if settings.get("dora") else 1e-3
    cfg = LoRAConfig(rank=4, targets=["v_proj", "down_proj"], **settings)
    model = load_model(tiny_folder, quantize=quantize_as_loaded(cfg.quantize))
    del model.model.layers[1:]
    apply_lora(model, cfg)
    randomize(model)
    apply_memory(model, MemoryConfig(activation_checkpointing=checkpointing), compile=True)
    # Backward treats DoRA's norm as a constant, so only along the magnitudes is its gradient a slope.
    wanted = "magnitude" if cfg.dora else "lora"
    trained = [p for n, p in model.named_parameters() if p.requires_grad and wanted in n]

    def loss() -> Tensor:
        torch.manual_seed(1)  # the same dropout each time
        return model(IDS).double().square().mean()

    loss().backward()
    length = math.sqrt(sum(p.grad.square().sum().item() for p in trained))
    steps = [p.grad / length * step_length for p in trained]
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, step in zip(trained, steps, strict=True):
                parameter.add_(step, alpha=sign)
        values.append(loss().item())
    assert (values[0] - values[1]) / (2 * step_length) == pytest.approx(length, rel=0.005)


def test_a_start_at_zero_leaves_the_model_as_it_was(tiny_folder):
    plain = load_model(tiny_folder)(IDS)
    for settings in ({}, {"dora": True}, {"targets": ["embed_tokens", "lm_head", "all-linear"]}):
        model = load_model(tiny_folder)
        apply_lora(model, LoRAConfig(**settings))
        torch.testing.assert_close(model(IDS), plain, atol=1e-5, rtol=1e-5)


def test_pissa_starts_with_the_largest_singular_directions(tiny_folder):
    weights = {name: p.clone() for name, p in load_model(tiny_folder).named_parameters()}
    model = load_model(tiny_folder)
    torch.manual_seed(0)
    apply_lora(model, LoRAConfig(rank=6, alpha=9, init="pissa"))
    for name, layer in adapted_layers(model).items():
        weight = weights[f"{name}.weight"]
        assert torch.equal(layer.base_layer.weight, weight), "the frozen weight was changed"
        rest = weight - layer.shape.scaling * layer.lora_B @ layer.lora_A
        smallest = torch.linalg.svdvals(weight)[6:].norm()
        assert rest.norm() <= 1.02 * smallest
        torch.testing.assert_close(layer.lora_A.norm(dim=1), layer.lora_B.norm(dim=0), rtol=1e-4, atol=1e-6)
