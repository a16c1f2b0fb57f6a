"""The longest text of published models, as their cards tell it."""

from typing import Any

import pytest

from lean_ft.tokenizers.loading import context_length


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        # Llama 3.1, Phi-3 128k: the scaling has made the longest what it is.
        (
            {"max_position_embeddings": 131072, "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}},
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 131072),
        # Qwen2.5 with yarn as its card says, gpt-oss, Vicuna 16k.
        (
            {"max_position_embeddings": 32768, "rope_scaling": {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            131072,
        ),
        (
            {"max_position_embeddings": 131072, "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}},
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"model_type": "gemma3", "text_config": {"max_position_embeddings": 131072}}, 131072),
        ({}, None),
        ({"max_position_embeddings": "long"}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": "x"}}, 512),
    ],
)  # fmt: skip
def test_the_longest_text(config: dict[str, Any], tokens: int | None):
    assert context_length(config) == tokens
