"""Families that GGUF files support: what llama.cpp's own tables of tensor names and metadata do not say.

A row also lists what llama.cpp's architecture computes whatever the file says. A model that needs anything else is refused, so
no exported file opens and then answers differently. Every row is tested with llama.cpp.

Source: llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp and src/models.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig

Change = Callable[[Tensor, DecoderConfig], Tensor | Mapping[str, Tensor]]
STORED: Any = object()  # in the place of a value that llama.cpp computes with: the file stores the field


class GGUFFamily(NamedTuple):
    """How a family is stored for llama.cpp."""

    architecture: str
    changes: Mapping[str, Change] = {}
    """Part of a parameter's name -> its values in the file. The first part that occurs in the name counts. A mapping splits a
    parameter: each of its keys takes the place of the part."""
    numbers: Mapping[str, str] = {}
    """Metadata of the architecture -> the field of DecoderConfig that it stores."""
    metadata: Callable[[Decoder], dict[str, Any]] = lambda model: {}
    """Further metadata of the architecture."""
    shown: frozenset[str] = frozenset({"tied_embeddings", "qkv_bias"})
    """Fields of DecoderConfig that llama.cpp reads from `metadata` or from the tensors that a file has."""
    fixed: Mapping[str, Any] = {}
    """Field of DecoderConfig -> the value that llama.cpp computes with, or a function of the configuration. Every field that is
    neither stored nor listed must have its default."""
    pairs_neighbors: bool = False
    """Whether llama.cpp rotates features 2 * i and 2 * i + 1 of a head together, not i and i + R / 2."""
    scalings: frozenset[str] = frozenset({"default", "linear", "yarn"})
    """The rotary scalings that llama.cpp computes as we do."""
    rope: Mapping[str, Any] = {}
    """As `fixed`, for fields of RopeConfig."""
    has_rope: Callable[[DecoderConfig, int], bool] = lambda config, layer: True
    """Whether llama.cpp rotates queries and keys in a layer."""
    windows: Callable[[DecoderConfig], bool] = lambda config: False
    """Whether files store which layers have a sliding window."""
    scaled_windows: bool = True
    """Whether llama.cpp applies the rotary scaling in layers with a window too."""
    layers: Mapping[str, Any] = {}
    """As `fixed`, for fields of LayerConfig. Functions take the number of the layer too."""
    mixture: Mapping[str, Any] = {}
    """As `fixed`, for fields of MixtureConfig."""
    mixer: Mapping[str, Any] = {}
    """As `fixed`, for fields of the configuration of recurrent layers."""
    optional: frozenset[str] = frozenset()
    """The parts with rules above that a model may lack: "experts" and "recurrent layers"."""
    columns: frozenset[str] = frozenset()
    """The parts of `changes` that reorder columns instead of rows."""
    no_adapter: frozenset[str] = frozenset()
    """Parts of the names of weights without adapters: llama.cpp ignores them there, or a change does more than reorder rows."""
    architecture_of: Callable[[DecoderConfig], str] | None = None
    """The architecture, if it depends on the configuration."""


def plus_one(weight: Tensor, config: DecoderConfig) -> Tensor:
    """Hugging Face multiplies by 1 + weight, llama.cpp by the weight."""
    return weight.float() + 1.0


def all_heads(config: DecoderConfig) -> int:
    """The features of a head if all heads together have the hidden size."""
    return config.hidden_size // config.num_heads


def _gemma_scale(num_layers: int) -> Callable[[DecoderConfig], float]:
    """The scale of scores: llama.cpp knows the largest Gemma by its number of layers."""
    return lambda config: (all_heads(config) if config.num_layers == num_layers else config.head_dim) ** -0.5


def always(config: DecoderConfig) -> bool:
    return True


def _rope_in_windows(config: DecoderConfig, layer: int) -> bool:
    """In models with sliding windows only the layers with a window have positions."""
    return config.layers[layer].window is not None or not any(other.window for other in config.layers)


def _xielu(model: Decoder) -> dict[str, Any]:
    """The activation's trained numbers, one per layer."""
    activations = [model.get_submodule(f"model.layers.{i}.mlp.act_fn") for i in range(model.config.num_layers)]
    names = ("alpha_n", "alpha_p", "beta", "eps")
    return {f"xielu.{name}": [float(getattr(found, name).detach()) for found in activations] for name in names}


