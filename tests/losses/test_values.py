"""Advantages, their whitening and the two losses of PPO against verl's own formulas, written out here."""

import pytest
import torch
from torch import Tensor

from lean_ft.losses import generalized_advantages, policy_loss, value_loss, whitened

GAMMA, LAMBDA = 0.97, 0.9


@pytest.fixture
def answers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(6)]
    mask = torch.arange(7) < torch.tensor([7, 1, 4, 6, 2])[:, None]
    names = ("rewards", "values", "old_values", "returns", "logps", "old_logps")
    return dict(zip(names, noise, strict=True)) | {"mask": mask}


def test_advantages_are_verls(answers: dict[str, Tensor]) -> None:
    """verl, core_algos.compute_gae_advantage_return, which goes through padded rows from behind."""
    rewards, values, mask = answers["rewards"], answers["values"], answers["mask"].double()
    next_values, last, found = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64), []
    for t in reversed(range(7)):
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        further = delta + GAMMA * LAMBDA * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = further * mask[:, t] + (1 - mask[:, t]) * last
        found.append(last)
    expected = torch.stack(found[::-1], 1)
    mean = (expected * mask).sum() / mask.sum()
    variance = ((expected - mean).square() * mask).sum() / (mask.sum() - 1)
    of_all = []
    for row, length in enumerate(mask.sum(1).int().tolist()):
        own = {name: answers[name][row : row + 1, :length] for name in ("rewards", "values")}
        above, returns = generalized_advantages(**own, gamma=GAMMA, gae_lambda=LAMBDA)
        torch.testing.assert_close(above[0], expected[row, :length])
        torch.testing.assert_close(returns[0], expected[row, :length] + values[row, :length])
        of_all.append(above[0])
    even = whitened(torch.cat(of_all))
    torch.testing.assert_close(
        even, ((expected - mean) * (variance + 1e-8).rsqrt())[answers["mask"]], rtol=1e-6, atol=0
    )
    assert whitened(torch.ones(3)).tolist() == [0, 0, 0] == whitened(torch.ones(1)).tolist() * 3


def test_losses_are_verls(answers: dict[str, Tensor]) -> None:
    """verl, compute_value_loss and compute_policy_loss without its second clip, both means over tokens."""
    mask, num = answers["mask"], int(answers["mask"].sum())
    logps, values = (answers[name].clone().requires_grad_() for name in ("logps", "values"))
    old_values, returns, advantages = answers["old_values"], answers["returns"], answers["rewards"]
    ours = value_loss(values, old_values, returns, mask, 0.3, num)
    clipped = values.clamp(old_values - 0.3, old_values + 0.3)
    theirs = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)[mask].mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, values)[0] for loss in (ours, theirs)))
    both = {"epsilon": 0.2, "epsilon_high": 0.2}
    ours = policy_loss("dapo", logps, answers["old_logps"], advantages, mask, num_tokens=num, **both)
    ratio = (logps - answers["old_logps"]).exp()
    theirs = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))[mask].mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logps)[0] for loss in (ours, theirs)))
