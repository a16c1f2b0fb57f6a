"""Reads Hugging Face's config.json into the decoder that it describes, by the row of its family.

A field that changes the mathematics and that the decoder does not compute is refused by name: a model that trains
with a wrong formula shows a plausible loss and is worth nothing. What a family's row reads is handled; whatever else
of `_NEUTRAL` the file sets must have the value at which it changes nothing. Both spellings of the rotary
settings are read, `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lean_ft.models.config import DecoderConfig, LayerConfig, MixtureConfig
from lean_ft.models.config_fields import Fields, head_dim_of, listed
from lean_ft.models.dequantized import READABLE
from lean_ft.models.families import FAMILIES, Family, no_layer
from lean_ft.system.spelling import did_you_mean

MAX_LAYERS = 1024

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}

# Values at which fields that change the mathematics change nothing, and the fields. Absent and null are always such.
# Biases are not among them: a bias that is not expected shows in the weights.
_NEUTRAL: tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...] = (
    ((), ("sliding_window", "sliding_window_pattern", "attention_chunk_size", "rope_local_base_freq")),
    ((), ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier")),
    ((), ("moe_latent_size", "clip_qkv", "no_rope_layers", "no_rope_layer_interval", "swiglu_alpha", "swiglu_limit")),
    ((False,), ("use_sliding_window", "use_mrope", "use_qk_norm", "qk_layernorm", "enable_moe_block", "use_bias")),
    # Tokens of an image see those that follow; here there are none.
    ((False, "vision"), ("use_bidirectional_attention",)),
    ((False,), ("rope_interleave", "is_encoder_decoder", "add_cross_attention")),
    ((1e-12,), ("moe_norm_min",)),  # the least sum of a token's weights
    ((1.0,), ("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")),
    ((0, 1), ("num_local_experts", "num_experts")),
    ((1,), ("decoder_sparse_step",)),
    ((0,), ("shared_expert_intermediate_size",)),
    ((0.0,), ("router_jitter_noise", "z_loss_coefficient")),
    (([],), ("mlp_only_layers",)),
)

# What older files call a layer, and the feed-forward layers where each part is alone.
_OLDER_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
_FEEDS = ("mlp", "moe")
# The field that says how wide a kind of window is, and the fact that it is of a layer.
_WINDOWS = {"sliding_attention": ("sliding_window", "window"), "chunked_attention": ("attention_chunk_size", "chunk")}

# Models that read images too, whose language model is a family here and is what is trained.
_LANGUAGE_MODEL_OF = {
    "gemma3": {"gemma3_text": "Gemma3ForCausalLM"},
    "gemma4": {"gemma4_text": "Gemma4ForCausalLM"},
    "gemma4_unified": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "llama4": {"llama4_text": "Llama4ForCausalLM"},
    "mistral3": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "qwen2_vl": {"qwen2": "Qwen2ForCausalLM"},
    "qwen2_5_vl": {"qwen2": "Qwen2ForCausalLM"},
    "qwen3_vl": {"qwen3": "Qwen3ForCausalLM"},
    "qwen3_5": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
# Published under another name and computed as a family here, as which they are saved: the family, what transformers calls
# it, and what absent fields mean.
_SAME_AS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM", {}),
    "glm4_moe_lite": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "kv_lora_rank": 512}
        | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "moe_intermediate_size": 1536}
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8}
        | {"max_position_embeddings": 202_752},
    ),
    "helium": (
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        {"rms_norm_eps": 1e-8, "rope_theta": 100_000.0, "head_dim": 128, "max_position_embeddings": 4096}
        | {"tie_word_embeddings": False},
    ),
    "internlm3": (
        "llama",
        "LlamaForCausalLM",
        {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 32_768},
    ),
    "qwen2_vl_text": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM", {}),
}
_OF_IMAGES = ("image", "video", "vision", "audio")

# What transformers calls the model of a family that gives one score in place of logits; other families have none there.
SCORE_ARCHITECTURES = {
    family: f"{name}ForSequenceClassification"
    for family, name in {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "gemma": "Gemma",
        "gemma2": "Gemma2",
        "gemma3_text": "Gemma3Text",
        "phi3": "Phi3",
        "smollm3": "SmolLM3",
        "olmo2": "Olmo2",
        "ministral": "Ministral",
        "ministral3": "Ministral3",
        "olmo3": "Olmo3",
        "glm4": "Glm4",
        "seed_oss": "SeedOss",
        "hunyuan_v1_dense": "HunYuanDenseV1",
        "qwen2_moe": "Qwen2Moe",
        "deepseek_v3": "DeepseekV3",
        "exaone4": "Exaone4",
        "mixtral": "Mixtral",
        "qwen3_moe": "Qwen3Moe",
        "gpt_oss": "GptOss",
        "phimoe": "Phimoe",
        "qwen3_next": "Qwen3Next",
        "qwen3_5_text": "Qwen3_5Text",
    }.items()
}


def as_its_family(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json under the name of the family that computes it."""
    if str(config.get("model_type")) not in _SAME_AS:
        return config
    family, architecture, defaults = _SAME_AS[config["model_type"]]
    config = {key: value for key, value in config.items() if key != "auto_map"}
    if isinstance(kinds := config.pop("mlp_layer_types", None), list):  # dense layers, then experts
        num_dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if kinds != ["dense"] * num_dense + ["sparse"] * (len(kinds) - num_dense):
            raise ValueError(f"mlp_layer_types of config.json is {kinds}; expected dense layers, then sparse ones.")
        config["first_k_dense_replace"] = num_dense
    return defaults | config | {"model_type": family, "architectures": [architecture]}


