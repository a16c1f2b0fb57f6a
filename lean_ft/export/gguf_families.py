"""Families that GGUF files support: what llama.cpp's own tables of tensor names and metadata do not say.

A row also lists what llama.cpp's architecture computes whatever the file says. A model that needs anything else is refused, so
no exported file opens and then answers differently. Every row is tested with llama.cpp.

Source: llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp and src/models.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lean_ft.export.gguf_facts import Facts
from lean_ft.models import Decoder
from lean_ft.models.config import DecoderConfig
from lean_ft.models.gguf_layouts import Step

STORED: Any = object()  # in the place of a value that llama.cpp computes with: the file stores the field
ABSENT: Any = object()  # in the place of a field's value: config.json does not have it


class Layout(NamedTuple):
    """How a file stores a parameter."""

    steps: tuple[Step, ...] = ()
    """From the parameter to the file's tensors, as in `lean_ft.models.gguf_layouts`."""
    places: tuple[str, ...] | None = None
    """What takes the place of a part of the parameter's name, once per tensor; none for metadata. None: the name stays."""


Change = Layout | Callable[[DecoderConfig], Layout]


class GGUFFamily(NamedTuple):
    """How a family is stored for llama.cpp, and read from its files."""

    architecture: str
    changes: Mapping[str, Change] = {}
    """Part of a parameter's name -> how the file stores it. The first part that occurs in the name counts."""
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
    """Whether llama.cpp applies the rotary scaling in layers with a window too. If not, config.json has rotary settings by kind."""
    layers: Mapping[str, Any] = {}
    """As `fixed`, for fields of LayerConfig. Functions take the number of the layer too."""
    mixture: Mapping[str, Any] = {}
    """As `fixed`, for fields of MixtureConfig."""
    mixer: Mapping[str, Any] = {}
    """As `fixed`, for fields of the configuration of recurrent layers."""
    optional: frozenset[str] = frozenset()
    """The parts with rules above that a model may lack: "experts" and "recurrent layers"."""
    no_adapter: frozenset[str] = frozenset()
    """Parts of the names of weights without adapters: llama.cpp ignores them there, or a change does more than reorder rows."""
    architecture_of: Callable[[DecoderConfig], str] | None = None
    """The architecture, if it depends on the configuration."""
    class_name: str = ""
    """transformers' name of the model, without its ending ForCausalLM."""
    fields: Mapping[str, str] = {}
    """Metadata of the architecture -> the field of config.json, beyond those that most families share."""
    config: Callable[[Facts], dict[str, Any]] = lambda facts: {}
    """Further fields of config.json."""
    period: int = 0
    """Every how many layers one has no sliding window, if the file does not list them."""


PLUS_ONE = Layout((("add", 1.0),))  # Hugging Face multiplies by 1 + weight, llama.cpp by the weight


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
    if activations[0].get_parameter("alpha_n").is_meta:
        return {}  # a model that was not read yet
    names = ("alpha_n", "alpha_p", "beta", "eps")
    return {f"xielu.{name}": [float(getattr(found, name).detach()) for found in activations] for name in names}


def _longrope(model: Decoder) -> dict[str, Any]:
    ropes = [layer.rope for layer in model.config.layers if layer.rope and layer.rope.scaling == "longrope"]
    return {"rope.scaling.attn_factor": ropes[0].attention_factor} if ropes else {}


