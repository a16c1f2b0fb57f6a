"""Float8 products round only their factors, and are refused on devices without them."""

import pytest
import torch
from torch import Tensor, nn

from lean_ft.memory import apply_memory, float8_products
from lean_ft.peft import apply_lora
from lean_ft.settings import LoRAConfig, MemoryConfig
from tests.memory.tiny_step import backward, relative_error, tiny

pytest.importorskip("torchao.float8")


class OneLayer(nn.Module):
    def __init__(self, inner: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, inner, bias=False))])


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
    for targets in (["all-linear"], ["q_proj"]):  # an adapter's layer would not call the float8 layer
        adapted = tiny()
        apply_lora(adapted, LoRAConfig(rank=2, targets=targets))
        with pytest.raises(ValueError, match="does not support adapters: their layers multiply the frozen weights"):
            float8_products(adapted, emulate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_gradients_are_near_those_of_bfloat16(compile: bool) -> None:
    gradients = []
    for float8 in (False, True):
        model = tiny(torch.bfloat16).cuda()
        if float8 and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no float8 products")
        apply_memory(model, MemoryConfig(float8_products=float8), compile=compile)
        model(torch.arange(106).view(2, 53).cuda()).float().square().mean().backward()  # tokens that need padding
        gradients.append({name: param.grad.cpu() for name, param in model.named_parameters()})
    assert 1e-3 < relative_error(gradients[1], gradients[0]) < 0.3