def _longrope(model: Decoder) -> dict[str, Any]:
    ropes = [layer.rope for layer in model.config.layers if layer.rope and layer.rope.scaling == "longrope"]
    return {"rope.scaling.attn_factor": ropes[0].attention_factor} if ropes else {}


_LLAMA3 = frozenset({"default", "linear", "yarn", "llama3"})
_TIED_OR_NOT = frozenset({"tied_embeddings", "qkv_bias"})
LLAMA = GGUFFamily("llama", shown=_TIED_OR_NOT | {"output_bias", "mlp_bias"}, pairs_neighbors=True, scalings=_LLAMA3)
_GEMMA = GGUFFamily(
    "gemma",
    changes={"norm.weight": plus_one},
    shown=frozenset(),
    fixed={
        "norm_weight_offset": 1.0,
        "activation": "gelu_tanh",
        "tied_embeddings": True,
        "embedding_multiplier": lambda config: config.hidden_size**0.5,
    },
)
_GEMMA2 = {"norm_placement": "both", "attention_scale": _gemma_scale(46)}
_GEMMA3 = {"norm_placement": "both", "attention_scale": _gemma_scale(62), "qk_norm": "head"}
_OLMO2 = GGUFFamily(
    "olmo2",
    shown=frozenset(),
    fixed={"norm_placement": "post", "qk_norm": "projection", "tied_embeddings": False, "head_dim": all_heads},
)
_COHERE2 = {"norm_placement": "parallel", "norm_centered": True, "tied_embeddings": True, "head_dim": all_heads}

GGUF_FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral3": GGUFFamily(
        "mistral3",
        shown=_TIED_OR_NOT | {"output_bias", "mlp_bias"},
        pairs_neighbors=True,
        rope={"query_growth": STORED, "query_growth_positions": STORED},
    ),
    "qwen2": GGUFFamily("qwen2", fixed={"head_dim": all_heads}),
    "qwen3": GGUFFamily("qwen3", fixed={"qk_norm": "head"}),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(windows=always, scaled_windows=False),
    "smollm3": GGUFFamily("smollm3", pairs_neighbors=True, has_rope=lambda config, layer: layer % 4 != 3),
    "seed_oss": GGUFFamily("seed_oss"),
    "ernie4_5": GGUFFamily("ernie4_5", shown=_TIED_OR_NOT | {"output_bias"}, pairs_neighbors=True),
    "hunyuan_v1_dense": GGUFFamily("hunyuan-dense", fixed={"qk_norm": "turned_head"}),
    "exaone4": GGUFFamily(
        "exaone4",
        fixed={"norm_placement": "post", "qk_norm": "head", "head_dim": all_heads},
        scalings=_LLAMA3,
        has_rope=_rope_in_windows,
        windows=lambda config: config.num_layers == 64,
    ),
    "apertus": GGUFFamily(
        "apertus",
        changes={"act_fn": lambda weight, config: {}},
        metadata=_xielu,
        shown=frozenset({"qkv_bias"}),
        fixed={"activation": "xielu", "qk_norm": "head", "tied_embeddings": False},
        scalings=_LLAMA3,
    ),
    "cohere2": GGUFFamily(
        "cohere2",
        metadata=lambda model: {"logit_scale": 1.0 / model.config.logits_divisor},
        shown=frozenset({"logits_divisor"}),
        fixed=_COHERE2,
        pairs_neighbors=True,
        has_rope=lambda config, layer: config.layers[layer].window is not None,
        windows=always,
    ),
    "glm4": GGUFFamily("glm4", fixed={"norm_placement": "both", "fused_gate_up": True}, pairs_neighbors=True),
    "phi3": GGUFFamily(
        "phi3",
        metadata=_longrope,
        fixed={"fused_qkv": True, "fused_gate_up": True, "head_dim": all_heads},
        scalings=frozenset({"default", "linear", "longrope"}),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        architecture="gemma2",
        numbers={"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logits_softcap"},
        fixed={**_GEMMA.fixed, **_GEMMA2},
        windows=always,
    ),
    "gemma3_text": _GEMMA._replace(
        architecture="gemma3",
        fixed={**_GEMMA.fixed, **_GEMMA3},
        windows=always,
        scaled_windows=False,
    ),
    "granite": LLAMA._replace(
        architecture="granite",
        numbers={
            "attention.scale": "attention_scale",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_divisor",
        },
    ),
}
