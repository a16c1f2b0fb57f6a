"""FLOP counts of custom operators, which the planner uses, against counts of plain operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lean_ft.models import load_model
from lean_ft.models.config import MixtureConfig
from lean_ft.models.moe import MixtureOfExperts
from lean_ft.models.state.linear_attention import CHUNK, SEGMENT, linear_attention, linear_attention_backward
from tests.models.test_moe import each_expert_by_itself

OPS = torch.ops.lean_ft
SOLVE = {torch.ops.aten.linalg_solve_triangular: lambda a, b, *_, **__: b[-1] * b[-2] ** 2 * b[0] * b[1]}
OF_LINEAR_LAYERS = (torch.ops.aten.mm, torch.ops.aten.addmm, OPS.grouped_matmul, OPS.grouped_outer)


def counted(function, *args) -> dict:
    with FlopCounterMode(display=False, custom_mapping=SOLVE) as counter:
        function(*args)
    return counter.get_flop_counts()["Global"]


@pytest.mark.first(3)
@torch.no_grad()
@pytest.mark.parametrize(
    "case", ["deepseek_v3", "glm4_moe", "qwen3_5_moe_text", "lfm2", "nemotron_h", "gemma4_text_experts"]
)
def test_linear_layers_and_experts_are_counted_as_in_transformers(case, make_checkpoint):
    """For latent attention, shared experts and every mixer."""
    folder, reference = make_checkpoint(case)
    reference.config._experts_implementation = "eager"  # PyTorch's grouped products are not counted
    ids = torch.arange(3, 83).view(2, 40)
    ours, theirs = counted(load_model(folder), ids), counted(reference, ids)
    total, expected = (sum(counts.get(op, 0) for op in OF_LINEAR_LAYERS) for counts in (ours, theirs))
    assert total == expected > 0
    if of_taps := theirs.get(torch.ops.aten.convolution):  # of some tokens more, which it drops
        assert of_taps * 40 / 43 <= ours[OPS.causal_convolution] <= of_taps


def test_a_mixtures_backward_is_counted_as_that_of_each_expert():
    config = MixtureConfig(4, 4, 24, weights_sum_to_one=True)
    mixture, x = MixtureOfExperts(16, config), torch.randn(2, 9, 16, requires_grad=True)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    found, expected = (
        sum(counted(lambda: function(x).sum().backward()).values())  # noqa: B023
        for function in (lambda x: mixture(x)[0], lambda x: each_expert_by_itself(mixture, x))
    )
    assert found == expected > 0


@pytest.mark.first(1)
@pytest.mark.parametrize("corrects", [True, False])
def test_a_states_products_are_counted_as_they_are_made(corrects):
    shape, num_keys, width, size = (2, 2 * SEGMENT), 2, 24, 40
    query, key = (torch.randn(*shape, num_keys, width) for _ in range(2))
    value, beta, log_decay = torch.randn(*shape, 4, size), torch.rand(*shape, 4), -torch.rand(*shape, 4)
    forward = (query, key, value, log_decay, beta, None, None, corrects)
    made = counted(linear_attention._init_fn, *forward)
    assert counted(linear_attention, *forward)[OPS.linear_attention] == sum(made.values()) > 0
    backward = (value, query, key, value, log_decay, beta, None, linear_attention(*forward)[1], corrects)
    made = counted(linear_attention_backward._init_fn, *backward)
    told = counted(linear_attention_backward, *backward)[OPS.linear_attention_backward]
    # A segment's last state is not made again.
    assert told == pytest.approx(sum(made.values()), rel=CHUNK / SEGMENT / 4)
