"""The norm and the gated layer against float64 and transformers."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lean_ft import models, peft
from lean_ft.models import MLP, RMSNorm
from lean_ft.models.layers import ACTIVATIONS


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("offset", "reference"), [(0.0, LlamaRMSNorm), (1.0, GemmaRMSNorm)])
def test_norm_is_as_exact_as_transformers(dtype, offset, reference):
    norm, theirs = filled(RMSNorm(96, 1e-2, offset)).to(dtype), reference(96, eps=1e-2).to(dtype)
    assert torch.equal(RMSNorm(96, 1e-2, offset).weight, reference(96).weight)
    theirs.load_state_dict(norm.state_dict())
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(2, 30, 96, generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(2, 30, 96, generator=generator).to(dtype)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    exact = exact_norm(exact_x, exact_weight + offset, 1e-2)
    exact_grads = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())

    def errors(module: torch.nn.Module) -> list[float]:
        result = module(x)
        assert result.dtype == dtype
        grads = torch.autograd.grad(result, (x, *module.parameters()), grad)
        pairs = zip((result, *grads), (exact, *exact_grads), strict=True)
        return [((own - true).norm() / true.norm()).item() for own, true in pairs]

    for own, their in zip(errors(norm), errors(theirs), strict=True):
        assert own <= 1.05 * their


def test_a_frozen_norm_weight_gets_no_gradient_and_its_input_does():
    norm = RMSNorm(8, eps=1e-6).requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is None


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid()


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("activation", "exact_activation"),
    [("silu", silu), ("gelu", gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_gated_layer_equals_autograd_in_float64(activation, exact_activation, fused):
    mlp = filled(MLP(10, 24, bias=True, activation=activation, fused=fused))
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(2), requires_grad=True)
    leaves = [x, *mlp.parameters()]
    exact_x, *exact = (t.detach().double().requires_grad_() for t in leaves)
    if fused:
        both_w, both_b, down_w, down_b = exact
        (gate_w, up_w), (gate_b, up_b) = both_w.chunk(2), both_b.chunk(2)
    else:
        gate_w, gate_b, up_w, up_b, down_w, down_b = exact
    gate = exact_activation(exact_x @ gate_w.T + gate_b)
    expected = (gate * (exact_x @ up_w.T + up_b)) @ down_w.T + down_b
    result = mlp(x)
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)
    expected_grads = torch.autograd.grad(expected.square().sum(), (exact_x, *exact))
    for own, true in zip(torch.autograd.grad(result.square().sum(), leaves), expected_grads, strict=True):
        assert (own - true).norm() < 1e-5 * true.norm()


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_retained_graph_goes_backward_twice(activation):
    """Backward overwrites its inputs, but not if they will be read again."""
    mlp = filled(MLP(10, 24, bias=True, activation=activation))
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(2), requires_grad=True)
    result = mlp(x).square().sum()
    first = torch.autograd.grad(result, [x, *mlp.parameters()], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(result, [x, *mlp.parameters()])))


OWN_BACKWARDS = [
    pytest.param(node, id=node.name)
    for file in sorted([*Path(models.__file__).parent.rglob("*.py"), *Path(peft.__file__).parent.rglob("*.py")])
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
]


@pytest.mark.parametrize("function", OWN_BACKWARDS)
def test_no_forward_returns_an_operations_argument(function: ast.ClassDef) -> None:
    """Otherwise torch 2.11 compiles zero gradients: for `x.to(dtype)` of the same dtype, and for in-place
    operations."""
    forward = next(node for node in function.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    returned = [node.value for node in ast.walk(forward) if isinstance(node, ast.Return)]
    # The compiler sees the first branch of a choice by `is_compiling`.
    compiled = [value.body if isinstance(value, ast.IfExp) else value for value in returned]
    for value in compiled:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            assert value.func.attr != "to" and not value.func.attr.endswith("_"), ast.unparse(value)
