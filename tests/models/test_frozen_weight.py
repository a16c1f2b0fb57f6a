"""Stacks of weights in fewer bits: one expert at a time, and in a mixture's products. The values themselves are
compared with bitsandbytes in tests/peft/test_nf4.py, and with transformers in test_dequantized.py."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lean_ft.models.config import MixtureConfig
from lean_ft.models.frozen_weight import Form, Frozen, FrozenParameter, as_frozen
from lean_ft.models.mix import ExpertFormula
from lean_ft.models.moe import Experts, MixtureOfExperts
from lean_ft.quantize.nf4 import to_nf4
from tests.models.conftest import kept_bytes

SHAPE = (5, 12, 64)


def stored(kind: str, weight: Tensor) -> Frozen:
    """The stack with a scale per row, or per 32 values of a row."""
    if kind == "plain":
        return as_frozen(weight)
    if kind == "nf4":
        return to_nf4(weight)
    if kind == "float8":
        scales = weight.abs().amax(-1, keepdim=True) / 448
        return Frozen(Form("float8", SHAPE, weight.dtype), ((weight / scales).to(torch.float8_e4m3fn), scales))
    blocks = torch.randint(256, (*SHAPE[:2], 2, 16), dtype=torch.uint8)
    exponents = torch.randint(120, 130, (*SHAPE[:2], 2), dtype=torch.uint8)
    return Frozen(Form("mxfp4", SHAPE, weight.dtype), (blocks, exponents))


@pytest.mark.parametrize("kind", ["plain", "nf4", "float8", "mxfp4"])
def test_some_experts_are_those_of_the_whole_stack(kind):
    torch.manual_seed(0)
    weight = torch.randn(SHAPE)
    frozen = stored(kind, weight)
    whole = frozen.whole(torch.bfloat16)
    assert whole.shape == SHAPE and whole.dtype == torch.bfloat16
    for experts in (3, slice(1, 4), torch.tensor([4, 0])):
        assert torch.equal(frozen.whole(torch.bfloat16, experts), whole[experts])
    if kind != "mxfp4":
        assert (frozen.whole() - weight).norm() < 0.1 * weight.norm()


class Expanded(TorchDispatchMode):
    """Counts the dequantized numbers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.bitsandbytes.dequantize_4bit.default:
            self.count += result.numel()
        return result


@pytest.mark.parametrize(("num_tokens", "num_expanded"), [(30, 4), (1, 2)])  # fewer rows than experts: one each
@pytest.mark.parametrize("input_first", [False, True])
def test_a_mixture_multiplies_quantized_stacks_and_keeps_nothing_dense(input_first, num_tokens, num_expanded):
    torch.manual_seed(0)
    config = MixtureConfig(4, 2, 64, weights_sum_to_one=True)
    experts = Experts(64, config, ExpertFormula(input_first=input_first))
    mixture = MixtureOfExperts(64, config, experts=experts)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    mixture.experts.requires_grad_(False)
    reference = copy.deepcopy(mixture)
    for name in ("gate_up_proj", "down_proj"):
        frozen = to_nf4(getattr(mixture.experts, name))
        getattr(reference.experts, name).data = frozen.whole()
        delattr(mixture.experts, name)
        setattr(mixture.experts, name, FrozenParameter(frozen))
    results = []
    for module in (reference, mixture):
        x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with Expanded() as expanded:
            out = module(x)[0]
        assert expanded.count == (module is mixture) * num_expanded * (128 * 64 + 64 * 64)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, module.gate.weight])])
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)
    kept = [kept_bytes(lambda module=module: module(x), module, x) for module in (reference, mixture)]
    assert kept[0] == kept[1]


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["float8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compiled_code_expands_the_same_numbers(kind, dtype):
    """In forward and again in backward, as one operation each."""
    torch.manual_seed(0)
    form, tensors = stored(kind, torch.randn(SHAPE))
    frozen = Frozen(form._replace(is_transposed=True, shape=(5, 64, 12)), tensors)

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        weight = Frozen(frozen.form, tensors)
        return weight.whole(dtype), weight.whole(dtype, again=True)

    for found in torch.compile(both, fullgraph=True, backend="aot_eager")(*tensors):
        assert torch.equal(found, frozen.whole(dtype)) and found.shape == (5, 64, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float8", "mxfp4"])
def test_on_a_gpu_expanding_takes_little_more_than_the_dense_weight(kind):
    form, tensors = stored(kind, torch.randn(SHAPE))
    large = tuple(tensor.cuda().repeat(1, 2000, *[1] * (tensor.dim() - 2)) for tensor in tensors)
    frozen = Frozen(form._replace(shape=(5, 24_000, 64), dtype=torch.bfloat16), large)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = frozen.whole()
    assert torch.cuda.max_memory_allocated() - before <= 1.25 * whole.nbytes
    assert torch.equal(whole[:, :12].cpu(), Frozen(form, tensors).whole(torch.bfloat16))


@pytest.mark.parametrize("shape", [(8, 64), (8, 32), (8, 96), (6, 100), (4, 16, 48)], ids=str)
def test_nf4_is_right_where_blocks_of_scales_cross_rows(shape):
    """Blocks of 64 values of a normal distribution are off by 9 % (Dettmers et al. 2023)."""
    weight = torch.randn(shape)
    assert (to_nf4(weight).whole() - weight).norm() < 0.11 * weight.norm()
