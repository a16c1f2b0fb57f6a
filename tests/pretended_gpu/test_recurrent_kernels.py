"""Kernels of recurrent layers: the Triton kernels' values in Triton's interpreter, and the launches of a layer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lean_ft.models import load_model
from lean_ft.models.cache import KVCache
from lean_ft.models.state.convolution import causal_convolution
from lean_ft.models.state.linear_attention import linear_attention
from lean_ft.models.state.state_mixer import StateMixer
from lean_ft.settings import ModelConfig
from tests.plan.test_rehearsal import config_folder
from tests.pretended_gpu.cards import triton_environment
from tests.pretended_gpu.counters import counters

ATTENTION = """
import itertools
import torch
import tests.pretended_gpu.interpreter
from lean_ft.models.state import linear_attention_kernels as kernels
from lean_ft.models.state.chunks import Tokens, document_numbers
from lean_ft.models.state.linear_attention import linear_attention

def error(found, true):
    return ((found.double() - true).norm() / true.norm()).item()

torch.manual_seed(0)
kernels.SEGMENT = 128  # 150 and 270 tokens are then several segments
inside, late = [0, 1, 64, 64, 100, 193, 270], [0, 128, 129, 270]  # documents end in, at and after a chunk
shapes = [(2, 150, 2, 4, 16, 32, None), (1, 270, 1, 2, 32, 16, inside), (1, 270, 2, 2, 16, 48, late)]
shapes += [(1, 1, 1, 1, 16, 16, None), (1, 100, 1, 1, 128, 32, [0, 100])]
dtypes = (torch.float32, torch.bfloat16, torch.float16)
is_real = torch.get_default_device().type == "cuda"  # where operands are TensorFloat-32
for corrects, (rows, num_tokens, key_heads, heads, key, value, bounds), dtype in itertools.product((True, False), shapes, dtypes):
    query, keys = (torch.randn(rows, num_tokens, key_heads, key).to(dtype) for _ in range(2))
    values, beta = torch.randn(rows, num_tokens, heads, value).to(dtype), torch.rand(rows, num_tokens, heads).to(dtype)
    decay, state = -0.3 * torch.rand(rows, num_tokens, heads), torch.randn(rows, heads, key, value)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    leaves = [x.double().cpu().requires_grad_() for x in (query, keys, values, decay, beta)]
    bounds_there = None if bounds is None else cu_seqlens.cpu()
    true, states = linear_attention(*leaves, bounds_there, state.double().cpu(), corrects)
    grad = torch.randn_like(values)
    exact = [true, states[-1], *torch.autograd.grad(true, leaves, grad.double().cpu())]
    tokens_of = Tokens(query, keys, values, decay, beta, document_numbers(cu_seqlens, num_tokens), corrects)
    out, kept = kernels.forward(tokens_of, state)
    again, _ = kernels.forward(tokens_of, state)
    assert torch.equal(out, again)
    found = [out, kept[-1], *kernels.backward(tokens_of, kept, grad)]
    for one, true in zip(found, exact):
        limit = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[one.dtype] + 3e-3 * is_real
        assert error(one.cpu(), true) < limit, (corrects, key, value, bounds, dtype, one.shape, error(one.cpu(), true))
print("right")
"""  # noqa: E501

CONVOLUTION = """
import itertools
import torch
import tests.pretended_gpu.interpreter
from lean_ft.models.state import convolution_kernels as kernels
from lean_ft.models.state.chunks import document_numbers
from lean_ft.models.state.convolution import causal_convolution

def error(found, true):
    return ((found.double() - true).norm() / true.norm()).item()

