"""Read a Hugging Face config.json into a `DecoderConfig`, by the row of its family.

A field that changes the computation and is not supported raises an error, because a model that trains with a wrong
formula still shows a plausible loss. Fields of `_NEUTRAL` that the family's row does not read must have a neutral
value. Both spellings of the rotary settings are read: `rope_theta` with `rope_scaling` (transformers 4),
`rope_parameters` (5).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lean_ft.models.config import DecoderConfig, LayerConfig, MixtureConfig
from lean_ft.models.dequantized import READABLE
from lean_ft.models.families import FAMILIES, MULTIMODAL, REFUSED, SIZES_7B, Family, family_of, no_layer
from lean_ft.models.families.multimodal import OTHER_FIELDS
from lean_ft.models.moe import Router
from lean_ft.models.own_families import naming_row, remedy
from lean_ft.models.rope_settings import head_dim_of, num_kv_heads_of
from lean_ft.models.vision.config import VISION_FAMILIES, VisionFamily
from lean_ft.system.config_fields import MAX_LAYERS, ConfigFields, listed
from lean_ft.system.foreign_values import JSON

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

# Neutral values, and the fields that change the computation at other values. Absent and null are always neutral. Biases
# are not listed, because an unexpected bias shows in the weights.
_NEUTRAL: tuple[tuple[tuple[Any, ...], tuple[str, ...]], ...] = (
    ((), ("sliding_window", "sliding_window_pattern", "attention_chunk_size", "rope_local_base_freq")),
    ((), ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier")),
    ((), ("moe_latent_size", "clip_qkv", "no_rope_layers", "no_rope_layer_interval", "swiglu_alpha", "swiglu_limit")),
    ((False,), ("use_sliding_window", "use_mrope", "use_qk_norm", "qk_layernorm", "enable_moe_block", "use_bias")),
    # "vision": only tokens of the tower see later tokens.
    ((False, "vision"), ("use_bidirectional_attention",)),
    ((False,), ("rope_interleave", "is_encoder_decoder", "add_cross_attention")),
    ((1e-12,), ("moe_norm_min",)),  # lower bound of the sum of a token's weights
    ((1.0,), ("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")),
    ((0, 1), ("num_local_experts", "num_experts")),
    ((1,), ("decoder_sparse_step",)),
    ((0,), ("shared_expert_intermediate_size",)),
    ((0.0,), ("router_jitter_noise", "z_loss_coefficient")),
    (([],), ("mlp_only_layers",)),
)

_OLD_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
_MLP_TYPES = ("mlp", "moe")  # layer types of feed-forward layers in families with one part per layer
# The field with the size of a window or chunk, by layer type.
_WINDOW_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

_GLM4V = {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "head_dim": None}
_QWEN2_VL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
# Models that compute the same as another family and are saved as that family: its name, transformers' class, and the
# values of absent fields.
# fmt: off
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
    "iquestcoder": (
        "llama",
        "LlamaForCausalLM",
        {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
    "glm4v_text": ("glm4", "Glm4ForCausalLM", _GLM4V | {"max_position_embeddings": 32_768}),
    "glm_ocr_text": ("glm4", "Glm4ForCausalLM", _GLM4V | {"num_key_value_heads": 8}),
    "glm4v_moe_text": ("glm4_moe", "Glm4MoeForCausalLM", {"attention_bias": True, "max_position_embeddings": 65_536}),
    "granite_docling_text": (
        "granite", "GraniteForCausalLM",
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
         "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263,
         "attention_multiplier": 1 / 64},
    ),
    "paddleocr_vl_text": (
        "llama", "LlamaForCausalLM",
        {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131_072,
         "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "qwen2_5_omni_text": (
        "qwen2", "Qwen2ForCausalLM", {"num_key_value_heads": 4, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "qwen2_vl_text": ("qwen2", "Qwen2ForCausalLM", _QWEN2_VL),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM", _QWEN2_VL),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM", _QWEN3_VL),
    "qwen3_vl_moe_text": (
        "qwen3_moe", "Qwen3MoeForCausalLM",
        _QWEN3_VL | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    ),
}
# fmt: on
# Values that the other models always have, whatever their config.json says.
_FIXED = {
    "glm4v_text": {"attention_bias": True},
    "glm_ocr_text": {"attention_bias": False},
    "glm4v_moe_text": {"use_qk_norm": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True, "use_sliding_window": False},
}

# transformers' sequence classification models, by family.
SCORE_ARCHITECTURES = {
    name: f"{family.scores_as}ForSequenceClassification" for name, family in FAMILIES.items() if family.scores_as
}


def as_its_family(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json under the name of the family that computes it."""
    if str(config.get("model_type")) not in _SAME_AS:
        return config
    family, architecture, defaults = _SAME_AS[config["model_type"]]
    config = {key: value for key, value in config.items() if key != "auto_map"}
    if isinstance(types := config.pop("mlp_layer_types", None), list):
        num_dense = types.index("sparse") if "sparse" in types else len(types)
        if types != ["dense"] * num_dense + ["sparse"] * (len(types) - num_dense):
            raise ValueError(f"mlp_layer_types of config.json is {types}; expected dense layers before sparse layers.")
        config["first_k_dense_replace"] = num_dense
    fixed = _FIXED.get(config["model_type"], {})
    merged = defaults | config | fixed | {"model_type": family, "architectures": [architecture]}
    if "head_dim" in defaults and merged["head_dim"] is None:  # the family has another default
        merged["head_dim"] = head_dim_of(ConfigFields(merged, {}, "config.json"))
    return merged


