"""The Triton kernel of 8-bit AdamW: values in Triton's interpreter, and launches and memory of an update."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lean_ft.optim.rule import StepInfo
from tests.optim.tiny_training import build
from tests.pretended_gpu.cards import triton_environment
from tests.pretended_gpu.counters import counters

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from kernel_instructions import measure_updates

# The kernel must equal the sliced update on the CPU, which gets the same random bits and is tested in tests/optim.
UPDATES = """
import torch
import tests.pretended_gpu.interpreter
from lean_ft.optim import adamw_8bit_kernel as kernel
from lean_ft.optim.adamw_8bit import AdamW8bit, noise_keys
from lean_ft.optim.rule import ParameterState, StepInfo
from tests.optim.hashed_noise import HashedNoise

device = torch.get_default_device()
torch.set_default_device("cpu")
exact = device.type == "cpu"  # a GPU fuses multiplications with additions
cases = [(4096, torch.bfloat16, True, False), (2048 + 777, torch.bfloat16, True, True), (255, torch.bfloat16, False, False)]
cases += [(2048, torch.float32, False, True), (1000, torch.float16, False, False)]
for numel, dtype, is_random, clips in cases:
    torch.manual_seed(numel)
    rule = AdamW8bit(
        paged=False, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, stochastic_rounding=is_random, compile=False, update_clipping=clips
    )
    weight = torch.nn.Parameter(torch.randn(1, numel).to(dtype))
    weight.grad = torch.zeros_like(weight)
    state = ParameterState("weight", weight, 0, rule, tensors=rule.init_state(weight))
    tables = kernel.code_tables(*rule._codes, device)
    for number in (1, 2, 3, 4):
        # Gradients of many magnitudes within a block; in the third step, one block has none.
        weight.grad.copy_(torch.randn(numel) * 10 ** (-5 * torch.rand(numel)))
        if number == 3:
            weight.grad[:, :256] = 0
            for tensor in state.tensors.values():
                tensor.view(-1)[:1 if tensor.is_floating_point() else 256].zero_()
        if number == 4:
            weight.grad[0, 100], weight.grad[0, 1] = torch.nan, torch.inf
        tensors = [tensor.detach().view(-1) for tensor in (weight, weight.grad, *state.tensors.values())]
        found = [tensor.to(device, copy=True) for tensor in tensors]
        scalars, keys = rule.scalars(state, StepInfo(1e-2, number, None), tensors[1:]), noise_keys(number)
        lr = scalars.lr.to(device) if clips else scalars.lr
        kernel.update(found, tables, scalars._replace(lr=lr), keys if is_random else None)
        rule._update_slices("cpu", tensors, *scalars, noise=HashedNoise(keys) if is_random else None)
        of_kernel, _, *moments = (tensor.cpu() for tensor in found)
        if number == 4:
            assert of_kernel[100].isnan() and moments[1][0].isnan() and moments[3][0].isnan()
            # A NaN among the first 256 elements gives all of them arbitrary codes.
            tensors, of_kernel = [t[(1 if t.numel() < 99 else 256):] for t in tensors], of_kernel[256:]
            moments = [t[(1 if t.numel() < 99 else 256):] for t in moments]
        for own, true in zip(moments, tensors[2:]):
            if exact:
                assert torch.equal(own, true), (numel, number)
            elif own.dtype == torch.uint8:
                assert (own != true).float().mean() < 1e-2
            else:
                torch.testing.assert_close(own, true, rtol=1e-6, atol=0.0)
        # One unit of float32 more or less seldom rounds to other numbers of 16 bits. With clipping, NaN reaches every weight.
        unit = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}[dtype]
        torch.testing.assert_close(of_kernel, tensors[0], rtol=unit, atol=1e-8, equal_nan=True)
        if dtype.itemsize == 2:
            assert (of_kernel.nan_to_num() != tensors[0].nan_to_num()).sum() <= numel / 500

# Codes at all midpoints, and at their neighbors.
for code, bins, shift in zip(rule._codes, tables[1].cpu().split([2**15, 2**16]), (kernel.SIGNED_SHIFT, kernel.UNSIGNED_SHIFT)):
    midpoints = code.tables(torch.device("cpu"))[1][:-1]
    near = torch.cat([midpoints, midpoints.nextafter(torch.tensor(2.0)), midpoints.nextafter(torch.tensor(-2.0))])
    small = 10 ** (-40 * torch.rand(100_000))
    numbers = torch.cat([near, small, torch.tensor([0.0, 1.0, 1.0 + 2**-23, 1e-45])])
    if code.signed:
        numbers = torch.cat([numbers, -numbers])
    bits = numbers.view(torch.int32)
    codes = bins[(bits.long() % 2**32) >> shift] + (bits.abs() if code.signed else bits) >> shift
    expected = code.encode_by_tables(numbers if code.signed else numbers.clamp(min=code.smallest_magnitude()))
    assert torch.equal(codes.to(torch.uint8), expected)
print("right")
"""  # noqa: E501


@pytest.mark.long
@pytest.mark.cards("H100")
def test_the_kernels_values_in_tritons_interpreter() -> None:
    command = [sys.executable, "-W", "ignore", "-c", UPDATES]
    done = subprocess.run(command, env=triton_environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-2000:]


@pytest.mark.simulated
@pytest.mark.cards("A100", "H100")
@pytest.mark.parametrize("compile", [False, True])
def test_an_update_is_one_launch_and_takes_no_workspace(compile: bool) -> None:
    model = nn.Linear(1000, 1001, bias=False).cuda().bfloat16()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = build(model, {"name": "adamw_8bit", "stochastic_rounding": True}, compile=compile)
    (state,) = optimizer.states
    state.rule.update([state], StepInfo(lr=1e-3, number=1, noise_seed=1))  # makes the tables
    launches, allocated = counters()["kernels"], torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state.rule.update([state], StepInfo(lr=1e-3, number=2, noise_seed=2))
    assert counters()["kernels"] - launches == 1
    assert torch.cuda.max_memory_allocated() == allocated


@pytest.mark.long
@pytest.mark.simulated
@pytest.mark.cards("H100")
def test_an_update_takes_few_instructions_and_spills_no_register() -> None:
    for update in measure_updates():
        for capability, found in update["architectures"].items():
            assert found["spilled_bytes"] == 0 and found["shared_bytes"] <= 99 * 1024
            assert found["instructions"] <= (65 if capability == "120" else 60), (update["label"], capability, found)
