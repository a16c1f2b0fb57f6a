"""The fields of a family's row, and readers that several families share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from lean_ft.models.config import FamilyParts, MixerConfig
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config, rope_settings
from lean_ft.system.config_fields import ConfigFields

# Readers of a field by its name.
flag, count, number, number_or_null = (
    partial(methodcaller, reader) for reader in ("flag", "count", "positive", "positive_or_null")
)

# Which layers have a window if config.json does not list layer types, by the fields and the layer's number.


def no_layer(fields: ConfigFields, layer: int) -> bool:
    return False


def every_layer(fields: ConfigFields, layer: int) -> bool:
    return fields.get("sliding_window") is not None


def upper_layers(fields: ConfigFields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer >= fields.count("max_window_layers", least=0)


def all_but_every_nth_layer(fields: ConfigFields, layer: int) -> bool:
    return (layer + 1) % fields.count("sliding_window_pattern") != 0


def has_rope(fields: ConfigFields, layer: int) -> bool:
    by_interval = (layer + 1) % fields.count("no_rope_layer_interval") != 0
    if fields.get("no_rope_layers") is None:
        return by_interval
    return fields.of_each_layer("no_rope_layers")[layer] == 1  # despite the field's name, 1 marks layers with rope


def partial_rope(fields: ConfigFields, layer: int, is_windowed: bool, **facts: Any) -> RopeConfig:
    fields.positive("partial_rotary_factor")  # refuses null, which transformers replaces when it saves the file
    return rope_config(fields, may_be_partial=True, **facts)


def root_of_hidden_size(fields: ConfigFields) -> float:
    return fields.count("hidden_size") ** 0.5


def no_rope(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    return None


def rope_in_windowed_layers(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    """Without windows, all layers have rope."""
    return rope_config(fields) if is_windowed or fields.get("sliding_window") is None else None


def rope_by_layer(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig | None:
    """A base for each layer; 0 is no rotation."""
    key, settings = rope_settings(fields)
    if fields.get("layer_rope_theta") is None or not isinstance(settings, dict):
        return rope_config(fields)
    theta = fields.of_each_layer("layer_rope_theta")[layer]
    return rope_config(fields, settings={**settings, "rope_theta": theta}, key=key) if theta else None


def rope_by_window(fields: ConfigFields, layer: int, is_windowed: bool, **facts: Any) -> RopeConfig:
    """One base for layers with a window; another base and the scaling for full attention."""
    theta = fields.positive("rope_local_base_freq" if is_windowed else "rope_theta")
    if fields.get("rope_parameters") is None:
        scaling = {} if is_windowed else fields.get("rope_scaling") or {}
        return rope_config(fields, settings={"rope_theta": theta, **scaling}, key="rope_scaling", **facts)
    by_type = fields.get("rope_parameters")
    if not isinstance(by_type, dict) or set(by_type) - {"full_attention", "sliding_attention"}:
        raise fields.wrong("rope_parameters", "an object with full_attention and sliding_attention")
    layer_type = "sliding_attention" if is_windowed else "full_attention"
    settings = {"rope_theta": theta, **(by_type.get(layer_type) or {})}
    return rope_config(fields, settings=settings, key=f"rope_parameters: {layer_type}", **facts)


ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
UNGATED_ACTIVATION_NAMES = {
    **ACTIVATION_NAMES,
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class Family:
    """A family's row."""

    # Facts of DecoderConfig: a value, or a function that reads it from config.json.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # Modules that only this family has, and a function that reads their facts from config.json: `DecoderConfig.own`.
    parts: FamilyParts = field(default_factory=FamilyParts)
    own: Callable[[ConfigFields], Any] | None = None
    # Values of absent fields. None for num_key_value_heads means as many as query heads.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: Callable[[ConfigFields, int], bool] = no_layer
    rope: Callable[[ConfigFields, int, bool], RopeConfig | None] = lambda fields, layer, is_windowed: rope_config(
        fields
    )
    # The layer type with a window; "chunked_attention" has chunks, whose size the family's own facts have.
    window_kind: str = "sliding_attention"
    # Whether `layer_types` of config.json decides which layers have a window.
    reads_layer_types: bool = False
    # Further facts of LayerConfig, by the layers with a window and the layer's number.
    layer_facts: Callable[[ConfigFields, Sequence[bool], int], Mapping[str, Any]] = lambda *_: {}
    # Fields that change the computation, with the values that the row computes. Other values are refused.
    only: Mapping[str, object] = field(default_factory=dict)
    # Rewrites a config.json to the spelling that the row reads.
    preprocessed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    # Mixers by layer type, and the layer type if config.json lists none. "hybrid" is a mixer in parallel to attention.
    # With one part per layer, "mlp" and "moe" are feed-forward layers, and other layers have none.
    mixers: Mapping[str, Callable[[ConfigFields], MixerConfig]] = field(default_factory=dict)
    one_part_per_layer: bool = False
    layer_type: Callable[[ConfigFields, int], str] = lambda fields, layer: "full_attention"
    activation_field: str = "hidden_act"
    # Activations by their names in config.json.
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATION_NAMES)
    norm_eps_field: str = "rms_norm_eps"
    # Facts of MixtureConfig; empty if the family has no experts.
    mixture: Mapping[str, Any] = field(default_factory=dict)
    has_mixture: Callable[[ConfigFields, int], bool] = lambda fields, layer: True
    # Replacements of parts of parameter names in the folder. With several names the first dimension is split among
    # them; `*` is the index of a stacked matrix, which is stored by itself.
    on_disk: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefix_on_disk: str = "model."  # of all parameters but the output layer's
    prefix_in_memory: str = "model."  # the same in transformers and PEFT
    layers: str = "layers"  # the name of the layers after either prefix
    transposed: tuple[str, ...] = ()  # parts of the names of matrices that the folder stores transposed
    # Ends of the names of tensors in old folders that the computation does not need.
    unread: tuple[str, ...] = ()
    # Names of modules in memory in transformers and PEFT, if they differ from `on_disk`.
    in_memory: Mapping[str, str] = field(default_factory=dict)
    # The start of the name of transformers' sequence classification model; empty if the family has none.
    scores_as: str = ""


ATTENTION_BIAS = {"qkv_bias": flag("attention_bias"), "output_bias": flag("attention_bias")}

QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
QWEN_DEFAULTS |= {"sliding_window": 4096, "max_window_layers": 28}