def _biased(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": facts.has("attn_q.bias")}


def biases(facts: Facts) -> dict[str, Any]:
    return {**_biased(facts), "mlp_bias": facts.has("ffn_up.bias")}


def _ministral3_config(facts: Facts) -> dict[str, Any]:
    """Files of llama.cpp's converter have yarn's `mscale_all_dim`; `mscale` is 1."""
    key = "rope.scaling.yarn_log_multiplier"
    scales = {"mscale": 1.0, "mscale_all_dim": facts.number(key)} if key in facts else {}
    return {"sliding_window": None, "rope_more": scales}


def _gemma_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp's scale of scores, by which it knows the largest Gemma 2 and 3."""
    is_largest = facts.num_layers == {"gemma2": 46, "gemma3": 62}[facts.architecture]
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count", least=1)
    scale = hidden // heads if is_largest else facts.count("attention.key_length", hidden // heads)
    return {**GELU, "attention_bias": False, "query_pre_attn_scalar": scale}


# A table: related fields share a line.
# fmt: off
GELU = {"hidden_act": ABSENT, "hidden_activation": "gelu_pytorch_tanh"}
GRANITE_FIELDS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}
_LLAMA3 = frozenset({"default", "linear", "yarn", "llama3"})
_TIED_OR_NOT = frozenset({"tied_embeddings", "qkv_bias"})
LLAMA = GGUFFamily(
    "llama", shown=_TIED_OR_NOT | {"output_bias", "mlp_bias"}, pairs_neighbors=True, scalings=_LLAMA3, class_name="Llama",
    config=biases,
)
_GEMMA = GGUFFamily(
    "gemma", changes={"norm.weight": PLUS_ONE}, shown=frozenset(),
    fixed={
        "norm_weight_offset": 1.0, "activation": "gelu_tanh", "tied_embeddings": True,
        "embedding_multiplier": lambda config: config.hidden_size**0.5,
    },
    class_name="Gemma", config=lambda facts: {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
)
_GEMMA2 = {"norm_placement": "both", "attention_scale": _gemma_scale(46)}
_GEMMA3 = {"norm_placement": "both", "attention_scale": _gemma_scale(62), "qk_norm": "head"}
_OLMO2 = GGUFFamily(
    "olmo2", shown=frozenset(),
    fixed={"norm_placement": "post", "qk_norm": "projection", "tied_embeddings": False, "head_dim": all_heads},
    class_name="Olmo2", config=lambda facts: {"attention_bias": False},
)
_COHERE2 = {"norm_placement": "parallel", "norm_centered": True, "tied_embeddings": True, "head_dim": all_heads}

GGUF_FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,  # read as llama, which computes the same
    "ministral3": GGUFFamily(
        "mistral3", shown=_TIED_OR_NOT | {"output_bias", "mlp_bias"}, pairs_neighbors=True,
        rope={"query_growth": STORED, "query_growth_positions": STORED}, class_name="Ministral3",
        config=_ministral3_config,
    ),
    "qwen2": GGUFFamily(
        "qwen2", fixed={"head_dim": all_heads}, class_name="Qwen2", config=lambda facts: {"use_sliding_window": False}
    ),
    "qwen3": GGUFFamily(
        "qwen3", fixed={"qk_norm": "head"}, class_name="Qwen3",
        config=lambda facts: {"attention_bias": False, "use_sliding_window": False},
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(windows=always, scaled_windows=False, class_name="Olmo3", period=4),
    "smollm3": GGUFFamily(
        "smollm3", pairs_neighbors=True, has_rope=lambda config, layer: layer % 4 != 3, class_name="SmolLM3",
        config=lambda facts: {
            "attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4, "use_sliding_window": False,
        },
    ),
    "seed_oss": GGUFFamily(
        "seed_oss", class_name="SeedOss",
        config=lambda facts: {**_biased(facts), "attention_out_bias": False, "mlp_bias": False},
    ),
    "ernie4_5": GGUFFamily(
        "ernie4_5", shown=_TIED_OR_NOT | {"output_bias"}, pairs_neighbors=True, class_name="Ernie4_5",
        config=lambda facts: {"use_bias": False},
    ),
    "hunyuan_v1_dense": GGUFFamily(
        "hunyuan-dense", fixed={"qk_norm": "turned_head"}, class_name="HunYuanDenseV1",
        config=lambda facts: {"attention_bias": False},
    ),
    "exaone4": GGUFFamily(
        "exaone4", fixed={"norm_placement": "post", "qk_norm": "head", "head_dim": all_heads}, scalings=_LLAMA3,
        has_rope=_rope_in_windows, windows=lambda config: config.num_layers == 64, class_name="Exaone4", period=4,
    ),
    "apertus": GGUFFamily(
        "apertus", changes={"act_fn": Layout(places=())}, metadata=_xielu, shown=frozenset({"qkv_bias"}),
        fixed={"activation": "xielu", "gated": False, "qk_norm": "head", "tied_embeddings": False}, scalings=_LLAMA3,
        class_name="Apertus", config=lambda facts: {**_biased(facts), "hidden_act": "xielu"},
    ),
    "cohere2": GGUFFamily(
        "cohere2", metadata=lambda model: {"logit_scale": 1.0 / model.config.logits_divisor},
        shown=frozenset({"logits_divisor"}), fixed=_COHERE2, pairs_neighbors=True,
        has_rope=lambda config, layer: config.layers[layer].window is not None, windows=always, class_name="Cohere2",
        fields={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        config=lambda facts: {"attention_bias": False}, period=4,
    ),
    "glm4": GGUFFamily(
        "glm4", fixed={"norm_placement": "both", "fused_gate_up": True}, pairs_neighbors=True, class_name="Glm4",
        config=_biased,
    ),
    "phi3": GGUFFamily(
        "phi3", metadata=_longrope, fixed={"fused_qkv": True, "fused_gate_up": True, "head_dim": all_heads},
        scalings=frozenset({"default", "linear", "longrope"}), class_name="Phi3",
        config=lambda facts: {"sliding_window": None},
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        architecture="gemma2",
        numbers={"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logits_softcap"},
        fixed={**_GEMMA.fixed, **_GEMMA2}, windows=always, class_name="Gemma2", config=_gemma_config, period=2,
        fields={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    ),
    "gemma3_text": _GEMMA._replace(
        architecture="gemma3", fixed={**_GEMMA.fixed, **_GEMMA3}, windows=always, scaled_windows=False,
        class_name="Gemma3", config=_gemma_config, period=6,
    ),
    "granite": LLAMA._replace(
        architecture="granite",
        numbers={
            "attention.scale": "attention_scale", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_divisor",
        },
        class_name="Granite", fields=GRANITE_FIELDS,
    ),
}
# fmt: on
