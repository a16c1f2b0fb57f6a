"""Float8 products round only their factors, under adapters too, and are refused on devices without them."""

import pytest
import torch
from torch import Tensor, nn

from lean_ft.memory import apply_memory, float8_products
from lean_ft.models import Decoder
from lean_ft.models.frozen_weight import Form, Frozen, FrozenLinear, as_frozen
from lean_ft.peft import apply_lora
from lean_ft.peft.layers import AdapterShape, LoRALinear, adapted_layers
from lean_ft.settings import LoRAConfig, MemoryConfig
from tests.memory.tiny_step import backward, relative_error, tiny

pytest.importorskip("torchao.float8")


class OneLayer(nn.Module):
    def __init__(self, inner: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, inner, bias=False))])


def add_adapters(model: Decoder, targets: list[str]) -> None:
    torch.manual_seed(0)
    apply_lora(model, LoRAConfig.model_validate({"rank": 2, "targets": targets}))
    for module in adapted_layers(model).values():
        nn.init.normal_(module.lora_B, std=0.05)  # of a new adapter they are zero, and so are A's gradients


def in_one(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"all": torch.cat([gradient.flatten() for gradient in gradients.values()])}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To float8 and back, scaled by the largest magnitude."""
    scale = torch.finfo(dtype).max / x.abs().max().double()
    return (x.double() * scale).to(dtype).double() / scale


def test_a_product_and_its_gradients_have_factors_rounded_to_float8() -> None:
    model = OneLayer()
    assert float8_products(model, emulate=True) == 1
    weight = model.layers[0][0].weight
    x, grad = torch.randn(10, 32, requires_grad=True), torch.randn(10, 48)
    out = model.layers[0](x)
    out.backward(grad)
    e4m3 = torch.float8_e4m3fn
    exact_x, exact_weight = rounded(x.detach(), e4m3), rounded(weight.detach(), e4m3)
    exact_grad = rounded(grad, torch.float8_e5m2)
    torch.testing.assert_close(out.double(), exact_x @ exact_weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), exact_grad @ exact_weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), exact_grad.T @ exact_x, rtol=1e-4, atol=1e-4)


def test_the_models_parameters_stay_and_its_gradients_are_near() -> None:
    model, plain = tiny(), tiny()
    names = [name for name, _ in model.named_parameters()]
    assert float8_products(model, emulate=True) == 7 * len(model.layers)
    assert [name for name, _ in model.named_parameters()] == names
    assert 1e-3 < relative_error(backward(model), backward(plain)) < 0.3


def test_unsupported_devices_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the model is on cpu, which has none. Set memory.float8_products=false"):
        apply_memory(tiny(), MemoryConfig(float8_products=True), compile=False)
    with pytest.raises(ValueError, match="multiples of 16"):
        float8_products(OneLayer(inner=40), emulate=True)


def by_row(x: Tensor) -> Tensor:
    """To e4m3 and back, with a scale per row."""
    scales = torch.finfo(torch.float8_e4m3fn).max / x.abs().amax(-1, keepdim=True).double()
    return (x.double() * scales).to(torch.float8_e4m3fn).double() / scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["plain", "rows", "blocks"])
@pytest.mark.parametrize("adapter", [True, False])
def test_a_frozen_weight_multiplies_rounded_rows(adapter: bool, stored: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = (
        nn.Parameter(torch.randn(48, 32, dtype=dtype), False),
        nn.Parameter(torch.randn(48, dtype=dtype), False),
    )
    numbers = weight.data.to(torch.float8_e4m3fn)
    scales = torch.rand(48, 1 if stored == "rows" else 2) + 0.1
    frozen = weight if stored == "plain" else Frozen(Form("float8", (48, 32), dtype), (numbers, scales))
    layer: nn.Module = FrozenLinear(frozen, bias)
    x, grad = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True), torch.randn(2, 5, 48, dtype=dtype)
    if adapter:
        layer = LoRALinear(layer, AdapterShape(4, 8.0), torch.float32)
        a, b = nn.init.normal_(layer.lora_A), nn.init.normal_(layer.lora_B)
    model = OneLayer()
    model.layers[0] = nn.Sequential(layer)
    assert float8_products(model, emulate=True) == 1
    out = model.layers[0](x)
    out.backward(grad)

    dense = layer.frozen.whole().detach() if adapter else as_frozen(layer.weight).whole().detach()
    forward = numbers.double() * scales if stored == "rows" else by_row(dense)
    exact = by_row(x.detach()) @ forward.T + bias
    if stored == "rows":  # the scales multiply the gradient before it is rounded
        exact_grad = by_row(grad * scales.T) @ numbers.double()
    else:
        exact_grad = by_row(grad) @ by_row(dense.T).T
    if adapter:
        exact += 2.0 * x.detach().double() @ a.double().T @ b.double().T
        exact_grad += 2.0 * grad.double() @ b.double() @ a.double()
    for ours, theirs in ((out, exact), (x.grad, exact_grad)):
        assert ours.dtype == dtype and relative_error({"": ours.detach()}, {"": theirs.detach()}) < 1e-2


def test_gradients_of_adapters_are_near_those_of_plain_products() -> None:
    """Also where only some of the frozen layers have an adapter. The parameters keep their names."""
    for targets in (["all-linear"], ["q_proj"]):
        gradients, names = [], []
        for float8 in (False, True):
            model = tiny()
            add_adapters(model, targets)
            if float8:
                assert float8_products(model, emulate=True) == 7 * len(model.layers)
            names.append(list(model.state_dict()))
            gradients.append(backward(model))
        assert names[0] == names[1]
        assert 1e-3 < relative_error(*map(in_one, reversed(gradients))) < 0.25


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_gradients_are_near_those_of_bfloat16(compile: bool, lora: bool) -> None:
    gradients = []
    for float8 in (False, True):
        model = tiny(torch.bfloat16).cuda()
        if float8 and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no float8 products")
        if lora:
            add_adapters(model, ["all-linear"])
        apply_memory(model, MemoryConfig(float8_products=float8), compile=compile)
        model(torch.arange(106).view(2, 53).cuda()).float().square().mean().backward()  # tokens that need padding
        gradients.append({name: param.grad.cpu() for name, param in model.named_parameters() if param.requires_grad})
    assert 1e-3 < relative_error(*map(in_one, reversed(gradients))) < 0.3
