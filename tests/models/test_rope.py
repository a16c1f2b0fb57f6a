"""Rotary embeddings against transformers' own, far from the start, and against being cast with the model."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lean_ft.models.rope import RopeConfig, RotaryEmbedding, rotate

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "theirs"),
    [
        (RopeConfig(1e4), {"rope_type": "default"}),
        (RopeConfig(1e6, "linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
        (
            RopeConfig(5e5, "llama3", **LLAMA3, original_max_positions=8192),
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
        ),
    ],
    ids=lambda value: value.scaling if isinstance(value, RopeConfig) else "",
)
def test_cos_and_sin_equal_transformers(rope, theirs):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": rope.theta, **theirs},
    )
    positions = torch.tensor([[0, 1, 2, 255, 256, 257, 4095, 8192, 30_000, 131_071]])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(()), positions)
    for own, their in zip(RotaryEmbedding(rope, 128)(positions, torch.float32), expected, strict=True):
        # Only llama3's blend is computed in another order; its slowest features turn little, even far out.
        torch.testing.assert_close(own, their, atol=1e-4 if rope.scaling == "llama3" else 0.0, rtol=0.0)


def test_neighbouring_positions_differ_in_bfloat16():
    rotary = RotaryEmbedding(RopeConfig(1e4), 64)
    cos, sin = rotary(torch.tensor([[1000, 1001]]), torch.bfloat16)
    exact = torch.tensor([1000.0, 1001.0], dtype=torch.float64)
    torch.testing.assert_close(cos[0, :, 0].double(), exact.cos(), atol=4e-3, rtol=0.0)
    torch.testing.assert_close(sin[0, :, 0].double(), exact.sin(), atol=4e-3, rtol=0.0)


def test_scores_depend_on_distance_alone():
    rotary = RotaryEmbedding(RopeConfig(100.0), 16)
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).double()
    scores = []
    for start in (0, 7, 50):
        cos, sin = rotary(torch.tensor([[start, start + 5]]), torch.float64)
        turned = rotate(torch.stack((key, query))[None, :, None], cos, sin)[0, :, 0]
        scores.append(turned[0] @ turned[1])
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-4, rtol=0.0)
    assert (scores[0] - query @ key).abs() > 1e-2