torch.manual_seed(0)
shapes = [(2, 70, 40, 4, None), (1, 150, 24, 3, [0, 1, 2, 63, 64, 64, 130, 150]), (1, 1, 8, 4, None), (1, 3, 72, 2, [0, 3])]
dtypes = (torch.float32, torch.bfloat16)
for (rows, num_tokens, channels, taps, bounds), dtype, activation, has_bias in itertools.product(
    shapes, dtypes, ("silu", None), (True, False)
):
    x = torch.randn(rows, num_tokens, channels + 8).to(dtype)[..., 4:-4]  # as a part of a projection
    weight, bias = torch.randn(channels, 1, taps).to(dtype)[:, 0], torch.randn(channels).to(dtype) if has_bias else None
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    leaves = [t.double().cpu().requires_grad_() for t in (x, weight, bias) if t is not None]
    there = None if bounds is None else cu_seqlens.cpu()
    true = causal_convolution(*leaves[:2], leaves[2] if has_bias else None, there, activation)
    grad = torch.randn_like(x)
    exact = [true, *torch.autograd.grad(true, leaves, grad.double().cpu())]
    inputs = x, weight, bias, document_numbers(cu_seqlens, num_tokens), activation
    found = [kernels.convolve(*inputs), *kernels.convolve_backward(grad, *inputs)]
    for one, true in zip(found, exact):
        assert error(one.cpu(), true) < (1e-6 if dtype == torch.float32 else 5e-3), (rows, bounds, dtype, activation)
print("right")
"""  # noqa: E501


DECODING = """
import itertools
import torch
import tests.pretended_gpu.interpreter
from lean_ft.models.state import decoding_kernels as kernels
from lean_ft.models.state.decoding import Rates, Token
from lean_ft.models.state.convolution import causal_convolution
from lean_ft.models.state.linear_attention import linear_attention
from lean_ft.models.state.state_mixer import log_decay_of

def error(found, true):
    return ((found.double().cpu() - true).norm() / true.norm()).item()

def wide(x):
    return x.double().cpu()

torch.manual_seed(0)
for (key_heads, heads, key, value), corrects, dtype in itertools.product(
    ((2, 4, 32, 80), (1, 3, 16, 16)), (True, False), (torch.float32, torch.bfloat16)
):
    limit = 2e-6 if dtype == torch.float32 else 6e-3
    query, keys = (torch.randn(3, 1, key_heads, key).to(dtype) for _ in range(2))
    values, steps, share = torch.randn(3, 1, heads, value).to(dtype), *(torch.randn(2, 3, 1, heads).to(dtype) * 3)
    rates = Rates(torch.randn(heads), torch.randn(heads), None if corrects else torch.randn(heads), 0.1, 5.0)
    state = torch.randn(3, heads, key, value)
    before = wide(state)
    step = torch.nn.functional.softplus(wide(steps) + wide(rates.bias))
    step = step if corrects else step.clamp(0.1, 5.0)
    written = wide(share).sigmoid() if corrects else step
    inputs = wide(query), wide(keys), wide(values), log_decay_of(wide(rates.log), step), written
    true, states = linear_attention(*inputs, None, before, corrects)
    true = true if corrects else true + wide(values) * wide(rates.skip)[:, None]
    found = kernels.step(Token(query, keys, values, steps, share), rates, state, corrects)
    assert error(found, true) < limit and error(state, states[-1]) < limit, (corrects, dtype, error(found, true))
    norms = ((torch.randn(value), heads, False), (torch.randn(heads * value), 1, True), (None, 1, False))
    for weight, groups, gates_first in norms:
        x, gate = torch.randn(2, 3, 1, heads * value).to(dtype)
        opening, expected = torch.nn.functional.silu(wide(gate)), wide(x)
        expected = expected * opening if gates_first else expected
        if weight is not None:
            parts = expected.unflatten(-1, (groups, -1))
            parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-5)
            expected = (parts * wide(weight).view(-1, parts.shape[-1])).flatten(-2)
        expected = expected if gates_first else expected * opening
        assert error(kernels.gated_norm(x, gate, weight, 1e-5, groups, gates_first), expected) < limit
    for taps, bias in ((4, torch.randn(300).to(dtype)), (2, None)):
        last, x, weight = (torch.randn(size).to(dtype) for size in ((3, taps - 1, 300), (3, 1, 300), (300, taps)))
        seen = torch.cat((last, x), 1)
        arguments = wide(seen), wide(weight), None if bias is None else wide(bias), None, "silu"
        found = kernels.convolve(x, last, weight, bias, "silu")
        assert error(found, causal_convolution(*arguments)[:, -1:]) < limit and torch.equal(last, seen[:, 1:])
