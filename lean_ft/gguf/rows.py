"""Families that GGUF files support, one row each: how a file stores a model, and what llama.cpp reads in it.

An export checks that its file, read by the same row, is the model again. So a row reads only what llama.cpp reads: a
fact that llama.cpp's architecture always computes in one way is read in that way, and a model that needs another is
refused. Fields of config.json that a row leaves out have transformers' defaults. Every row is tested with llama.cpp.

Source: llama.cpp, conversion/*.py (tensors), src/llama-model.cpp and src/models/*.cpp (metadata, and what is computed).

Shapes: E experts, I intermediate features of an expert, D features.
"""

import math
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
    """What takes the place of a part of the parameter's name, once per tensor; none for metadata. None: the name
    stays."""


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
    """Whether llama.cpp applies the rotary scaling in layers with a window too. If not, config.json has rotary settings
    by kind."""
    not_stored: frozenset[str] = frozenset()
    """Fields of the configuration that the weights of a file have, or that change little and are reported."""
    no_adapter: frozenset[str] = frozenset()
    """Parts of the names of weights without adapters: llama.cpp ignores them there, or a change does more than reorder
    rows."""
    unused: Callable[["DecoderConfig"], Mapping[str, tuple[int, ...]]] = lambda config: {}
    """The shapes of tensors that llama.cpp expects in a file and ignores. They are 0."""
    differs: Callable[["DecoderConfig"], str] = lambda config: ""
    """What llama.cpp computes slightly differently, for the export's report; empty if nothing."""
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


def _mimo_metadata(model: "Decoder") -> dict[str, Any]:
    own = model.config.own
    return {"attention.value_length": own.value_dim, "attention.value_scale": float(own.value_multiplier)}


def _xielu(model: "Decoder") -> dict[str, Any]:
    """The activation's trained numbers, one per layer."""
    activations = [model.get_submodule(f"model.layers.{i}.mlp.act_fn") for i in range(model.config.num_layers)]
    if activations[0].get_parameter("alpha_n").is_meta:
        return {}  # a model that was not read yet
    names = ("alpha_n", "alpha_p", "beta", "eps")
    return {f"xielu.{name}": [float(getattr(found, name).detach()) for found in activations] for name in names}


def longrope(model: "Decoder") -> dict[str, Any]:
    ropes = [layer.rope for layer in model.config.layers if layer.rope and layer.rope.scaling == "longrope"]
    return {"rope.scaling.attn_factor": ropes[0].attention_factor} if ropes else {}


def attention_bias(facts: Facts) -> dict[str, Any]:
    return {"attention_bias": facts.has("attn_q.bias")}


def biases(facts: Facts) -> dict[str, Any]:
    return {**attention_bias(facts), "mlp_bias": facts.has("ffn_up.bias")}


def _logit_scale(model: "Decoder") -> dict[str, Any]:
    return {"logit_scale": 1.0 / model.config.logits_divisor}


