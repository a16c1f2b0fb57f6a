"""Any of torch's optimizers, one a parameter, equals that optimizer over the whole model."""

from typing import Any

import pytest
import torch

from lean_ft.optim import FromTorch, Optimizer
from tests.optim.tiny_training import TinyModel, loss_of, make_batches, same_weights, train

LR = 1e-3
CHOICES = [(torch.optim.RMSprop, {"alpha": 0.9}), (torch.optim.NAdam, {}), (torch.optim.SGD, {"momentum": 0.9})]


@pytest.mark.parametrize(("kind", "settings"), CHOICES)
@pytest.mark.parametrize("in_backward", [False, True])
def test_equals_torch_and_resumes_bitwise(kind: Any, settings: dict[str, Any], in_backward: bool) -> None:
    batches = make_batches(4)
    theirs = TinyModel(torch.float32)
    reference = kind(theirs.parameters(), lr=LR, **settings)
    for (ids,) in batches:
        loss_of(theirs, ids).backward()
        reference.step()
        reference.zero_grad()

    ours = TinyModel(torch.float32)
    optimizer = Optimizer(ours.named_parameters(), FromTorch(kind, **settings), in_backward=in_backward)
    train(ours, optimizer, batches[:2], [LR] * 2)
    resumed_model = TinyModel(torch.float32)
    resumed_model.load_state_dict(ours.state_dict())
    resumed = Optimizer(resumed_model.named_parameters(), FromTorch(kind, **settings), in_backward=in_backward)
    resumed.load_state_dict({name: tensor.clone() for name, tensor in optimizer.state_dict().items()})
    assert resumed.state_bytes == optimizer.state_bytes > 0
    train(ours, optimizer, batches[2:], [LR] * 2)
    train(resumed_model, resumed, batches[2:], [LR] * 2)
    assert same_weights(ours, resumed_model)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_vectors_do_not_decay() -> None:
    model = torch.nn.Linear(3, 3)
    rule = FromTorch(torch.optim.AdamW, weight_decay=0.5)
    optimizer = Optimizer(model.named_parameters(), rule, in_backward=False)
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.set_lr(0.1)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before[0] * 0.95)
    assert torch.equal(model.bias.detach(), before[1])


def test_state_that_is_no_tensor_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state[self.param_groups[0]["params"][0]]["count"] = 3

    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.zeros(2)
    optimizer = Optimizer([("p", param)], FromTorch(Odd), in_backward=False)
    with pytest.raises(ValueError, match="Odd keeps count as int"):
        optimizer.step()
