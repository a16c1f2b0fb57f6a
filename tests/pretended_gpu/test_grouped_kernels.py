"""The Triton kernels of mixtures (grouped products, and the activation of experts): values in Triton's interpreter, the
arithmetic generated for each card, no waits, and a mixture's gradients against the CPU's."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from lean_ft.models import grouped_kernels
from lean_ft.models.grouped_matmul import grouped_matmul, grouped_outer
from lean_ft.models.moe import MixtureOfExperts
from tests.models.test_moe import MIXTURES
from tests.pretended_gpu.cards import triton_environment

IMPORTS = """
import itertools, torch
from dataclasses import replace
from torch.nn import functional as F
import tests.pretended_gpu.interpreter
from lean_ft.models.expert_kernels import activate
from lean_ft.models.grouped_kernels import multiply, multiply_outer
from lean_ft.models.mix import ExpertFormula, _results

torch.manual_seed(0)
"""

PRODUCTS_VALUES = """
bounds = [0, 0, 70, 70, 100, 229]  # groups with no rows, less than a block, several blocks
ends = torch.tensor(bounds[1:], dtype=torch.int32)
parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
for dtype, tolerance in ((torch.float32, 3e-7), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)):
    for inputs, outputs in ((48, 80), (48, 4), (4, 80), (130, 20)):
        rows, right = (torch.randn(229, n).to(dtype) for n in (inputs, outputs))
        matrices = torch.randn(5, inputs, outputs).to(dtype)
        exact = torch.cat([rows[part].double() @ matrix.double() for part, matrix in zip(parts, matrices)])
        exact_outer = torch.stack([rows[part].double().T @ right[part].double() for part in parts])
        transposed = matrices.mT.contiguous().mT  # other strides
        for found, true in (
            (multiply(rows, matrices, ends), exact),
            (multiply(rows, transposed, ends), exact),
            (multiply_outer(rows, right, ends), exact_outer),
            (multiply(rows, matrices, ends, right.clone()), right + exact),  # added
        ):
            assert found.dtype == dtype and (found - true).norm() < tolerance * true.norm(), (dtype, inputs, outputs)
print("right")
"""


ACTIVATION_VALUES = """
silu = ExpertFormula()
clamped = replace(silu, gates_interleaved=True, gate_scale=1.7, up_offset=1.0, limit=0.7)
relu2 = replace(silu, activation="relu2")
formulas = [silu, clamped, relu2, replace(clamped, gates_interleaved=False)]
formulas += [replace(silu, activation="gelu"), replace(silu, activation="gelu_tanh")]
formulas += [replace(formula, scales_input=True) for formula in (silu, clamped, relu2)]
functions = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}

def plain(factors, weights, bias, experts, formula):
    factors = factors if bias is None else factors + bias[experts]
    factors = factors * weights if formula.scales_input else factors
    if formula.gated:
        gate, up = (factors[:, ::2], factors[:, 1::2]) if formula.gates_interleaved else factors.chunk(2, -1)
        if formula.limit is not None:
            gate, up = gate.clamp(max=formula.limit), up.clamp(-formula.limit, formula.limit)
        scale = formula.gate_scale
        inner = functions[formula.activation](gate * scale) / scale * (up + formula.up_offset)
    else:
        inner = F.relu(factors).square()
    return inner if formula.scales_input else inner * weights

tolerances = ((torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 6e-3))
for formula, has_bias, width, (dtype, tolerance) in itertools.product(formulas, (False, True), (6, 1500), tolerances):
    factors, grad = torch.randn(9, 2 * width if formula.gated else width).to(dtype), torch.randn(9, width).to(dtype)
    weights, experts = torch.rand(9, 1), torch.randint(5, (9,))
    bias = torch.randn(5, factors.shape[1]).to(dtype) if has_bias else None
    exact = [tensor.double().requires_grad_() for tensor in (factors, weights)]
    inner = plain(*exact, None if bias is None else bias.double(), experts, formula)
    grads = torch.autograd.grad(inner, exact, grad.double())
    for given, needs_inner in ((None, True), (grad, True), (grad, False)):
        found = _results(factors, weights, bias, experts, given, needs_inner, *formula.for_kernel())
        activate(found, factors, weights, bias, experts, given, needs_inner, *formula.for_kernel())
        true = (inner if needs_inner else inner[:0], *(grads if given is not None else (x[:0] for x in grads)))
        for one, other, name in zip(found, true, ("activation", "factors", "weights")):
            error = (one - other.view(one.shape)).norm()
            assert error <= tolerance * other.norm(), (name, formula, dtype, width, error / other.norm())