def _cohere_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp reads norms of queries and keys in models of the depth of Command R+."""
    return {"logit_scale": facts.number("logit_scale"), "use_qk_norm": facts.num_layers >= 64}


def _olmo_config(facts: Facts) -> dict[str, Any]:
    if not math.isclose(facts.number("attention.layer_norm_epsilon"), 1e-5, rel_tol=1e-6):
        raise facts.wrong("attention.layer_norm_epsilon", "1e-5, as in every OLMo")
    return {}


def _stablelm_config(facts: Facts) -> dict[str, Any]:
    return {
        "use_qkv_bias": facts.has("attn_q.bias"), "qk_layernorm": facts.has("attn_q_norm.weight"),
        "use_parallel_residual": not facts.has("ffn_norm.weight"),
    }  # fmt: skip


def _parallel(model: "Decoder") -> dict[str, Any]:
    return {"use_parallel_residual": model.config.norm_placement.startswith("parallel")}


def _queries_first(config: "DecoderConfig") -> StoredAs:
    return StoredAs((("ungroup", config.num_heads, *[config.head_dim] * 3),))


def _ministral3_config(facts: Facts) -> dict[str, Any]:
    """Files of llama.cpp's converter have yarn's `mscale_all_dim`; `mscale` is 1."""
    key = "rope.scaling.yarn_log_multiplier"
    return {"rope_more": {"mscale": 1.0, "mscale_all_dim": facts.number(key)}} if key in facts else {}


def renamed(name: str) -> StoredAs:
    return StoredAs(places=(name,))


def scaled(*factors: float) -> tuple[Step, ...]:
    """The step that multiplies by a factor, or by one for each stretch of rows: size, factor, size, factor, ..."""
    if all(factor == 1.0 for factor in factors[-1::-2]):
        return ()
    return (("multiply" if len(factors) == 1 else "multiply_rows", *factors),)


def times(factor: Callable[["DecoderConfig"], float]) -> Change:
    return lambda config: StoredAs(scaled(factor(config)))


# Experts.


def _stacks(first: tuple[Step, ...] = (), split: Step = ("split", 1)) -> dict[str, Change]:
    """Matrices (E, 2 * I, D) and biases (E, 2 * I) of gates and ups, and matrices (E, D, I), after the steps
    `first`."""
    gates_and_ups = "mlp.experts.gate_proj", "mlp.experts.up_proj"
    return {
        "mlp.experts.gate_up_proj_bias": StoredAs((split,), tuple(f"{name}.bias" for name in gates_and_ups)),
        "mlp.experts.gate_up_proj": StoredAs((*first, split), tuple(f"{name}.weight" for name in gates_and_ups)),
        "mlp.experts.down_proj_bias": renamed("mlp.experts.down_proj.bias"),
        "mlp.experts.down_proj": StoredAs(first, ("mlp.experts.down_proj.weight",)),
        "e_score_correction_bias": StoredAs((("reshape", -1),), ("e_score_correction.bias",)),
    }


def qwen_config(facts: Facts) -> dict[str, Any]:
    shared = facts.count("expert_shared_feed_forward_length", 0)
    return {"shared_expert_intermediate_size": shared} if shared else {}


def corrected_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp needs a shared expert."""
    return {"n_shared_experts": max(1, facts.count("expert_shared_count", 0)), "num_nextn_predict_layers": 0}


def _exaone_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp opens no file without a window."""
    facts.count("attention.sliding_window", least=1)
    return {"num_nextn_predict_layers": 0}


def _afmoe_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp scales embeddings, and rotates in three of four layers, whichever have a window."""
    facts.count("attention.sliding_window", least=1)
    if facts.pattern(4) != [(i + 1) % 4 != 0 for i in range(facts.num_layers)]:
        raise facts.wrong("attention.sliding_window_pattern", "a window in three of four layers")
    return {"mup_enabled": True}


def _gpt_oss_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp opens no file without a window. Published models do not round the bounds of yarn's frequencies."""
    facts.count("attention.sliding_window", least=1)
    return {"rope_more": {"truncate": False}} if facts.values.get("rope.scaling.type") == "yarn" else {}


def _mimo_config(facts: Facts) -> dict[str, Any]:
    """llama.cpp opens no file without a window. Layers with a window have twice the heads of keys."""
    facts.count("attention.sliding_window", least=1)
    factor = 2 if any(facts.per_layer("attention.sliding_window_pattern")) else 1
    return {
        "num_key_value_heads": facts.count("attention.head_count_kv") // factor,
        "mlp_layer_types": [
            "sparse" if facts.has("ffn_gate_inp.weight", i) else "dense" for i in range(facts.num_layers)
        ],
        "attention_value_scale": facts.number("attention.value_scale", 1.0),
    }


# A table: related fields share a line.
# fmt: off
GRANITE_NUMBERS = {
    "attention.scale": ("attention_scale", "attention_multiplier"),
    "embedding_scale": ("embedding_multiplier", "embedding_multiplier"),
    "residual_scale": ("residual_multiplier", "residual_multiplier"),
    "logit_scale": ("logits_divisor", "logits_scaling"),
}
LLAMA3_SCALINGS = frozenset({"default", "linear", "yarn", "llama3"})
LLAMA = GGUFFamily("llama", "Llama", pairs_neighbors=True, scalings=LLAMA3_SCALINGS, config=biases)
_GEMMA = GGUFFamily("gemma", "Gemma", changes={"norm.weight": PLUS_ONE}, tied=True)
_OLMO2 = GGUFFamily("olmo2", "Olmo2", tied=False, whole_heads=True)

