"""Every compared optimizer updates all weights, and state is counted in the same way."""

import importlib.util

import optimizer_step as benchmark
import pytest
import torch
from shapes import num_parameters

NUM_PARAMETERS = num_parameters("tiny")


@pytest.fixture
def model():
    return benchmark.parameters("tiny", torch.device("cpu"))


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "package", "bytes_a_parameter"),
    [
        ("sgd", "torch", 0.0),
        ("adamw", "torch", 4.0),  # two moments in the weights' bfloat16
        ("torch_adamw", "torch", 4.0),
        # 1 byte per moment and a float32 scale per 256; tensors below 4,096 elements keep float32 moments.
        ("adamw_8bit", "torch", 2.03),
        ("bitsandbytes_8bit", "bitsandbytes", 2.03),
    ],
)
def test_a_step_updates_every_weight_and_the_state_is_counted(model, name, package, bytes_a_parameter):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    before = [parameter.detach().clone() for parameter in model]
    step, state_bytes = benchmark.contestant(name, model, {})
    for parameter in model:
        parameter.grad.mul_(1e6)  # so that SGD's small learning rate changes bfloat16 weights
    step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model, strict=True))
    assert state_bytes() / NUM_PARAMETERS == pytest.approx(bytes_a_parameter, rel=0.07, abs=0.01)
