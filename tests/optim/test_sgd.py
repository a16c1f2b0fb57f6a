"""SGD against torch.optim.SGD, and its decoupled weight decay against the formula in float64."""

import pytest
import torch

from tests.optim.tiny_training import build


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_torchs_sgd(momentum: float) -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(9, 7), torch.nn.Linear(9, 7)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build(ours, {"name": "sgd", "momentum": momentum})
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum)
    optimizer.set_lr(0.1)
    for _ in range(5):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_bfloat16_weights_are_rounded_once_and_only_matrices_decay() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 500).bfloat16()
    before = {name: param.detach().double() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer = build(model, {"name": "sgd", "weight_decay": 0.5})
    optimizer.set_lr(0.125)
    optimizer.step()
    for name, decay in (("weight", 0.5), ("bias", 0.0)):
        param = model.get_parameter(name)
        assert param.grad is not None
        exact = before[name] - 0.125 * (param.grad.double() + decay * before[name])
        assert (param.double() - exact).abs().max() <= exact.abs().max() * 2**-8  # half a unit in the last place
        assert (param == exact.bfloat16()).float().mean() > 0.999
