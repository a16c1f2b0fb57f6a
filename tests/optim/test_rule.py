"""Weight decay is for matrices alone, whatever the rule."""

import torch
from torch import nn

from tests.optim.tiny_training import build


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.ones(4, 8, 8))  # one matrix an expert
        self.up_proj_bias = nn.Parameter(torch.ones(4, 8))  # one bias an expert
        self.norm = nn.Parameter(torch.ones(8))
        self.q_norm = nn.Linear(8, 4, bias=False)  # the place of a norm with a weight for each of 4 heads
        nn.init.ones_(self.q_norm.weight)


def test_stacked_matrices_decay_and_stacked_vectors_do_not(settings) -> None:
    model = Parameters()
    optimizer = build(model, {**settings, "stochastic_rounding": False})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.set_lr(0.5)
    optimizer.step()
    assert torch.allclose(model.up_proj, torch.full((4, 8, 8), 1 - 0.5 * 0.1))
    assert torch.equal(model.up_proj_bias, torch.ones(4, 8))
    assert torch.equal(model.norm, torch.ones(8))
    assert torch.equal(model.q_norm.weight, torch.ones(4, 8))
