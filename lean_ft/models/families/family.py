"""What a row says, and what families of several kinds say alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from lean_ft.models.config import MixerConfig
from lean_ft.models.config_fields import Fields
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import rope_config

# Readers of one field by its name: true or false, a positive integer, a positive number, such a number or null.
flag, count, number, number_or_null = (
    partial(methodcaller, kind) for kind in ("flag", "count", "positive", "positive_or_null")
)

# Which layers have a window, where config.json does not list it: a function of the fields and the layer's number.


def no_layer(fields: Fields, layer: int) -> bool:
    return False


def every_layer(fields: Fields, layer: int) -> bool:
    return fields.get("sliding_window") is not None


def upper_layers(fields: Fields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer >= fields.count("max_window_layers", least=0)


def has_rope(fields: Fields, layer: int) -> bool:
    by_interval = (layer + 1) % fields.count("no_rope_layer_interval") != 0
    if fields.get("no_rope_layers") is None:
        return by_interval
    return fields.of_each_layer("no_rope_layers")[layer] == 1  # named for the layers without, a 1 marks those with it


def a_part_turned(fields: Fields, layer: int, is_windowed: bool, **facts: Any) -> RopeConfig:
    fields.positive("partial_rotary_factor")  # null is another number to transformers once it has saved the file
    return rope_config(fields, may_be_partial=True, **facts)


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Family:
    """What tells a family from the others."""

    # Facts of DecoderConfig: a value, or what reads it from config.json.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # What a field means where config.json leaves it out; None for num_key_value_heads: as many as query heads.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: Callable[[Fields, int], bool] = no_layer
    rope: Callable[[Fields, int, bool], RopeConfig | None] = lambda fields, layer, is_windowed: rope_config(fields)
    # What `layer_types` calls such a layer. In a "chunked_attention" the window is the chunk that a position lies in.
    window_kind: str = "sliding_attention"
    # Whether `layer_types`, where config.json has it, decides which layers have a window.
    reads_layer_types: bool = False
    # Further facts of LayerConfig, of a layer by which layers have a window and its number.
    of_layer: Callable[[Fields, Sequence[bool], int], Mapping[str, Any]] = lambda fields, is_windowed, layer: {}
    # config.json in the words that the row reads, where it has been written in several.
    reworded: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    # The other mixers that `layer_types` may name, and what a layer is where config.json does not list them. "hybrid" is one
    # beside attention; where each part is alone, "mlp" and "moe" are feed-forward layers, and the others have none.
    mixers: Mapping[str, Callable[[Fields], MixerConfig]] = field(default_factory=dict)
    parts_are_alone: bool = False
    layer_type: Callable[[Fields, int], str] = lambda fields, layer: "full_attention"
    activation_field: str = "hidden_act"
    # The activations that config.json may name, and which each is.
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    norm_eps_field: str = "rms_norm_eps"
    # Facts of MixtureConfig, as above; without any the family has no experts.
    mixture: Mapping[str, Any] = field(default_factory=dict)
    has_mixture: Callable[[Fields, int], bool] = lambda fields, layer: True
    # What the folder has in the place of a part of our parameters' names: several names where the first dimension is
    # cut into so many parts, and `*` for the index in a stack, whose matrices it holds one by one.
    on_disk: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefix_on_disk: str = "model."  # of all but the output layer
    # What transformers, and so PEFT, calls modules in memory, where that is not as on disk.
    in_memory: Mapping[str, str] = field(default_factory=dict)


ATTENTION_BIAS = {"qkv_bias": flag("attention_bias"), "output_bias": flag("attention_bias")}

QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
