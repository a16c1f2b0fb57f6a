"""Families that GGUF files support, one row each: how a file stores a model, and what llama.cpp reads in it.

An export checks that its file, read by the same row, is the model again. So a row reads only what llama.cpp reads: a fact that
llama.cpp's architecture always computes in one way is read in that way, and a model that needs another is refused. Fields of
config.json that a row leaves out have transformers' defaults. Every row is tested with llama.cpp.

Source: llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp and src/models.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lean_ft.gguf.header import Facts

if TYPE_CHECKING:
    from lean_ft.models import Decoder, DecoderConfig

Step = tuple[Any, ...]  # a name of `lean_ft.gguf.layouts.STEPS`, and numbers


class StoredAs(NamedTuple):
    """How a file stores a parameter."""

    steps: tuple[Step, ...] = ()
    """From the parameter to the file's tensors, as in `lean_ft.gguf.layouts`."""
    places: tuple[str, ...] | None = None
    """What takes the place of a part of the parameter's name, once per tensor; none for metadata. None: the name stays."""


Change = StoredAs | Callable[["DecoderConfig"], StoredAs]


class GGUFFamily(NamedTuple):
    """How a family is stored for llama.cpp, and read from its files."""

    architecture: str
    class_name: str = ""
    """transformers' name of the model, without its ending ForCausalLM."""
    changes: Mapping[str, Change] = {}
    """Part of a parameter's name -> how the file stores it. The first part that occurs in the name counts."""
    numbers: Mapping[str, tuple[str, str]] = {}
    """Metadata of the architecture -> the fields of DecoderConfig and of config.json that it stores."""
    norm_eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    """The metadata for the epsilon of norms, and its field of config.json."""
    metadata: Callable[["Decoder"], dict[str, Any]] = lambda model: {}
    """Further metadata of the architecture."""
    fields: Mapping[str, str] = {}
    """Metadata of the architecture -> the field of config.json with this count, or "" if there is none."""
    config: Callable[[Facts], dict[str, Any]] = lambda facts: {}
    """Further fields of config.json."""
    tied: bool | None = None
    """Whether llama.cpp uses the embeddings as the output layer. None: if the file has no output layer."""
    whole_heads: bool = False
    """Whether llama.cpp takes the hidden size for the size of all heads together."""
    pairs_neighbors: bool = False
    """Whether llama.cpp rotates features 2 * i and 2 * i + 1 of a head together, not i and i + R / 2."""
    scalings: frozenset[str] = frozenset({"default", "linear", "yarn"})
    """The rotary scalings that llama.cpp computes as we do."""
    windows: Callable[[int], bool] = lambda num_layers: False
    """Whether llama.cpp reads sliding windows in a model with so many layers."""
    period: int = 0
    """Every how many layers one has no sliding window, if the file does not list them."""
    scaled_windows: bool = True
    """Whether llama.cpp applies the rotary scaling in layers with a window too. If not, config.json has rotary settings by kind."""
    not_stored: frozenset[str] = frozenset()
    """Fields of the configuration that the weights of a file have, or that change little and are reported."""
    no_adapter: frozenset[str] = frozenset()
    """Parts of the names of weights without adapters: llama.cpp ignores them there, or a change does more than reorder rows."""
    architecture_of: Callable[["DecoderConfig"], str] | None = None
    """The architecture, if it depends on the configuration."""


PLUS_ONE = StoredAs((("add", 1.0),))  # Hugging Face multiplies by 1 + weight, llama.cpp by the weight


def always(num_layers: int) -> bool:
    return True


def _gemma_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp's scale of scores, by which it knows the largest Gemma 2 and 3."""
    is_largest = facts.num_layers == {"gemma2": 46, "gemma3": 62}[facts.architecture]
    hidden, heads = facts.count("embedding_length"), facts.count("attention.head_count", least=1)
    scale = hidden // heads if is_largest else facts.count("attention.key_length", hidden // heads)
    return {"query_pre_attn_scalar": scale}


def _xielu(model: "Decoder") -> dict[str, Any]:
    """The activation's trained numbers, one per layer."""
    activations = [model.get_submodule(f"model.layers.{i}.mlp.act_fn") for i in range(model.config.num_layers)]
    if activations[0].get_parameter("alpha_n").is_meta:
        return {}  # a model that was not read yet
    names = ("alpha_n", "alpha_p", "beta", "eps")
    return {f"xielu.{name}": [float(getattr(found, name).detach()) for found in activations] for name in names}