def _of_text(rope: Any) -> Any:
    """Rotary settings without the sections that only positions of images tell apart."""
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return rope
    kept = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def language_model_config(config: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns the config.json of the language model inside a model that reads images too; any other as it is."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _LANGUAGE_MODEL_OF:
        return config
    text = config.get("text_config")
    if text is None and "hidden_size" in config:  # Qwen2.5-VL is published with the fields of both in one
        text = {"rope_scaling": config.get("rope_scaling")}
    if not isinstance(text, dict):
        raise ValueError(f"{where}: text_config is {text!r}; expected the settings of the language model, an object.")
    text = {key: _of_text(value) if key.startswith("rope_") else value for key, value in as_its_family(text).items()}
    architectures = _LANGUAGE_MODEL_OF[model_type]
    family = text.get("model_type", next(iter(architectures)))
    if family not in architectures:
        raise ValueError(
            f"{where}: text_config has the model_type {family!r}; expected in a {model_type} {listed(architectures)}."
        )
    shared = {
        key: value
        for key, value in config.items()
        if not isinstance(value, dict) and not any(part in key for part in _OF_IMAGES)
    }
    if config.get("quantization_config") is not None:
        shared["quantization_config"] = config["quantization_config"]
    return {**shared, **text, "model_type": family, "architectures": [architectures[family]]}


def score_config(config: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns the config.json of the reward model on a language model; that of a reward model as it is.

    Raises ValueError for a family that transformers has no such model of, and for one that gives several scores.
    """
    family = config.get("model_type")
    if family not in SCORE_ARCHITECTURES:
        raise ValueError(
            f"{where}: model_type is {family!r}, of which transformers has no model for sequence classification, so nothing "
            f"could open the reward model; expected one of {listed(SCORE_ARCHITECTURES)}."
        )
    if not _gives_scores(config):
        labels = {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
        return {**config, "architectures": [SCORE_ARCHITECTURES[family]], **labels}
    num_labels = len(config.get("id2label") or (0, 1))  # without it transformers takes 2
    if num_labels != 1:
        raise ValueError(
            f"{where}: id2label has {num_labels} labels; expected 1: a reward model gives one score. Is this a classifier?"
        )
    return config


def _gives_scores(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and architectures == [SCORE_ARCHITECTURES.get(str(config.get("model_type")))]


def decoder_config(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Returns the decoder that a config.json describes.

    Raises ValueError where the family is unknown, a field is missing or makes no sense, or asks for mathematics that
    the decoder does not compute; `where` names the file in the message.
    """
    family_name = config.get("model_type")
    family = FAMILIES.get(family_name) if isinstance(family_name, str) else None
    if family is None:
        raise ValueError(
            f"{where}: model_type is {family_name!r}; expected one of {listed([*FAMILIES, *_LANGUAGE_MODEL_OF])}. "
            f"Other families are not supported yet.{did_you_mean(str(family_name), FAMILIES)}"
        )
    _refuse_other_models(config, where)
    config = family.reworded(config)
    fields = Fields(config, {**_DEFAULTS, **family.defaults}, where)

    num_heads = fields.count("num_attention_heads")
    no_groups = fields.get("num_key_value_heads") is None
    num_kv_heads = num_heads if no_groups else fields.count("num_key_value_heads")
    facts: dict[str, Any] = {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "intermediate_size": fields.count("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim_of(fields),
        "layers": _layers(fields, family),
        "max_positions": fields.count("max_position_embeddings"),
        "initializer_range": fields.positive("initializer_range"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.positive(family.norm_eps_field),
        "activation": _activation(fields, family),
    }
    read = DecoderConfig(**facts | _facts(family.facts, fields))
    for layer in range(read.num_layers):
        if read.num_heads % read.num_kv_heads_of(layer):
            raise ValueError(
                f"{where}: num_attention_heads is {num_heads} and num_key_value_heads is {read.num_kv_heads_of(layer)}; "
                "expected the first to be a multiple of the second."
            )
    _refuse_other_mathematics(config, fields.read, where)
    if _gives_scores(config):  # of the last hidden state, and of nothing that logits have
        of_logits = {"head_bias": False, "logits_softcap": None, "logits_divisor": 1.0}
        return replace(read, scores=True, tied_embeddings=False, **of_logits)
    return read


def _facts(facts: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    return {name: fact(fields) if callable(fact) else fact for name, fact in facts.items()}


def _mixture(fields: Fields, family: Family) -> MixtureConfig | None:
    if not family.mixture or not _facts({"": family.mixture["num_experts"]}, fields)[""]:
        return None
    mixture = MixtureConfig(**{"activation": _activation(fields, family), **_facts(family.mixture, fields)})
    if mixture.experts_per_token > mixture.num_experts:
        raise ValueError(
            f"{fields.where}: num_experts_per_tok is {mixture.experts_per_token}, of {mixture.num_experts} experts; "
            "expected at most all of them."
        )
    open_experts = mixture.groups_per_token * mixture.num_experts // mixture.num_groups
    if (
        mixture.num_experts % mixture.num_groups
        or mixture.groups_per_token > mixture.num_groups
        or (mixture.num_groups > 1 and mixture.num_experts < 2 * mixture.num_groups)
        or mixture.experts_per_token > open_experts
    ):
        raise ValueError(
            f"{fields.where}: {mixture.num_experts} experts are in {mixture.num_groups} groups (n_group), of which a token "
            f"has {mixture.groups_per_token} (topk_group) and {mixture.experts_per_token} experts; expected groups of one "
            "size, at least 2, with enough experts in those that a token has."
        )
    if mixture.gate_scale != 1.0 and mixture.activation != "silu":
        raise ValueError(
            f"{fields.where}: {family.activation_field} is {fields.values[family.activation_field]!r}; expected "
            "'silu', the only activation of this family's experts."
        )
    return mixture


def _layers(fields: Fields, family: Family) -> tuple[LayerConfig, ...]:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    windowed = [family.has_window(fields, layer) for layer in range(num_layers)]
    kinds: list[Any]
    if fields.get("layer_types") is None:
        kinds = [family.layer_type(fields, layer) for layer in range(num_layers)]
    else:
        kinds = [_OLDER_LAYER_TYPES.get(str(kind), kind) for kind in fields.of_each_layer("layer_types")]
        has = f"{fields.where}: layer_types has {listed(set(map(str, kinds)))}"
        known = ["full_attention", family.window_kind, *family.mixers, *(_FEEDS if family.parts_are_alone else ())]
        if any(kind not in known for kind in kinds):
            raise ValueError(f"{has}; expected {' or '.join(known)}.")
        by_family, windowed = windowed, [kind == family.window_kind for kind in kinds]
        if windowed != by_family and not family.reads_layer_types:
            raise ValueError(
                f"{has}; in this family {'every' if any(by_family) else 'no'} layer has a sliding window, and the field "
                "does not change that."
            )
    window_field, fact = _WINDOWS[family.window_kind]
    if family.has_window is not no_layer:
        fields.get(window_field)  # the family knows it, even where no layer uses it
    window = fields.count(window_field) if any(windowed) else None
    mixture = _mixture(fields, family)
    mixers = {kind: family.mixers[kind](fields) for kind in dict.fromkeys(kinds) if kind in family.mixers}

    def layer_of(layer: int, kind: str, is_windowed: bool) -> LayerConfig:
        facts, attends = family.of_layer(fields, windowed, layer), kind == "hybrid" or kind not in (*mixers, *_FEEDS)
        has_mixture = kind == "moe" if family.parts_are_alone else family.has_mixture(fields, layer)
        rope = family.rope(fields, layer, is_windowed) if attends else None
        if rope is not None and facts.get("head_dim") is not None:
            rope = replace(rope, head_dim=facts["head_dim"])
        return LayerConfig(
            rope,
            mixer=mixers.get(kind),
            attends=attends,
            feeds=not family.parts_are_alone or kind in _FEEDS,
            mixture=mixture if has_mixture else None,
            **({fact: window} if is_windowed else {}),
            **facts,
        )

    return tuple(
        layer_of(i, kind, is_windowed) for i, (kind, is_windowed) in enumerate(zip(kinds, windowed, strict=True))
    )


def _activation(fields: Fields, family: Family) -> Any:
    def meant(name: str) -> str:
        value = fields.values.get(name)
        if str(value) not in family.activations:
            raise ValueError(f"{fields.where}: {name} is {value!r}; expected one of {listed(family.activations)}.")
        return family.activations[str(value)]

    own = family.activation_field
    other = "hidden_activation" if own == "hidden_act" else "hidden_act"
    if fields.config.get(other) is not None and meant(other) != meant(own):
        raise ValueError(
            f"{fields.where}: {own} is {fields.values[own]!r} and {other} is {fields.config[other]!r}; expected one "
            f"activation. Remove {other}, which this family does not read."
        )
    return meant(own)


def _refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    architectures = config.get("architectures") or []
    if _gives_scores(config):
        architectures = []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) and name.endswith("ForCausalLM") for name in architectures
    ):
        raise ValueError(
            f"{where}: architectures is {architectures!r}; expected a language model, a name that ends "
            "in ForCausalLM. Bare, classification and multimodal models have other weights."
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        if not isinstance(quantization, dict) or method not in READABLE or quantization.get("fmt", "e4m3") != "e4m3":
            raise ValueError(
                f"{where}: quantization_config says the weights are quantized ({method}); expected float32, float16 or "
                f"bfloat16 weights, or {' or '.join(READABLE)}, which is read into them. Train from the unquantized model "
                "that this one was made from."
            )


def _refuse_other_mathematics(config: Mapping[str, Any], handled: set[str], where: str) -> None:
    for name, neutral in [(name, neutral) for neutral, names in _NEUTRAL for name in names]:
        value = config.get(name)
        if value is not None and value not in list(neutral) and name not in handled:  # a list: values may have no hash
            allowed = " or ".join(["absent", *map(repr, neutral)])
            raise ValueError(
                f"{where}: {name} is {value!r}, which changes the mathematics in a way that is not supported; "
                f"expected {allowed}."
            )


def dropouts(config: Mapping[str, Any]) -> list[str]:
    """The dropout settings of a config.json that are above 0, as `name=value`. The decoder trains without dropout."""
    is_dropout = re.compile(r"(?<!classifier_)(dropout|pdrop)(_prob|_rate)?$")
    return [f"{name}={value}" for name, value in config.items() if is_dropout.search(name) and value]