print("right")
"""


@pytest.mark.long
@pytest.mark.cards("H100")
@pytest.mark.parametrize("values", [ATTENTION, CONVOLUTION, DECODING], ids=["attention", "convolution", "decoding"])
def test_the_kernels_values_in_tritons_interpreter(values: str) -> None:
    """Against the CPU's form in float64, which has its own tests against a recurrence token by token."""
    command = [sys.executable, "-W", "ignore", "-c", values]
    done = subprocess.run(command, env=triton_environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-2000:]


@pytest.mark.simulated
@pytest.mark.cards("A100", "H100")
@pytest.mark.parametrize("corrects", [True, False])
def test_launches_of_checkpointed_linear_attention_grow_by_segments(corrects: bool) -> None:
    """Forward, forward again, and backward: 3 launches of each segment forward, and 9 or 8 backward; besides, 6 find
    the tokens' documents, 3 fill with zeros, and 4 add over the heads that share a key."""
    for num_segments in (1, 3):
        num_tokens = 1024 * num_segments
        leaves = [torch.zeros(1, num_tokens, heads, 16, device="cuda").bfloat16() for heads in (2, 2, 4)]
        leaves += [
            torch.zeros(1, num_tokens, 4, device="cuda"),
            torch.zeros(1, num_tokens, 4, device="cuda").bfloat16(),
        ]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        bounds = torch.tensor([0, 100, num_tokens], dtype=torch.int32).cuda()
        before = counters()["kernels"]
        out, _ = checkpoint(linear_attention, *leaves, bounds, None, corrects, use_reentrant=False)
        torch.autograd.grad(out, leaves, out)
        assert counters()["kernels"] - before <= (2 * 3 + 8 + corrects) * num_segments + 13


@pytest.mark.simulated
@pytest.mark.cards("A100", "H100")
def test_a_convolution_takes_one_launch_forward_and_two_backward() -> None:
    x, weight = torch.zeros(1, 3000, 72, device="cuda").bfloat16(), torch.zeros(72, 4, device="cuda").bfloat16()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    before = counters()["kernels"]
    out = causal_convolution(*leaves, None, None, "silu")
    forward = counters()["kernels"] - before
    torch.autograd.grad(out, leaves, out)
    assert (forward, counters()["kernels"] - before - forward) == (1, 2)


SIZES = {
    "qwen3_5_text": {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "bamba": {"mamba_d_state": 16},
    "nemotron_h": {"ssm_state_size": 16},
    "lfm2": {},
}


@pytest.mark.simulated
@pytest.mark.cards("H100")
@pytest.mark.parametrize(("case", "most"), [("qwen3_5_text", 3), ("bamba", 3), ("nemotron_h", 3), ("lfm2", 3)])
def test_a_recurrent_layer_decodes_a_token_in_few_launches(case: str, most: int, tmp_path: Path) -> None:
    """Besides its products: a convolution, a step of the state and a gated norm; or a convolution and two gates. The
    values are those of the CPU."""
    config_folder(tmp_path, case, **SIZES[case])
    config = ModelConfig(path=str(tmp_path), random_init=True, dtype="float32")
    ids, found = torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(0)), {}
    launched = list[int]()
    models = {device: load_model(config, torch.device(device)).eval() for device in ("cpu", "cuda")}
    models["cuda"].load_state_dict(models["cpu"].state_dict())
    for device, model in models.items():
        layers = [module for module in model.modules() if isinstance(module, StateMixer)]
        cache = KVCache(model.config, 2, 16, torch.float32, torch.device(device))
        with torch.no_grad():
            model(ids[:, :6].to(device), cache=cache)
            for layer in layers if device == "cuda" else ():
                layer.register_forward_pre_hook(lambda *_: launched.append(-counters()["kernels"]))
                layer.register_forward_hook(lambda *_: launched.append(counters()["kernels"]))
            found[device] = [model(ids[:, i, None].to(device), cache=cache).cpu() for i in range(6, 9)]
        products = sum(isinstance(module, torch.nn.Linear) for layer in layers for module in layer.modules())
    assert sum(launched) <= 3 * (products + most * len(layers))
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=1e-5, rtol=1e-4)
