"""What a value model is for: advantages of tokens over what was expected before them, and the loss of expecting better.

Shapes: B answers, T tokens of the longest.
"""

import torch
from torch import Tensor

SMALLEST_DEVIATION = 1e-4  # below it advantages are all alike, and stay small


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """How much better each token did than was expected before it, and what should have been expected: (B, T) each.

    rewards (B, T): for each token, the answer's own at its last; values (B, T): what was expected before it. Behind the last
    there is nothing. d_t = r_t + gamma V_t+1 - V_t, and the advantage the sum of all that follow by powers of gamma lambda.
    Schulman et al. 2015, arXiv:1506.02438.
    """
    behind = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    steps = rewards + gamma * behind - values
    advantages, above = torch.empty_like(steps), torch.zeros_like(steps[:, 0])
    for t in reversed(range(steps.shape[1])):
        above = steps[:, t] + gamma * gae_lambda * above
        advantages[:, t] = above
    return advantages, advantages + values


def whitened(values: Tensor) -> Tensor:
    """values (N,) less their mean, over Bessel's standard deviation."""
    deviation = values.std() if len(values) > 1 else torch.zeros(())
    return (values - values.mean()) / deviation.clamp(min=SMALLEST_DEVIATION)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, epsilon: float, num_tokens: int) -> Tensor:
    """Half the squared error of values (B, T), a mean over the step's `num_tokens`; a value that went further than `epsilon` from
    the old one, before the first update, gains nothing by that.

    mask (B, T): true on the tokens that count. Schulman et al. 2017, arXiv:1707.06347, and the clip of their code.
    """
    near = old + (values - old).clamp(-epsilon, epsilon)
    errors = torch.maximum((values - returns).square(), (near - returns).square())
    return 0.5 * (errors * mask).sum() / num_tokens
