"""Rotary embeddings against transformers, at distant positions and in bfloat16."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lean_ft.models.rope import RopeConfig, RotaryEmbedding

ONES = (1.0,) * 64
RISING = tuple(1.0 + 0.5 * i for i in range(64))
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EQUAL = {"high_freq_factor": 1.0}  # as in Llama 4 Scout


@pytest.mark.parametrize(
    ("rope", "theirs"),
    [
        (RopeConfig(1e4), {"rope_type": "default"}),
        (RopeConfig(1e6, "linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
        (
            RopeConfig(5e5, "llama3", **LLAMA3, original_max_positions=8192),
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
        ),
        (
            RopeConfig(5e5, "llama3", **LLAMA3 | EQUAL, original_max_positions=8192),
            {"rope_type": "llama3", **LLAMA3, **EQUAL, "original_max_position_embeddings": 8192},
        ),
        (
            RopeConfig(1e4, "yarn", factor=4.0, original_max_positions=32768, attention_factor=1.3),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.3},
        ),
        (
            RopeConfig(1e4, "longrope", original_max_positions=4096, short_factors=ONES, long_factors=RISING),
            {
                "rope_type": "longrope",
                "short_factor": list(ONES),
                "long_factor": list(RISING),
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.0,
            },
        ),
        (
            RopeConfig(1e4, "dynamic", factor=2.0, original_max_positions=131072 - 1000),
            {"rope_type": "dynamic", "factor": 2.0},
        ),
    ],
    ids=lambda value: value.scaling if isinstance(value, RopeConfig) else "",
)
def test_cos_and_sin_equal_transformers(rope, theirs):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072 if rope.scaling != "dynamic" else 131072 - 1000,
        rope_parameters={"rope_theta": rope.theta, **theirs},
    )
    positions = torch.tensor([[0, 1, 2, 255, 256, 257, 4095, 8192, 30_000, 131_071]])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(()), positions)
    for own, their in zip(RotaryEmbedding(rope, 128)(positions, torch.float32), expected, strict=True):
        # Only the blends are computed in another order; their slowest features turn little, even far out.
        torch.testing.assert_close(own, their, atol=1e-4 if rope.scaling in ("llama3", "yarn") else 0.0, rtol=0.0)


@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
def test_each_document_has_the_frequencies_of_its_length(scaling):
    factors = {"short_factors": ONES, "long_factors": RISING} if scaling == "longrope" else {"factor": 2.0}
    rope = RopeConfig(1e4, scaling, original_max_positions=50, **factors)
    rotary = RotaryEmbedding(rope, 128)
    positions = torch.stack((torch.arange(80), torch.arange(80) % 40))
    together = rotary(positions, torch.float32)[0]
    for row, length, plain in ((0, 80, False), (1, 40, True)):
        alone = rotary(torch.arange(length)[None], torch.float32)[0]
        assert torch.equal(together[row, :length], alone[0])
        assert (
            torch.equal(alone, RotaryEmbedding(RopeConfig(1e4), 128)(positions[:1, :length], alone.dtype)[0]) == plain
        )
    given = rotary(positions, torch.float32, lengths=torch.tensor([[80], [80]]))[0]
    assert torch.equal(given[1, :40], together[0, :40])
    assert [rope.same_frequencies(n, n + 1) for n in (49, 50, 51)] == [True, False, scaling == "longrope"]


def test_consecutive_positions_differ_in_bfloat16():
    rotary = RotaryEmbedding(RopeConfig(1e4), 64)
    cos, sin = rotary(torch.tensor([[1000, 1001]]), torch.bfloat16)
    exact = torch.tensor([1000.0, 1001.0], dtype=torch.float64)
    torch.testing.assert_close(cos[0, :, 0].double(), exact.cos(), atol=4e-3, rtol=0.0)
    torch.testing.assert_close(sin[0, :, 0].double(), exact.sin(), atol=4e-3, rtol=0.0)