_LAYER_NORM_EPS = "attention.layer_norm_epsilon", "layer_norm_eps"
_GPT2 = GGUFFamily(
    "gpt2", "GPT2LMHeadModel", fields={"feed_forward_length": "n_inner"}, whole_heads=True,
    norm_eps=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)

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
        "apertus", "Apertus", changes={"act_fn": StoredAs(places=())}, metadata=_xielu, config=attention_bias,
        tied=False,
        scalings=LLAMA3_SCALINGS,
    ),
    "cohere2": GGUFFamily(
        "cohere2", "Cohere2", metadata=_logit_scale,
        config=lambda facts: {"logit_scale": facts.number("logit_scale")}, tied=True, whole_heads=True,
        norm_eps=_LAYER_NORM_EPS, pairs_neighbors=True, windows=always, period=4,
    ),
    "cohere": GGUFFamily(
        "command-r", "Cohere", metadata=_logit_scale, config=_cohere_config, tied=True, whole_heads=True,
        norm_eps=_LAYER_NORM_EPS,
        pairs_neighbors=True,
    ),
    "olmo": GGUFFamily("olmo", "Olmo", config=_olmo_config, whole_heads=True, norm_eps=_LAYER_NORM_EPS,
        pairs_neighbors=True),
    "stablelm": GGUFFamily(
        "stablelm", "StableLm", config=_stablelm_config, tied=False, whole_heads=True, norm_eps=_LAYER_NORM_EPS,
        metadata=_parallel,
    ),
    "nemotron": GGUFFamily(
        "nemotron", "Nemotron", changes={"norm.weight": PLUS_ONE}, config=biases, tied=False, whole_heads=True,
        norm_eps=("attention.layer_norm_epsilon", "norm_eps"),
        # as llama.cpp's converter
        metadata=lambda model: {"attention.layer_norm_rms_epsilon": float(model.config.norm_eps)},
    ),
    "starcoder2": GGUFFamily(
        "starcoder2", "Starcoder2", whole_heads=True, norm_eps=("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
    "phi": GGUFFamily("phi2", "Phi", tied=False, whole_heads=True, norm_eps=_LAYER_NORM_EPS),
    "gpt_neox": GGUFFamily(
        "gptneox", "GPTNeoX", changes={"self_attn.qkv_proj": _queries_first}, tied=False, whole_heads=True,
        config=lambda facts: {"use_parallel_residual": facts.count("use_parallel_residual", 1) == 1,
            "hidden_act": "gelu_new"},
        metadata=_parallel, norm_eps=_LAYER_NORM_EPS,
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2._replace(architecture="starcoder", class_name="GPTBigCode"),
    "jais2": GGUFFamily("jais2", "Jais2", norm_eps=_LAYER_NORM_EPS),
    "arcee": GGUFFamily("arcee", "Arcee", pairs_neighbors=True, scalings=LLAMA3_SCALINGS),
    "glm": GGUFFamily("chatglm", "Glm", pairs_neighbors=True, config=attention_bias),
    "glm4": GGUFFamily("glm4", "Glm4", pairs_neighbors=True, config=attention_bias),
    "phi3": GGUFFamily(
        "phi3", "Phi3", metadata=longrope, whole_heads=True, scalings=frozenset({"default", "linear", "longrope"}),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        architecture="gemma2", class_name="Gemma2", config=_gemma_config, windows=always, period=2,
        numbers={
            "attn_logit_softcapping": ("own.attention_softcap", "attn_logit_softcapping"),
            "final_logit_softcapping": ("logits_softcap", "final_logit_softcapping"),
        },
    ),
    "gemma3_text": _GEMMA._replace(
        architecture="gemma3", class_name="Gemma3", config=_gemma_config, windows=always, scaled_windows=False,
        period=6,
    ),
    "granite": LLAMA._replace(architecture="granite", class_name="Granite", numbers=GRANITE_NUMBERS),
}

EXPERTS = _stacks()


def _experts(
    count: str = "num_experts", used: str = "num_experts_per_tok", size: str = "moe_intermediate_size"
) -> dict[str, str]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": size}


USUAL_EXPERTS, LOCAL_EXPERTS = _experts(), _experts("num_local_experts", size="intermediate_size")
CORRECTED_EXPERTS = _experts("n_routed_experts") | {
    "expert_shared_count": "n_shared_experts", "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "leading_dense_block_count": "first_k_dense_replace",
}
SCORE = {"expert_gating_func": ""}
MIXTURE = GGUFFamily("", changes=EXPERTS, fields=USUAL_EXPERTS)
_GLM4_MOE = MIXTURE._replace(
    architecture="glm4moe", class_name="Glm4Moe", fields=CORRECTED_EXPERTS | SCORE,
    config=lambda facts: {
        **corrected_config(facts), **biases(facts), "use_qk_norm": facts.has("attn_q_norm.weight"),
    },
)

MIXTURES = {
    "mixtral": MIXTURE._replace(
        architecture="llama", class_name="Mixtral", fields=LOCAL_EXPERTS, pairs_neighbors=True,
        scalings=LLAMA3_SCALINGS,
    ),
    "qwen3_moe": MIXTURE._replace(
        architecture="qwen3moe", class_name="Qwen3Moe",
        config=lambda facts: {**qwen_config(facts), "norm_topk_prob": True},
    ),
    "qwen2_moe": MIXTURE._replace(
        architecture="qwen2moe", class_name="Qwen2Moe", tied=False, whole_heads=True,
        config=lambda facts: {**qwen_config(facts), "qkv_bias": facts.has("attn_q.bias")},
    ),
    "olmoe": MIXTURE._replace(
        architecture="olmoe", class_name="Olmoe", tied=False, whole_heads=True,
        fields=_experts(size="intermediate_size") | {"attention.head_count": "num_key_value_heads"},
    ),
    "gpt_oss": MIXTURE._replace(
        architecture="gpt-oss", class_name="GptOss",
        changes={**_stacks((("transpose",),), ("unzip", 1)), "sinks": renamed("sinks.weight")},
        fields=LOCAL_EXPERTS, config=_gpt_oss_config, tied=False, windows=always, period=2,
        not_stored=frozenset({"truncate"}),  # llama.cpp rounds; the export says so
    ),
    "glm4_moe": _GLM4_MOE,
    "solar_open": _GLM4_MOE,  # read as glm4_moe, which computes the same
    "ernie4_5_moe": MIXTURE._replace(
        architecture="ernie4_5-moe", class_name="Ernie4_5_Moe", pairs_neighbors=True,
        fields=_experts("moe_num_experts", "moe_k") | {
            "expert_shared_count": "moe_num_shared_experts", "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
    ),
    "dots1": MIXTURE._replace(
        architecture="dots1", class_name="Dots1", config=corrected_config, tied=False,
        fields=CORRECTED_EXPERTS | SCORE | {"attention.head_count": "num_key_value_heads"},
    ),
    "hunyuan_v1_moe": MIXTURE._replace(
        architecture="hunyuan-moe", class_name="HunYuanMoEV1",
        fields=_experts(used="moe_topk", size="intermediate_size"),
    ),
    "exaone_moe": MIXTURE._replace(
        architecture="exaone-moe", class_name="ExaoneMoe", config=_exaone_config, scalings=LLAMA3_SCALINGS,
        windows=always, period=4,
        fields=CORRECTED_EXPERTS | SCORE | {"expert_count": "num_experts", "expert_shared_count": "num_shared_experts"},
    ),
    "afmoe": MIXTURE._replace(
        architecture="afmoe", class_name="Afmoe", config=_afmoe_config, windows=always, period=4,
        changes={"mlp.router.e_score_correction_bias": renamed("mlp.expert_bias.bias"), **EXPERTS},
        fields=USUAL_EXPERTS | SCORE | {
            "expert_shared_count": "num_shared_experts", "leading_dense_block_count": "num_dense_layers",
            "expert_weights_scale": "route_scale", "expert_weights_norm": "",
        },
    ),
    "minimax_m2": MIXTURE._replace(
        architecture="minimax-m2", class_name="MiniMaxM2", fields=LOCAL_EXPERTS | SCORE, tied=False,
    ),
    "llama4_text": MIXTURE._replace(
        architecture="llama4", class_name="Llama4", changes=_stacks((("transpose",),)), pairs_neighbors=True,
        scalings=LLAMA3_SCALINGS,
        fields=LOCAL_EXPERTS | {
            "feed_forward_length": "intermediate_size_mlp", "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        config=lambda facts: {"use_qk_norm": facts.count("expert_count") != 128},
    ),
    "mimo_v2_flash": MIXTURE._replace(
        architecture="mimo2", class_name="MiMoV2Flash", changes={**EXPERTS, "sinks": renamed("sinks.weight")},
        config=_mimo_config,
        fields=_experts("n_routed_experts") | SCORE | {
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
            "attention.value_length": "v_head_dim",
        },
        metadata=_mimo_metadata, tied=False, windows=always,
        scaled_windows=False, scalings=frozenset({"default", "linear"}),
    ),
}
# fmt: on

# Families that llama.cpp computes differently: how.
REFUSED = {
    "phimoe": "it has RMSNorm instead of LayerNorm, and experts' weights from a softmax instead of sparsemixer",
    "ministral": "its architecture for Mistral's models has no sliding window",
}
