"""Reads Hugging Face's config.json: one row of differences a family, one decoder for all of them.

A field that changes the mathematics and that the decoder does not compute is refused by name: a model that trains
with a wrong formula shows a plausible loss and is worth nothing. Both spellings of the rotary settings are read,
`rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lean_ft.models.config import DecoderConfig, LayerConfig, MixtureConfig
from lean_ft.models.rope import REQUIRED_FIELDS, SCALINGS, RopeConfig


@dataclass(frozen=True)
class Mixture:
    """A family's mixture of experts: its facts, and the fields of config.json that say the others."""

    intermediate_size: str  # the field
    facts: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """What tells a family from the others. A bias is True, False, or the field of config.json that says so."""

    qkv_bias: bool | str
    output_bias: bool | str
    mlp_bias: bool | str
    # What a field means where config.json leaves it out; None for num_key_value_heads: as many as query heads.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mixture: Mixture | None = None
    # Parts of parameters' names, with what the folder has in their place: several names where a parameter's first
    # dimension is cut into so many parts, and `*` for its index in a stack of experts.
    on_disk: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_EXPERTS_ON_DISK = {
    "mlp.router.": ("mlp.gate.",),
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "qwen2": Family(
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "mixtral": Family(
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        mixture=Mixture("intermediate_size", facts={"weights_sum_to_one": True}),
        on_disk={
            "mlp.router.": ("block_sparse_moe.gate.",),
            "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
            "mlp.experts.down_proj": ("block_sparse_moe.experts.*.w2.weight",),
        },
    ),
}

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
}

# Fields that change the mathematics, with the values at which they change nothing. Absent and null are always such.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": (),
    "rope_interleave": (False,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "router_jitter_noise": (0.0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

# The rotary settings by their names in config.json, with ours.
_ROPE_FIELDS = {
    "rope_type": "scaling",
    "type": "scaling",
    "rope_theta": "theta",
    "partial_rotary_factor": "",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
}


def decoder_config(config: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Returns the decoder that a config.json describes.

    Raises ValueError where the family is unknown, a field is missing or makes no sense, or asks for mathematics that
    the decoder does not compute; `where` names the file in the message.
    """
    family_name = config.get("model_type")
    family = FAMILIES.get(family_name) if isinstance(family_name, str) else None
    if family is None:
        raise ValueError(
            f"{where}: model_type is {family_name!r}; expected one of {_listed(FAMILIES)}."
            f"{_nearest(family_name, FAMILIES)} Other families are not supported yet."
        )
    _refuse_other_mathematics(config, family, where)
    fields = {**_DEFAULTS, **family.defaults, **config}

    def bias(value: bool | str) -> bool:
        return value if isinstance(value, bool) else _flag(fields, value, where)

    hidden_size = _count(fields, "hidden_size", where)
    num_heads = _count(fields, "num_attention_heads", where)
    num_kv_heads = num_heads
    if fields["num_key_value_heads"] is not None:
        num_kv_heads = _count(fields, "num_key_value_heads", where)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads is {num_heads} and num_key_value_heads is {num_kv_heads}; "
            "expected the first to be a multiple of the second."
        )
    if fields["head_dim"] is not None:
        head_dim = _count(fields, "head_dim", where)
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise ValueError(
            f"{where}: hidden_size is {hidden_size}, which {num_heads} attention heads do not divide; expected a "
            "multiple, or the field head_dim."
        )
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim is {head_dim}; rotary embeddings need an even number.")
    return DecoderConfig(
        vocab_size=_count(fields, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=_count(fields, "intermediate_size", where),
        layers=tuple(
            LayerConfig(_rope_config(fields, where), mixture=_mixture_config(fields, family, i, where))
            for i in range(_count(fields, "num_hidden_layers", where))
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=_count(fields, "max_position_embeddings", where),
        norm_eps=_positive(fields, "rms_norm_eps", where),
        qkv_bias=bias(family.qkv_bias),
        output_bias=bias(family.output_bias),
        mlp_bias=bias(family.mlp_bias),
        tied_embeddings=_flag(fields, "tie_word_embeddings", where),
        initializer_range=_positive(fields, "initializer_range", where),
    )


def parameters_on_disk(hf_config: Mapping[str, Any], name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields what the folder of a family holds of one parameter: a name there, and a contiguous view of it."""
    family = FAMILIES.get(hf_config.get("model_type", ""))
    names = {} if family is None else family.on_disk
    part = next((part for part in names if part in name), None)
    if part is None:
        yield name, parameter
        return
    places = [name.replace(part, place) for place in names[part]]
    stack = [(str(i), matrix) for i, matrix in enumerate(parameter)] if "*" in places[0] else [("", parameter)]
    for index, matrix in stack:
        for place, piece in zip(places, matrix.chunk(len(places)), strict=True):
            yield place.replace("*", index), piece


def _mixture_config(fields: Mapping[str, Any], family: Family, layer: int, where: str) -> MixtureConfig | None:
    """The mixture of experts of a layer; None where it has none."""
    if family.mixture is None:
        return None
    step = _count({"decoder_sparse_step": 1, **fields}, "decoder_sparse_step", where)
    if layer in (fields.get("mlp_only_layers") or ()) or (layer + 1) % step:
        return None
    # transformers has written both names, for all of these families.
    fields = {**fields, "num_experts": fields.get("num_local_experts") or fields["num_experts"]}
    returns_logits = _flag({"output_router_logits": False, **fields}, "output_router_logits", where)
    config = MixtureConfig(
        num_experts=_count(fields, "num_experts", where),
        experts_per_token=_count(fields, "num_experts_per_tok", where),
        intermediate_size=_count(fields, family.mixture.intermediate_size, where),
        # transformers adds the loss only where it also returns what the loss is made from.
        router_aux_loss_coef=_at_least_0(fields, "router_aux_loss_coef", where) if returns_logits else 0.0,
        **family.mixture.facts,
        **{fact: _required(fields, name, where) for fact, name in family.mixture.fields.items()},
    )
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"{where}: num_experts_per_tok is {config.experts_per_token}, of {config.num_experts} experts; expected at "
            "most all of them."
        )
    return config


def _refuse_other_mathematics(config: Mapping[str, Any], family: Family, where: str) -> None:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) and name.endswith("ForCausalLM") for name in architectures
    ):
        raise ValueError(
            f"{where}: architectures is {architectures!r}; expected a language model, a name that ends "
            "in ForCausalLM. Bare, classification and multimodal models have other weights."
        )
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise ValueError(
            f"{where}: quantization_config says the weights are quantized ({method}); expected float32, float16 or "
            "bfloat16 weights. Train from the unquantized model that this one was made from."
        )
    for name, neutral in _NEUTRAL_VALUES.items():
        value = config.get(name)
        if family.mixture is not None and name in ("num_local_experts", "num_experts"):
            continue
        if value is not None and value not in neutral:
            allowed = " or ".join(["absent", *map(repr, neutral)])
            raise ValueError(
                f"{where}: {name} is {value!r}, which changes the mathematics in a way that is not supported; "
                f"expected {allowed}."
            )
    for name, value in config.items():
        if re.search(r"(?<!classifier_)(dropout|pdrop)$", name) and value not in (None, 0):
            raise ValueError(
                f"{where}: {name} is {value!r}; dropout is not supported. Set it to 0.0 in config.json to train "
                "without it."
            )
    layer_types = config.get("layer_types")
    if layer_types is not None and set(layer_types) - {"full_attention"}:
        kinds = ", ".join(sorted(set(layer_types)))
        raise ValueError(f"{where}: layer_types has {kinds}; only full_attention is supported.")


