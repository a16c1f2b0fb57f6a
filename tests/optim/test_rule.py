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


def test_stacked_matrices_decay_and_stacked_biases_do_not(settings) -> None:
    model = Parameters()
    optimizer = build(model, {**settings, "stochastic_rounding": False})
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.set_lr(0.5)
    optimizer.step()
    assert torch.allclose(model.up_proj, torch.full((4, 8, 8), 1 - 0.5 * 0.1))
    assert torch.equal(model.up_proj_bias, torch.ones(4, 8))
    assert torch.equal(model.norm, torch.ones(8))