def _rope(rope: JSON, vision: VisionFamily | None) -> JSON:
    """Rotary settings. Without a vision tower, the sections of multimodal positions are left out: they are equal for
    text."""
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return rope
    kept = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    if vision is not None and vision.alternating_axes is not None:
        # Not the file's order of axes, which transformers ignores.
        kept |= {"mrope_section": rope["mrope_section"], "mrope_interleaved": vision.alternating_axes}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def language_model_config(
    config: dict[str, Any], where: str = "config.json", with_tower: bool = False
) -> dict[str, Any]:
    """The config.json of the language model inside a multimodal model; other configs are returned unchanged. With
    `with_tower`, its positions have three axes if the family's have."""
    whole = MULTIMODAL.get(str(config.get("model_type")))
    if whole is None:
        return config
    text = config.get("text_config")
    if text is None and "hidden_size" in config:  # Qwen2.5-VL has all fields at the top level
        text = {"rope_scaling": config.get("rope_scaling")}
    if not isinstance(text, dict):
        raise ValueError(f"{where}: text_config is {text!r}; expected an object with the language model's settings.")
    sizes = SIZES_7B.get(str(text.get("model_type", next(iter(whole.families)))), {})
    vision = VISION_FAMILIES.get(config["model_type"]) if with_tower else None
    text = {
        key: _rope(value, vision) if key.startswith("rope_") else value for key, value in as_its_family(text).items()
    }
    family = text.get("model_type", next(iter(whole.families)))
    if not isinstance(family, str) or family not in whole.families:
        raise ValueError(
            f"{where}: text_config has the model_type {family!r}; expected for {config['model_type']}: "
            f"{listed(whole.families)}."
        )
    shared = {
        key: value
        for key, value in config.items()
        if not isinstance(value, dict) and not any(part in key for part in OTHER_FIELDS)
    }
    if config.get("quantization_config") is not None:
        shared["quantization_config"] = config["quantization_config"]
    if text.get(tied := "tie_word_embeddings") in whole.tied_by_text:
        shared.pop(tied, None)
    elif shared.get(tied) is not None:
        text.pop(tied, None)
    merged = {**sizes, **shared, **text, **whole.fixed, "model_type": family, "architectures": [whole.families[family]]}
    if str(config.get("architectures")).endswith(f"{OF_SCORES}']"):  # saved by lean_ft, or of Gemma 3 by transformers
        labels = {key: config[key] for key in ("id2label", "label2id") if key in config}
        merged |= {"architectures": [_score_architecture(family)], **labels}
    return merged


