"""Random tiny checkpoints that transformers makes, and transformers' own model of each, as the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

# One case a fact that differs: what is said to transformers, and nothing about how we read it.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_every_head_its_own_keys": ("Llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "llama_one_key_head": ("Llama", {"num_key_value_heads": 1, "hidden_size": 36, "num_attention_heads": 3}),
    "llama_wide_heads_tied": ("Llama", {"head_dim": 20, "tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "llama_llama3_rope": (
        "Llama",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16}),
}

Reference = transformers.PreTrainedModel
MakeCheckpoint = Callable[..., tuple[Path, Reference]]


def reference_model(case: str, seed: int = 0, **overrides: Any) -> Reference:
    """transformers' model with weights large enough that a wrong formula shows, norms and biases included."""
    family, settings = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Makes the folder of a case, as transformers saves it, and transformers' model of it."""

    def make(case: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
        model = reference_model(case, seed, **overrides)
        folder = tmp_path_factory.mktemp(case)
        model.to(dtype).save_pretrained(folder)
        # Read back, since `to` has rounded the rotary frequencies too, which is not how a bfloat16 model is run.
        return folder, type(model).from_pretrained(folder, dtype=dtype).eval()

    return make


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param
