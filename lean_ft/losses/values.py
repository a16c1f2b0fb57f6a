"""Generalized advantages and the loss of a value model.

Shapes: B completions, T tokens of the longest.
"""

import torch
from torch import Tensor

SMALLEST_DEVIATION = 1e-4  # if advantages are nearly equal, they stay small


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalized advantages and returns of tokens, (B, T) each.

    rewards (B, T): per token, with the completion's reward at its last; values (B, T): the prediction before each
    token, 0 after the last. With d_t = r_t + gamma V_t+1 - V_t, the advantage is the sum of d_t+k (gamma gae_lambda)^k
    over k >= 0. Schulman et al. 2015, arXiv:1506.02438.
    """
    behind = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    steps = rewards + gamma * behind - values
    advantages, above = torch.empty_like(steps), torch.zeros_like(steps[:, 0])
    for t in reversed(range(steps.shape[1])):
        above = steps[:, t] + gamma * gae_lambda * above
        advantages[:, t] = above
    return advantages, advantages + values


def whitened(values: Tensor) -> Tensor:
    """values (N,) minus their mean, divided by their standard deviation (Bessel-corrected)."""
    deviation = values.std() if len(values) > 1 else torch.zeros(())
    return (values - values.mean()) / deviation.clamp(min=SMALLEST_DEVIATION)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, epsilon: float, num_tokens: int) -> Tensor:
    """Half the squared error of values (B, T), averaged over the step's `num_tokens`, with values clipped to `epsilon`
    around the old ones from before the first update.

    mask (B, T): true on trained tokens. Schulman et al. 2017, arXiv:1707.06347, and the clip of their code.
    """
    near = old + (values - old).clamp(-epsilon, epsilon)
    errors = torch.maximum((values - returns).square(), (near - returns).square())
    return 0.5 * (errors * mask).sum() / num_tokens