def _rope_config(fields: Mapping[str, Any], where: str) -> RopeConfig:
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    where = f"{where}: {key}"
    settings = fields.get(key) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"{where} is {settings!r}; expected an object with rope_type.")
    scaling = settings.get("rope_type", settings.get("type", "default"))
    if scaling not in SCALINGS:
        raise ValueError(
            f"{where} asks for the rope type {scaling!r}; supported are {_listed(SCALINGS)}."
            f"{_nearest(scaling, SCALINGS)}"
        )
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{where}: partial_rotary_factor is {settings['partial_rotary_factor']!r}; expected 1.0 or absent: only "
            "whole heads are rotated."
        )
    unknown = [name for name, value in settings.items() if name not in _ROPE_FIELDS and value is not None]
    if unknown:
        raise ValueError(
            f"{where} has {', '.join(unknown)}, which the rope type {scaling!r} does not know; expected among "
            f"{_listed(_ROPE_FIELDS)}. Remove what changes nothing."
        )
    settings = {"rope_theta": fields["rope_theta"], **settings}
    if scaling == "llama3":
        # transformers' order: the top level wins, then the rope settings, then the longest context.
        original = settings.get("original_max_position_embeddings", fields["max_position_embeddings"])
        settings["original_max_position_embeddings"] = fields.get("original_max_position_embeddings", original)
    ours = {spelled: name for spelled, name in _ROPE_FIELDS.items() if name in REQUIRED_FIELDS[scaling]}
    values = {name: _positive(settings, spelled, where) for spelled, name in ours.items()}
    if scaling == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ValueError(
            f"{where}: high_freq_factor ({values['high_freq_factor']}) must be above low_freq_factor "
            f"({values['low_freq_factor']})."
        )
    return RopeConfig(theta=_positive(settings, "rope_theta", where), scaling=scaling, **values)


def _required(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"{where}: the field {name} is missing; the model cannot be built without it.")
    return fields[name]


def _count(fields: Mapping[str, Any], name: str, where: str) -> int:
    value = _required(fields, name, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}; expected a positive integer.")
    return value


def _positive(fields: Mapping[str, Any], name: str, where: str) -> float:
    value = _required(fields, name, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{where}: {name} is {value!r}; expected a positive number.")
    return float(value)


def _at_least_0(fields: Mapping[str, Any], name: str, where: str) -> float:
    value = _required(fields, name, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{where}: {name} is {value!r}; expected 0 or a positive number.")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str, where: str) -> bool:
    value = _required(fields, name, where)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {name} is {value!r}; expected true or false.")
    return value


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))


def _nearest(name: Any, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1)
    return f" Nearest: {near[0]}." if near else ""