OF_SCORES, OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"  # ends of names of transformers' classes
# Families without a token classification model in transformers, or one with other names of its weights.
# fmt: off
WITHOUT_TOKEN_LABELS = frozenset((
    "olmo", "olmo2", "olmo3", "hunyuan_v1_dense", "hunyuan_v1_moe", "gptj", "opt", "gemma3_text", "phimoe",
    "deepseek_v2", "minicpm3", "qwen3_5_text", "gpt_neox", "gpt2", "gpt_bigcode", "biogpt", "falcon",
))
# fmt: on
Labels = Mapping[str, Any]
"""The fields of config.json about the labels of a reward model or classifier: id2label, label2id and others."""
REWARD_LABELS: Labels = {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
"""The labels of a new reward model. An existing one keeps the names that it has."""
VECTORS: Labels = {"num_labels": 0}
"""In place of labels: a model that gives hidden states alone, for vectors of texts. It has no output layer."""
_GIVE_TEXT = ("ForCausalLM", "LMHeadModel")  # ends of the names of architectures
_GIVE_VECTORS = ("Model", "ForMaskedLM")


def gives_vectors(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a model that gives no text, and vectors instead: without an output layer, or whose
    tokens see later ones."""
    names, family = _architectures(config), family_of(config.get("model_type"))
    has_none = bool(names) and all(name.endswith(_GIVE_VECTORS) and not name.endswith(_GIVE_TEXT) for name in names)
    return has_none or (family is not None and not gives_scores(config) and is_encoder(family, config))


def is_encoder(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether tokens see the later tokens of their text."""
    fact = family.facts.get("bidirectional", False)
    return bool(fact(ConfigFields(config, family.defaults, "config.json")) if callable(fact) else fact)


def vectors_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model without its output layer, under the name of transformers' class."""
    names = _architectures(config)
    if not names or not (names[0].endswith(_GIVE_TEXT) or not names[0].endswith("Model")):
        return config
    start = re.sub(rf"(ForCausalLM|LMHeadModel|ForMaskedLM|{OF_SCORES})$", "", names[0])
    if str(config.get("model_type")).endswith("_text") and not start.endswith("Text"):  # without, it is of the whole
        start += "Text"
    return {**config, "architectures": [f"{start}Model"]}


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def score_config(config: dict[str, Any], where: str, labels: Labels) -> dict[str, Any]:
    """Return the config.json of a sequence or token classification model on a language model; `labels` are its fields
    about labels.

    That of a reward model or classifier must agree with `labels`. Raises ValueError if it does not, and for a family
    without such a model in transformers.
    """
    family, per_token = config.get("model_type"), labels_tokens(labels)
    architecture = _score_architecture(family, OF_TOKENS if per_token else OF_SCORES)
    if architecture is None:
        kind = "token" if per_token else "sequence"
        families = [name for name in SCORE_ARCHITECTURES if not per_token or name not in WITHOUT_TOKEN_LABELS]
        raise ValueError(
            f"{where}: model_type is {family!r}, and lean_ft has no {kind} classification model of that "
            f"family; expected one of {listed(families)}."
        )
    labels = {**labels, "architectures": [architecture]}
    if not gives_scores(config):
        return {**config, **labels}
    if labels_tokens(config) != per_token:
        has, wants = ("tokens", "texts") if labels_tokens(config) else ("texts", "tokens")
        raise ValueError(
            f"{where}: the model labels {has}, and this run labels {wants}. Set model.path to a language model."
        )
    names, expected = label_names(config, where), label_names(labels)
    if len(expected) == 1 and len(names) != 1:
        raise ValueError(f"{where}: id2label has {len(names)} labels; expected 1, as a reward model returns one score.")
    if len(expected) > 1 and names != expected:
        raise ValueError(
            f"{where}: id2label has {', '.join(names)}; expected the labels of the data: {', '.join(expected)}."
        )
    return config if len(expected) == 1 else {**config, **labels}


def label_fields(names: Sequence[str], is_multi: bool, *, per_token: bool = False) -> Labels:
    """The fields of a classifier's config.json about labels; is_multi: a text has any number of them; per_token: tokens
    have labels. The family completes the name of the architecture."""
    fields = {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    if per_token:
        return {**fields, "architectures": [OF_TOKENS]}
    return {**fields, "problem_type": f"{'multi' if is_multi else 'single'}_label_classification"}


def labels_tokens(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or its fields about labels, are of a model that labels tokens."""
    return str(config.get("architectures")).endswith(f"{OF_TOKENS}']")


def label_names(config: Mapping[str, Any], where: str = "config.json") -> list[str]:
    """The names of a classifier's labels, in the order of its outputs. Raises ValueError unless they are numbered from
    0."""
    names = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}  # without it, transformers takes 2
    by_number = {str(key): str(name) for key, name in names.items()} if isinstance(names, dict) else {}
    if not by_number or any(str(i) not in by_number for i in range(len(by_number))):
        raise ValueError(
            f'{where}: id2label is {repr(names)[:100]}; expected labels by number: {{"0": "NAME", "1": "NAME"}}.'
        )
    return [by_number[str(i)] for i in range(len(by_number))]


def kind_of_scores(num_scores: int) -> str:
    """What a model with this many scores per text is called."""
    return "a reward model" if num_scores == 1 else f"a classifier of {num_scores} labels"


def gives_scores(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = [_score_architecture(config.get("model_type"), ending) for ending in (OF_SCORES, OF_TOKENS)]
    return isinstance(architectures, list) and architectures in [[name] for name in names if name is not None]


def _score_architecture(model_type: object, ending: str = OF_SCORES) -> str | None:
    family = family_of(model_type)
    if family is None or not family.scores_as or (ending == OF_TOKENS and model_type in WITHOUT_TOKEN_LABELS):
        return None
    return f"{family.scores_as}{ending}"


def decoder_config(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The decoder that a config.json describes. `where` names the file in error messages.

    Raises ValueError if the family is unknown, or a field is missing, invalid or asks for an unsupported computation.
    """
    family_name = config.get("model_type")
    family = family_of(family_name)
    if family is None:
        problem = f"{where}: model_type is {family_name!r}"
        if str(family_name) in REFUSED:
            raise ValueError(f"{problem}: {REFUSED[str(family_name)]}. docs/models.md lists the models to use instead.")
        raise ValueError(
            f"{problem}, which lean_ft does not "
            f"read.{remedy(str(family_name), where, [*FAMILIES, *MULTIMODAL, *_SAME_AS])}"
        )
    _check_architecture(config, where)
    with naming_row(str(family_name)):
        return _decoder_config(family.preprocessed(config), family, where)


def _decoder_config(config: Mapping[str, Any], family: Family, where: str) -> DecoderConfig:
    fields = ConfigFields(config, {**_DEFAULTS, **family.defaults}, where)

    fields.expect(**family.only)
    num_heads = fields.count("num_attention_heads")
    facts: dict[str, Any] = {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "intermediate_size": fields.count("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads_of(fields),
        "head_dim": head_dim_of(fields),
        "layers": _layers(fields, family),
        "max_positions": fields.count("max_position_embeddings"),
        "initializer_range": fields.positive("initializer_range"),
        "tied_embeddings": fields.flag("tie_word_embeddings"),
        "norm_eps": fields.positive(family.norm_eps_field),
        "activation": _activation(fields, family),
    }
    own_facts = None if family.own is None else family.own(fields)
    decoder = DecoderConfig(**facts | _facts(family.facts, fields), parts=family.parts, own=own_facts)
    for num_kv_heads in decoder.kv_head_counts:
        if decoder.num_heads % num_kv_heads:
            raise ValueError(
                f"{where}: num_attention_heads is {num_heads}; expected a multiple of num_key_value_heads, "
                f"{num_kv_heads}."
            )
    _check_neutral_fields(config, fields.read, where)
    if decoder.bidirectional and (decoder.has_states or decoder.latent is not None):
        raise ValueError(f"{where}: tokens that see later ones are not supported with recurrent layers or latents.")
    if gives_scores(config):  # scores have no soft cap or divisor, and a bias only where tokens have labels
        has_bias = labels_tokens(config) and config.get("token_classification_bias") is not False
        of_logits = {"head_bias": has_bias, "logits_softcap": None, "logits_divisor": 1.0}
        return replace(decoder, num_scores=len(label_names(config, where)), tied_embeddings=False, **of_logits)
    return decoder


def _facts(facts: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    return {name: fact(fields) if callable(fact) else fact for name, fact in facts.items()}


def _mixture(fields: ConfigFields, family: Family) -> MixtureConfig | None:
    if not family.mixture or not _facts({"": family.mixture["num_experts"]}, fields)[""]:
        return None
    mixture = MixtureConfig(**{"activation": _activation(fields, family), **_facts(family.mixture, fields)})
    num_experts, per_token, num_groups = mixture.num_experts, mixture.experts_per_token, mixture.num_groups
    scores_per_group = getattr(family.parts.router, "scores_per_group", Router.scores_per_group)
    if per_token > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most {num_experts}")
    if (
        num_experts % num_groups
        or mixture.groups_per_token > num_groups
        or (num_groups > 1 and num_experts < scores_per_group * num_groups)
        or per_token > mixture.groups_per_token * num_experts // num_groups
    ):
        raise ValueError(
            f"{fields.where}: {num_experts} experts are in {num_groups} groups (n_group), and a token uses {per_token} "
            f"experts of {mixture.groups_per_token} groups (topk_group); expected groups of equal size, of at least "
            f"{scores_per_group} experts, with enough experts for a token."
        )
    return mixture


def _layers(fields: ConfigFields, family: Family) -> tuple[LayerConfig, ...]:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    windowed = [family.has_window(fields, layer) for layer in range(num_layers)]
    layer_types: list[Any]
    if fields.get("layer_types") is None:
        layer_types = [family.layer_type(fields, layer) for layer in range(num_layers)]
    else:
        layer_types = [_OLD_LAYER_TYPES.get(str(name), name) for name in fields.of_each_layer("layer_types")]
        has = f"{fields.where}: layer_types has {listed(set(map(str, layer_types)))}"
        valid = ["full_attention", family.window_kind, *family.mixers]
        valid += _MLP_TYPES if family.one_part_per_layer else ()
        if any(layer_type not in valid for layer_type in layer_types):
            raise ValueError(f"{has}; expected {' or '.join(valid)}.")
        by_family, windowed = windowed, [layer_type == family.window_kind for layer_type in layer_types]
        if windowed != by_family and not family.reads_layer_types:
            expected = "every" if any(by_family) else "no"
            raise ValueError(f"{has}; expected {expected} layer with a sliding window in this family.")
    window_field = _WINDOW_FIELDS[family.window_kind]
    if family.has_window is not no_layer:
        fields.get(window_field)  # supported even if no layer uses it
    window = fields.count(window_field) if any(windowed) else None
    mixture = _mixture(fields, family)
    mixers = {name: family.mixers[name](fields) for name in dict.fromkeys(layer_types) if name in family.mixers}

    def layer_of(layer: int, layer_type: str, is_windowed: bool) -> LayerConfig:
        facts = dict(family.layer_facts(fields, windowed, layer))
        has_attention = layer_type == "hybrid" or layer_type not in (*mixers, *_MLP_TYPES)
        has_mixture = layer_type == "moe" if family.one_part_per_layer else family.has_mixture(fields, layer)
        rope = family.rope(fields, layer, is_windowed) if has_attention else None
        if family.one_part_per_layer and layer_type not in _MLP_TYPES:
            facts["intermediate_size"] = 0
        return LayerConfig(
            rope,
            mixer=mixers.get(layer_type),
            has_attention=has_attention,
            mixture=mixture if has_mixture else None,
            window=window if is_windowed and family.window_kind == "sliding_attention" else None,
            **facts,
        )

    return tuple(map(layer_of, range(num_layers), layer_types, windowed))


def _activation(fields: ConfigFields, family: Family) -> str:
    def activation_of(name: str) -> str:
        value = fields.values.get(name)
        if str(value) not in family.activations:
            raise fields.wrong(name, f"one of {listed(family.activations)}")
        return family.activations[str(value)]

    field = family.activation_field
    other = "hidden_activation" if field == "hidden_act" else "hidden_act"
    if fields.config.get(other) is not None and activation_of(other) != activation_of(field):
        raise ValueError(
            f"{fields.where}: {field} is {fields.values[field]!r} and {other} is {fields.config[other]!r}. Remove "
            f"{other}, which this family does not read."
        )
    return activation_of(field)


def _check_architecture(config: Mapping[str, Any], where: str) -> None:
    architectures = [] if gives_scores(config) else config.get("architectures") or []
    ends = (*_GIVE_TEXT, *_GIVE_VECTORS)
    if not isinstance(architectures, list) or not all(str(name).endswith(ends) for name in architectures):
        raise ValueError(
            f"{where}: architectures is {architectures!r}; expected a language model or text encoder, whose name ends "
            f"in {' or '.join(ends)}. Classification and multimodal models have other weights."
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        if not isinstance(quantization, dict) or method not in READABLE or quantization.get("fmt", "e4m3") != "e4m3":
            raise ValueError(
                f"{where}: quantization_config says the weights are quantized ({method}); expected "
                f"{' or '.join(READABLE)}, or weights in float32, float16 or bfloat16. Use the unquantized model; "
                "lora.quantize=nf4 quantizes it to 4 bits."
            )


def _check_neutral_fields(config: Mapping[str, Any], handled: set[str], where: str) -> None:
    for name, neutral in [(name, neutral) for neutral, names in _NEUTRAL for name in names]:
        value = config.get(name)
        if value is not None and value not in list(neutral) and name not in handled:  # a list: values may be unhashable
            allowed = " or ".join(["absent", *map(repr, neutral)])
            raise ValueError(f"{where}: {name} is {value!r}, which is not supported; expected {allowed}.")


def dropouts(config: Mapping[str, Any]) -> list[str]:
    """Dropout settings above 0 in a config.json, as `name=value`. The decoder trains without dropout."""
    is_dropout = re.compile(r"(?<!classifier_)(dropout|pdrop|layerdrop)(_prob|_rate)?$")
    return [f"{name}={value}" for name, value in config.items() if is_dropout.search(name) and value]