print("right")
"""


SUMS_VALUES = """
from lean_ft.models.expert_kernels import sum_rows

for dtype, (count, width) in itertools.product((torch.float32, torch.bfloat16, torch.float16), ((1, 7), (4, 2880), (8, 1024))):
    rows, places = torch.randn(9 * count, width).to(dtype), torch.randperm(9 * count).view(9, count)
    found = torch.empty(9, width, dtype=dtype)
    sum_rows(rows, places, found)
    torch.testing.assert_close(found, rows[places].float().sum(1).to(dtype))
print("right")
"""  # noqa: E501

EXPANDED_VALUES = """
import bitsandbytes
from lean_ft.models.expand_kernel import expand
from lean_ft.models.frozen_weight import _expand_stepwise

bytes, exponents = (torch.randint(256, shape, dtype=torch.uint8) for shape in ((3, 70, 5, 16), (3, 70, 5)))
bytes.view(-1)[:256] = torch.arange(256)
exponents.view(-1)[:16] = torch.arange(16) + 112
cases = [(bytes, exponents)]
for rows, columns, blocks in ((7, 2880, 1), (300, 384, 3), (2, 5000, 1), (5, 33, 1)):
    numbers = torch.randint(256, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    cases.append((numbers, torch.rand(rows, blocks) / 100))
cases.append((torch.randint(256, (32 * 999,), dtype=torch.uint8), torch.rand(999)))
for (numbers, scales), dtype in itertools.product(cases, (torch.float32, torch.bfloat16, torch.float16)):
    stepwise = _expand_stepwise(numbers, scales, dtype)
    found = torch.empty_like(stepwise)
    expand(numbers, scales, found)
    torch.testing.assert_close(found, stepwise, rtol=0, atol=0, equal_nan=True)
print("right")
"""

EXPANDED_NF4_VALUES = """
from lean_ft.models.expand_kernel import expand_nf4
from lean_ft.quantize.nf4 import to_nf4

torch.manual_seed(0)
shapes = [(320, 192), (5, 64), (64, 256), (7, 320)]  # 960 scales: the last block is not full
for number in range(4):
    weights = [to_nf4(torch.randn(shape)) for shape in shapes[number:][:3]]
    expected = torch.cat([weight.whole(torch.float32).view(-1) for weight in weights])  # bitsandbytes' kernel for CPUs
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.empty(expected.numel(), dtype=dtype)
        parts = list(zip(*(weight.tensors for weight in weights)))
        expand_nf4(*parts[:4], parts[4][0], found)
        assert torch.equal(found, expected.to(dtype))
print("right")
"""


@pytest.mark.cards("H100")
@pytest.mark.parametrize(
    "values",
    [PRODUCTS_VALUES, ACTIVATION_VALUES, SUMS_VALUES, EXPANDED_VALUES, EXPANDED_NF4_VALUES],
    ids=["products", "activation", "sums", "expanded", "nf4"],
)
def test_the_kernels_values_in_tritons_interpreter(values: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS + values]
    assert (
        subprocess.run(command, env=triton_environment(), capture_output=True, text=True, check=True).stdout
        == "right\n"
    )


@pytest.mark.cards("T4", "A100", "H100")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (64, 4), (4, 96)])
def test_no_product_waits(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Full matrices, and the thin matrices of a rank-4 adapter, which PyTorch's kernel does not support."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this card does not compute in bfloat16")
    ends = torch.arange(64, 513, 64, dtype=torch.int32).cuda()
    rows, right = (torch.randn(512, n, device="cuda").to(dtype) for n in (inputs, outputs))
    matrices = torch.randn(8, inputs, outputs, device="cuda").to(dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        product = grouped_matmul(rows, matrices, ends)
        grouped_matmul(right, matrices.mT, ends)
        outer = grouped_outer(rows, right, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert product.shape == (512, outputs) and outer.shape == (8, inputs, outputs)


@pytest.mark.cards("H100")
def test_on_blackwell_the_products_of_empty_groups_are_made_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel leaves the memory of empty groups uninitialized."""
    multiplied = torch.full((3, 16, 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    multiplied[1] = 2.0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *operands, offs: multiplied)
    rows = torch.ones(32, 16, device="cuda", dtype=torch.bfloat16)
    product = grouped_outer(rows, rows.clone(), torch.tensor([0, 32, 32], dtype=torch.int32, device="cuda"))
    assert product.sum((1, 2)).tolist() == [0.0, 512.0, 0.0]


# Tensor core instructions per card: products of these dtypes, summed in float32. Float32 products, and all products
# before Ampere, are plain multiplications.
PRODUCTS = {
    (torch.bfloat16, 8): r"mma\.sync\S*\.f32\.bf16\.bf16\.f32",
    (torch.float16, 8): r"mma\.sync\S*\.f32\.f16\.f16\.f32",
    (torch.bfloat16, 9): r"wgmma\S*\.f32\.bf16\.bf16|mma\.sync\S*\.f32\.bf16\.bf16\.f32",
    (torch.float16, 9): r"wgmma\S*\.f32\.f16\.f16|mma\.sync\S*\.f32\.f16\.f16\.f32",
}
ROUNDED = {torch.bfloat16: r"cvt\.rn\.bf16(x2)?\.f32", torch.float16: r"cvt\.rn\.f16(x2)?\.f32"}


@pytest.mark.cards("T4", "A100", "H100")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_is_generated_multiplies_this_type_sums_float32_and_rounds_to_nearest(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    compiled, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: compiled.append(run(*args, **kwargs)))
    major, _ = torch.cuda.get_device_capability()
    if dtype == torch.bfloat16 and major < 8:
        pytest.skip("this card does not compute in bfloat16")
    ends = torch.arange(64, 513, 64, dtype=torch.int32).cuda()
    rows, right = (torch.randn(512, n, device="cuda").to(dtype) for n in (64, 96))
    matrices = torch.randn(8, 64, 96, device="cuda").to(dtype)
    grouped_kernels.multiply(rows, matrices, ends)
    grouped_kernels.multiply_outer(rows, right, ends)
    assert [kernel.name for kernel in compiled] == ["_multiply", "_multiply_outer"]
    for code in (kernel.asm["ptx"] for kernel in compiled):
        if dtype == torch.float32:
            assert "mma" not in code and "tf32" not in code and "fma.rn.f32" in code
            continue
        assert re.search(PRODUCTS[dtype, major], code) if major >= 8 else "f32" in code
        assert re.search(ROUNDED[dtype], code)
        # All matrix products are of one kind, and no sum is rounded to the narrow dtype in between.
        products = set(re.findall(r"w?g?mma\.(?:sync|mma_async)\S*", code))
        assert all(".f32." in product for product in products), products


@pytest.mark.cards("A100", "H100")
@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())
@pytest.mark.parametrize("adapts", [False, True], ids=["trained", "adapters"])
def test_a_mixtures_fused_kernels_give_the_cpus_gradients_without_waits(
    mixture: Callable[[int], MixtureOfExperts], adapts: bool
) -> None:
    torch.manual_seed(0)
    size, rank = 16, 4
    experts = mixture(size).experts
    config = experts.config
    inner = config.intermediate_size
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    experts.requires_grad_(not adapts)
    shapes = (size, rank), (rank, 2 * inner), (inner, rank), (rank, size)
    thin = [torch.randn(config.num_experts, *shape, requires_grad=True) for shape in shapes] if adapts else []
    scores = torch.randn(12, config.num_experts)
    chosen = scores.topk(config.experts_per_token).indices
    inputs = [torch.randn(12, size, requires_grad=True), scores.gather(1, chosen).requires_grad_()]
    grad, found = torch.randn(12, size), []
    for device in ("cpu", "cuda"):
        layer = copy.deepcopy(experts).to(device)
        tokens, weights, *pairs = (tensor.detach().to(device).requires_grad_() for tensor in (*inputs, *thin))
        own, own_grad = chosen.to(device), grad.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = layer(tokens, weights, own, *((pairs[:2], pairs[2:]) if adapts else ()))
            out.backward(own_grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([out.detach(), *(tensor.grad for tensor in (tokens, weights, *pairs, *layer.parameters()))])
    for expected, one in zip(*found, strict=True):
        assert (one is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(one.cpu(), expected, atol=2e-5, rtol=1e-4)
