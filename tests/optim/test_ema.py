"""Averages of weights against torch.optim.swa_utils, and the exchange of weights and averages."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lean_ft.optim import Optimizer, averaged_weights, has_averages
from lean_ft.system.host_link import HostLink
from tests.optim.test_streamed import streamed
from tests.optim.tiny_training import CONFIGS, TinyModel, build, make_batches, same_weights, train

LRS = [1e-2, 3e-3, 1e-2, 0.0, 1e-3]


def averages(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {name.removesuffix(".ema"): value for name, value in optimizer.state_dict().items() if name.endswith(".ema")}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adamw_8bit", "muon", "adafactor"])
def test_equals_torchs_average_and_leaves_the_weights_as_they_are(name: str, in_backward: bool) -> None:
    settings = {**CONFIGS[name], "in_backward": in_backward}
    plain, ours = TinyModel(torch.float32), TinyModel(torch.float32)
    reference = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference.update_parameters(plain)  # its first update copies
    without, optimizer = build(plain, settings), build(ours, {**settings, "ema": 0.9})
    for batches, lr in zip(make_batches(5, 2), LRS, strict=True):
        train(plain, without, [batches], [lr])
        train(ours, optimizer, [batches], [lr])
        reference.update_parameters(plain)
    assert same_weights(ours, plain)
    expected = dict(reference.module.named_parameters())
    for key, value in averages(optimizer).items():
        assert torch.equal(value, expected[key])
    assert has_averages(optimizer) and not has_averages(without)


def test_averages_of_bfloat16_weights_are_float32() -> None:
    model = TinyModel()
    optimizer = build(model, {"name": "adamw", "ema": 0.999})
    expected = {name: param.detach().double() for name, param in model.named_parameters()}
    for batches in make_batches(20):
        train(model, optimizer, [batches], [1e-2])
        for name, param in model.named_parameters():
            expected[name] = 0.999 * expected[name] + 0.001 * param.detach().double()
    for name, value in averages(optimizer).items():
        assert value.dtype == torch.float32
        # 20 roundings to float32; in bfloat16, steps of 0.001 would be lost, an error of more than 1e-3.
        torch.testing.assert_close(value.double(), expected[name], rtol=20 * 2**-24, atol=20 * 2**-24)


@pytest.mark.parametrize("in_backward", [False, True])
def test_averages_go_on_for_parameters_without_a_gradient(in_backward: bool) -> None:
    model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    optimizer = build(model, {"name": "sgd", "in_backward": in_backward, "ema": 0.5})
    x, start = torch.ones(1, 8), model[1].weight.detach().clone()
    for step, used in enumerate([[0, 1], [0], [0]]):
        optimizer.set_lr(0.1)
        optimizer.scale(sum((model[i](x).sum() for i in used), torch.zeros(())), last=True).backward()
        optimizer.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        weight = model[1].weight.detach()
        far = 0.5 ** (step + 1)
        torch.testing.assert_close(averages(optimizer)["1.weight"], far * start + (1 - far) * weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchange_computes_with_the_averages_and_restores_every_bit(dtype: torch.dtype) -> None:
    model = TinyModel(dtype)
    optimizer = build(model, {"name": "adamw", "ema": 0.9})
    train(model, optimizer, make_batches(3), [1e-2] * 3)
    with torch.no_grad():  # also values at the edges of rounding, of both signs
        kept = optimizer.states[0].tensors["ema"]
        edges = torch.tensor(
            [0x3F808000, 0x3F80FFFF, 0x3F7FFFFF, 0x00000001, 0x3F808001, 0x3F818000], dtype=torch.int32
        )
        kept.view(-1)[:12] = torch.cat([edges.view(torch.float32), -edges.view(torch.float32)])
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    before = {name: value.clone() for name, value in averages(optimizer).items()}
    with averaged_weights(optimizer, model):
        for name, param in model.named_parameters():
            expected = before[name].to(dtype)
            is_half = (before[name].view(torch.int32) & 0xFFFF) == 0x8000  # rounded away from zero, not to even
            assert torch.equal(param[~is_half], expected[~is_half])
            torch.testing.assert_close(param, expected, rtol=2**-7, atol=0.0)
    for name, param in model.named_parameters():
        assert torch.equal(param, weights[name])
        assert torch.equal(averages(optimizer)[name].view(torch.int32), before[name].view(torch.int32))


def test_exchange_between_forward_and_backward_leaves_the_gradients() -> None:
    gradients: list[list[Any]] = []
    for exchanges in (False, True):
        model = TinyModel(torch.float32)
        optimizer = build(model, {"name": "sgd", "ema": 0.9})
        train(model, optimizer, make_batches(2), [1e-1] * 2)
        loss = model(make_batches(1)[0][0]).square().mean()
        if exchanges:
            with averaged_weights(optimizer, model), torch.no_grad():
                assert model(make_batches(1)[0][0]).square().mean() != loss
        loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_weights_in_float16_are_refused() -> None:
    with pytest.raises(
        ValueError, match="optimizer.ema is for float32 and bfloat16 weights, but embed.weight is torch"
    ):
        build(TinyModel(torch.float16), {"name": "adamw", "ema": 0.9}, float16=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [{"name": "adamw"}, {"name": "adamw_8bit", "in_backward": True}], ids=str)
def test_streamed_averages_equal_those_on_the_device(settings: dict[str, Any], device: str) -> None:
    """Also after an exchange, which leaves no older copy on the way. On the CPU, copies arrive as late as possible."""
    kept = []
    for is_streamed in (False, True):
        model, settings = TinyModel().to(device), {**settings, "ema": 0.9}
        link = HostLink(torch.device("cuda")) if device == "cuda" else None
        optimizer = streamed(model, settings, link=link)[0] if is_streamed else build(model, settings)
        batches = [[ids.to(device) for ids in micro_batches] for micro_batches in make_batches(6)]
        train(model, optimizer, batches[:3], [1e-2] * 3)
        with averaged_weights(optimizer, model):
            inside = [param.detach().clone() for param in model.parameters()]
        train(model, optimizer, batches[3:], [1e-2] * 3)
        kept.append([*inside, *(param.detach() for param in model.parameters()), *averages(optimizer).values()])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*kept, strict=True))