def _longrope(model: "Decoder") -> dict[str, Any]:
    ropes = [layer.rope for layer in model.config.layers if layer.rope and layer.rope.scaling == "longrope"]
    return {"rope.scaling.attn_factor": ropes[0].attention_factor} if ropes else {}


def attention_bias(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": facts.has("attn_q.bias")}


def biases(facts: Facts) -> dict[str, Any]:
    return {**attention_bias(facts), "mlp_bias": facts.has("ffn_up.bias")}


def _ministral3_config(facts: Facts) -> dict[str, Any]:
    """Files of llama.cpp's converter have yarn's `mscale_all_dim`; `mscale` is 1."""
    key = "rope.scaling.yarn_log_multiplier"
    return {"rope_more": {"mscale": 1.0, "mscale_all_dim": facts.number(key)}} if key in facts else {}


# A table: related fields share a line.
# fmt: off
GRANITE_NUMBERS = {
    "attention.scale": ("attention_scale", "attention_multiplier"),
    "embedding_scale": ("embedding_multiplier", "embedding_multiplier"),
    "residual_scale": ("residual_multiplier", "residual_multiplier"), "logit_scale": ("logits_divisor", "logits_scaling"),
}
LLAMA3_SCALINGS = frozenset({"default", "linear", "yarn", "llama3"})
LLAMA = GGUFFamily("llama", "Llama", pairs_neighbors=True, scalings=LLAMA3_SCALINGS, config=biases)
_GEMMA = GGUFFamily("gemma", "Gemma", changes={"norm.weight": PLUS_ONE}, tied=True)
_OLMO2 = GGUFFamily("olmo2", "Olmo2", tied=False, whole_heads=True)

DENSE = {
    "llama": LLAMA,
    "mistral": LLAMA,  # read as llama, which computes the same
    "ministral3": GGUFFamily("mistral3", "Ministral3", pairs_neighbors=True, config=_ministral3_config),
    "qwen2": GGUFFamily("qwen2", "Qwen2", whole_heads=True),
    "qwen3": GGUFFamily("qwen3", "Qwen3"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(class_name="Olmo3", windows=always, scaled_windows=False, period=4),
    "smollm3": GGUFFamily("smollm3", "SmolLM3", pairs_neighbors=True),
    "seed_oss": GGUFFamily("seed_oss", "SeedOss", config=attention_bias),
    "ernie4_5": GGUFFamily("ernie4_5", "Ernie4_5", pairs_neighbors=True),
    "hunyuan_v1_dense": GGUFFamily("hunyuan-dense", "HunYuanDenseV1"),
    "exaone4": GGUFFamily(
        "exaone4", "Exaone4", whole_heads=True, scalings=LLAMA3_SCALINGS, windows=lambda num_layers: num_layers == 64,
        period=4,
    ),
    "apertus": GGUFFamily(
        "apertus", "Apertus", changes={"act_fn": StoredAs(places=())}, metadata=_xielu, config=attention_bias, tied=False,
        scalings=LLAMA3_SCALINGS,
    ),
    "cohere2": GGUFFamily(
        "cohere2", "Cohere2", metadata=lambda model: {"logit_scale": 1.0 / model.config.logits_divisor},
        config=lambda facts: {"logit_scale": facts.number("logit_scale")}, tied=True, whole_heads=True,
        norm_eps=("attention.layer_norm_epsilon", "layer_norm_eps"), pairs_neighbors=True, windows=always, period=4,
    ),
    "glm4": GGUFFamily("glm4", "Glm4", pairs_neighbors=True, config=attention_bias),
    "phi3": GGUFFamily(
        "phi3", "Phi3", metadata=_longrope, whole_heads=True, scalings=frozenset({"default", "linear", "longrope"}),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        architecture="gemma2", class_name="Gemma2", config=_gemma_config, windows=always, period=2,
        numbers={
            "attn_logit_softcapping": ("attention_softcap", "attn_logit_softcapping"),
            "final_logit_softcapping": ("logits_softcap", "final_logit_softcapping"),
        },
    ),
    "gemma3_text": _GEMMA._replace(
        architecture="gemma3", class_name="Gemma3", config=_gemma_config, windows=always, scaled_windows=False, period=6,
    ),
    "granite": LLAMA._replace(architecture="granite", class_name="Granite", numbers=GRANITE_NUMBERS),
}
# fmt: on
