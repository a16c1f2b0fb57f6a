"""Products of 16-bit matrices in float32: the values are float32's, rounded once, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from lean_ft.models import float32_products
from lean_ft.models.float32_products import slow_dtypes, use_float32_products


@pytest.fixture
def converted():
    before = set(float32_products._converted)
    use_float32_products({torch.bfloat16, torch.float16})
    yield
    use_float32_products(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64, 48), (2, 300, 70), (1200, 40, 600), (8, 4096, 16)], ids=str)
def test_a_linear_layer_and_its_gradients_are_float32_rounded_once(converted, dtype, shape):
    torch.manual_seed(0)
    rows, inner, columns = shape
    x, weight, grad = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
    narrow = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow]
    for inputs in (narrow, wide):
        out = F.linear(*inputs)
        out.backward(grad.to(dtype).to(out.dtype))
    pairs = [(F.linear(*narrow), F.linear(*wide)), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    for found, expected in pairs:
        assert found.dtype == dtype
        scale = expected.abs().max()
        assert (found.double() - expected).abs().max() <= torch.finfo(dtype).eps * scale


def test_the_choice_follows_the_cpu_and_onednn_s_limit(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    every = {"architecture": "x86_64", "sse2": True, "avx2": True, "amx_bf16": True, "avx512_fp16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: every, raising=False)
    assert slow_dtypes() == frozenset()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert slow_dtypes() == {torch.bfloat16, torch.float16}
