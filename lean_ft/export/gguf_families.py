"""Families that GGUF files support: what llama.cpp's own tables of tensor names and metadata do not say.

Every row is tested with llama.cpp: log-probabilities of the exported file equal lean_ft's. Source: llama.cpp,
convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from collections.abc import Mapping
from typing import NamedTuple


class GGUFFamily(NamedTuple):
    """How a family is stored for llama.cpp."""

    architecture: str
    interleaved: bool = False
    """Whether its rotary embedding pairs neighboring features, where Hugging Face pairs i and i + R / 2."""
    norm_offset: float = 0.0
    """What is added to the weights of norms: Hugging Face multiplies by 1 + weight, llama.cpp by the weight."""
    numbers: Mapping[str, str] = {}
    """Metadata of the architecture -> the field of DecoderConfig that has it."""
    rope_every: int | None = None
    """Every n-th layer has no rotary embedding."""
    activation: str = "silu"
    optional: frozenset[str] = frozenset()
    """The tensors of `OPTIONAL` that its architecture reads. llama.cpp does not open a file with others."""
    tied: bool | None = None
    """Whether output and embeddings must share their weights; None: they may."""
    heads_fill_hidden: bool = False
    """Whether the heads' features must add up to the hidden size."""


# Name endings of tensors that some architectures read and others do not.
OPTIONAL = {"attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias", "rope_freqs.weight"}
_ALL = frozenset(OPTIONAL)

GGUF_FAMILIES = {
    "llama": GGUFFamily("llama", interleaved=True, optional=_ALL),
    "mistral": GGUFFamily("llama", interleaved=True, optional=_ALL),
    "qwen2": GGUFFamily("qwen2", heads_fill_hidden=True),
    "qwen3": GGUFFamily("qwen3"),
    "olmo2": GGUFFamily("olmo2", tied=False, heads_fill_hidden=True),
    "smollm3": GGUFFamily("smollm3", interleaved=True, rope_every=4),
    "seed_oss": GGUFFamily("seed_oss"),
    "ernie4_5": GGUFFamily("ernie4_5", optional=frozenset({"attn_output.bias"})),
    "gemma": GGUFFamily("gemma", norm_offset=1.0, activation="gelu_tanh", tied=True),
    "granite": GGUFFamily(
        "granite",
        interleaved=True,
        optional=_ALL,
        numbers={
            "attention.scale": "attention_scale",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_divisor",
        },
    ),
}
