"""Vision configuration: every fact in which towers differ, named by its effect, and one row of facts per family."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lean_ft.images.rules import image_rules
from lean_ft.system.config_fields import MAX_LAYERS, ConfigFields, listed

if TYPE_CHECKING:
    from lean_ft.models.config import DecoderConfig, LayerConfig


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower and its projector. Each default is the value that changes nothing."""

    num_layers: int
    hidden_size: int
    patch_size: int  # pixels of a patch's side
    merge: int  # patches of the side of the square that becomes one embedding
    out_size: int  # the decoder's hidden size
    num_heads: int = 1
    intermediate_size: int = 0
    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu_tanh"
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)  # of the colors, from 0 to 1; subtracted before the division by `std`
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    # Patches.
    centers_colors: bool = False  # normalized colors x become 2 * x - 1
    frames: int = 0  # an image is this many equal frames of a video; 0: the projection has no time axis
    linear_patches: bool = False  # the projection is stored as a matrix of pixels with their colors, no convolution
    patch_bias: bool = True  # the projection has a bias
    patch_norms: bool = False  # LayerNorms before and after the projection
    # Learned positions, for patches or for the fractions of a side, as a square table of `table_side`: interpolated
    # with the corners aligned, interpolated as pixels, or of the nearest fraction below. "sum": one table of columns
    # and one of rows.
    positions: Literal["corners", "pixels", "fractions", "sum", "none"] = "none"
    table_side: int = 0
    axis_first: bool = True  # the two tables of "sum" are stored as (2, side, D), not (side, 2, D)
    first_norm: Literal["layer", "rms"] | None = None  # before the first layer

    # Layers.
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    post_norms: bool = False  # attention and the feed-forward layer also have a norm behind them
    bias: bool = True  # of all linear layers
    linears: Literal["plain", "wrapped", "clipped"] = "plain"  # wrapped: as `linear` of a module, which may clip values
    is_gated: bool = False  # the feed-forward layer has a gate
    fused_qkv: bool = False  # one matrix for queries, keys and values
    qkv_norms: bool = False  # RMSNorms of each head's queries, keys and values, the last without a weight
    attention_scale: float | None = None  # None: head_dim ** -0.5
    rope_theta: float | None = None  # rotary positions over rows and columns; None: none
    # "same": the first half of a head's pairs turns with rows, the second with columns, at the same frequencies;
    # "alternating": rows and columns have every other frequency; "halves": a head's first half turns with columns, its
    # second half with rows.
    rope_axes: Literal["same", "alternating", "halves"] = "same"
    window: int = 0  # attention is within squares of so many embeddings' side; 0: within the image
    whole_layers: tuple[int, ...] = ()  # layers without windows
    last_norm: bool = False  # a norm after the last layer

    # The projector: [norm], merge, [norm], linear layers with GELU between them.
    projector_norm: Literal["layer", "rms", "unit"] | None = "layer"  # unit: RMSNorm without a weight
    projector_norm_eps: float = 1e-6
    projector_norm_offset: float = 0.0  # added to the norm's weight
    norm_after_merge: bool = False
    pools: bool = False  # the patches of a square are averaged, not concatenated
    features_first: bool = False  # concatenated patches are ordered by feature, then by place
    pooled_multiplier: float = 1.0
    standardizes: bool = False  # averages are shifted and scaled by stored numbers
    projector_sizes: tuple[int, ...] = ()  # outputs of the linear layers before the last
    projector_bias: tuple[bool, ...] = (True, True)
    projector_input_first: bool = False  # the matrices are stored as (inputs, outputs)
    gelu_before: int = 1  # the first linear layer, from 0, with GELU before it
    deepstack: tuple[int, ...] = ()  # after each of these layers, one more projector, for an early layer of the decoder

    # In which layers of the decoder the tokens of an image see each other.
    sees_image: Literal["never", "in_windows", "always"] = "never"
    pad_id: int | None = None  # the token whose per-layer inputs an image's tokens have

    def is_seen_in(self, layer: "LayerConfig") -> bool:
        """Whether the tokens of an image see each other in a layer of the decoder, also later ones."""
        return self.sees_image == "always" or (self.sees_image == "in_windows" and layer.window is not None)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class VisionFamily:
    """A family's row."""

    # Facts of VisionConfig, by the fields of vision_config and those of the whole config.json.
    facts: Callable[[ConfigFields, ConfigFields, "DecoderConfig"], dict[str, Any]]
    # Values of absent fields of vision_config.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Replacements in parameter names of the folder, in order: of a name's beginning, or behind a dot of any part.
    on_disk: Mapping[str, str] = field(default_factory=dict)
    # Other spellings of these names in folders, and what replaces them.
    spellings: Mapping[str, str] = field(default_factory=dict)
    # Whether the decoder's frequencies belong to time, height and width in turn, or section by section. None: one axis.
    alternating_axes: bool | None = None


_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
# Values of absent fields outside vision_config.
_WHOLE_DEFAULTS = {"mm_tokens_per_image": 256, "spatial_merge_size": 2, "multimodal_projector_bias": False}
_WHOLE_DEFAULTS |= {"scale_factor": 2, "downsample_factor": 2, "projector_hidden_size": 2560, "projector_bias": True}
_WHOLE_DEFAULTS |= {"projector_use_layernorm": True}


def _layers(
    vision: ConfigFields, count: str = "num_hidden_layers", heads: str = "num_attention_heads", act: str = "hidden_act"
) -> dict[str, Any]:
    """The facts that most towers have, by the fields' names."""
    sizes = {size: vision.count(size) for size in ("hidden_size", "intermediate_size", "patch_size")}
    activation = _ACTIVATIONS[vision.one_of(act, list(_ACTIVATIONS))]
    return sizes | {
        "num_layers": vision.count(count, most=MAX_LAYERS),
        "num_heads": vision.count(heads),
        "activation": activation,
    }


def _theta(vision: ConfigFields) -> float:
    return vision.object("rope_parameters", rope_theta=vision.get("rope_theta")).positive("rope_theta")


def _sees_images(whole: ConfigFields, default: str | None = None) -> bool:
    text = whole.object("text_config", use_bidirectional_attention=default)
    return text.get("use_bidirectional_attention") == "vision"


# A table: related fields share a line.
# fmt: off
def _sizes(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, patch_size: int
) -> dict[str, Any]:
    """Defaults of transformers' classes, under the fields' names of Qwen and of others."""
    return {
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "patch_size": patch_size,
        "depth": num_layers, "num_hidden_layers": num_layers, "num_heads": num_heads, "num_attention_heads": num_heads,
    }


def _qwen(vision: ConfigFields) -> dict[str, Any]:
    merge = vision.count("spatial_merge_size")
    return {
        **_layers(vision, "depth", "num_heads"), "merge": merge, "frames": vision.count("temporal_patch_size"),
        "fused_qkv": True, "rope_theta": _theta(vision), "projector_sizes": (vision.count("hidden_size") * merge**2,),
    }


def _qwen3_vl(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    return {
        **_qwen(vision), "positions": "corners", "table_side": math.isqrt(vision.count("num_position_embeddings")),
        "deepstack": tuple(vision.layer_numbers("deepstack_visual_indexes") or ()),
    }


def _qwen2_5_vl(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    return {
        **_qwen(vision), "patch_bias": False, "norm": "rms", "is_gated": True, "projector_norm": "rms",
        "window": vision.count("window_size") // vision.count("patch_size") // vision.count("spatial_merge_size"),
        "whole_layers": tuple(vision.layer_numbers("fullatt_block_indexes") or ()),
    }


def _siglip(vision: ConfigFields) -> dict[str, Any]:
    side, eps = vision.count("image_size") // vision.count("patch_size"), vision.positive("layer_norm_eps")
    return {**_layers(vision), "table_side": side, "norm_eps": eps, "last_norm": True, "projector_bias": (False,)}


def _gemma3(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    facts = _siglip(vision)
    return facts | {
        "merge": facts["table_side"] // math.isqrt(whole.count("mm_tokens_per_image")), "positions": "corners",
        "pools": True,
        "projector_norm": "rms", "projector_norm_eps": facts["norm_eps"], "projector_norm_offset": 1.0,
        "norm_after_merge": True, "projector_input_first": True, "sees_image": "always",
    }


def _mistral3(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    bias, size = whole.flag("multimodal_projector_bias"), vision.count("hidden_size")
    return {
        **_layers(vision), "merge": whole.count("spatial_merge_size"), "patch_bias": False, "first_norm": "rms",
        "norm": "rms", "norm_eps": 1e-5, "bias": False, "is_gated": True, "rope_theta": _theta(vision),
        "rope_axes": "alternating", "features_first": True, "projector_norm": "rms",
        "projector_norm_eps": decoder.norm_eps,
        "projector_sizes": (size, decoder.hidden_size), "projector_bias": (False, bias, bias), "gelu_before": 2,
    }


def _gemma4(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    text = whole.object("text_config", pad_token_id=0)
    return {
        **_layers(vision, act="hidden_activation"), **_gemma4_projector(vision), "centers_colors": True,
        "positions": "sum",
        "merge": vision.count("pooling_kernel_size"), "table_side": vision.count("position_embedding_size"),
        "linear_patches": True, "patch_bias": False,
        "norm": "rms", "norm_eps": vision.positive("rms_norm_eps"), "post_norms": True, "bias": False, "is_gated": True,
        "linears": "clipped" if vision.flag("use_clipped_linears") else "wrapped", "qkv_norms": True,
        "attention_scale": 1.0,
        "rope_theta": _theta(vision), "rope_axes": "halves", "pools": True, "standardizes": vision.flag("standardize"),
        "pooled_multiplier": vision.count("hidden_size") ** 0.5,
        "sees_image": "in_windows" if _sees_images(whole) else "never",
        "pad_id": text.count("pad_token_id", least=0) if decoder.own.layer_input_dim else None,
    }


def _gemma4_unified(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    return {
        "num_layers": 0, "hidden_size": vision.count("mm_embed_dim"), "merge": 1, "linear_patches": True,
        "patch_norms": True,
        "patch_size": vision.count("patch_size") * vision.count("pooling_kernel_size"), "positions": "sum",
        "table_side": vision.count("mm_posemb_size"), "axis_first": False, "first_norm": "layer",
        "sees_image": "always" if _sees_images(whole, "vision") else "never", **_gemma4_projector(vision),
    }


def _gemma4_projector(vision: ConfigFields) -> dict[str, Any]:
    eps = vision.positive("rms_norm_eps")
    return {"projector_norm": "unit", "projector_norm_eps": eps, "norm_after_merge": True, "projector_bias": (False,)}


def _smolvlm(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    return {**_siglip(vision), "merge": whole.count("scale_factor"), "positions": "fractions", "projector_norm": None}


def _lfm2_vl(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    return {
        **_layers(vision), "merge": whole.count("downsample_factor"), "linear_patches": True, "positions": "pixels",
        "table_side": math.isqrt(vision.count("num_patches")), "norm_eps": vision.positive("layer_norm_eps"),
        "last_norm": True,
        "projector_norm": "layer" if whole.flag("projector_use_layernorm") else None, "projector_norm_eps": 1e-5,
        "norm_after_merge": True, "projector_sizes": (whole.count("projector_hidden_size"),),
        "projector_bias": (whole.flag("projector_bias"),) * 2,
    }


_SIGLIP_DEFAULTS = {**_sizes(768, 3072, 12, 12, 16), "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    "image_size": 224}
_SIGLIP = {
    "vision.patch_embed.proj": "vision.embeddings.patch_embedding",
    "vision.pos_embed": "vision.embeddings.position_embedding",
    "vision.last_norm": "vision.post_layernorm", "vision.blocks": "vision.encoder.layers", ".norm1": ".layer_norm1",
    ".norm2": ".layer_norm2", ".mlp.linear_fc": ".mlp.fc", ".attn.proj": ".self_attn.out_proj", ".attn": ".self_attn",
    "vision.": "vision_tower.",
}
_GEMMA3 = {
    "vision.merger.norm": "multi_modal_projector.mm_soft_emb_norm",
    "vision.merger.linear_fc1.weight": "multi_modal_projector.mm_input_projection_weight", **_SIGLIP,
}
_SMOLVLM = {"vision.merger.linear_fc1": "connector.modality_projection.proj", **_SIGLIP, "vision.": "vision_model."}
_LFM2_VL = {
    "vision.merger.norm": "multi_modal_projector.layer_norm",
    "vision.merger.linear_fc": "multi_modal_projector.linear_",
    **_SIGLIP,
}
_GATED = {".mlp.gate": ".mlp.gate_proj", ".mlp.linear_fc1": ".mlp.up_proj", ".mlp.linear_fc2": ".mlp.down_proj"}
_PIXTRAL = {
    "vision.merger.linear_fc1": "multi_modal_projector.patch_merger.merging_layer",
    "vision.merger.linear_fc2": "multi_modal_projector.linear_1",
    "vision.merger.linear_fc3": "multi_modal_projector.linear_2",
    "vision.merger.norm": "multi_modal_projector.norm", "vision.patch_embed.proj": "vision.patch_conv",
    "vision.first_norm": "vision.ln_pre", "vision.blocks": "vision.transformer.layers", ".norm1": ".attention_norm",
    ".norm2": ".ffn_norm", **_GATED, ".mlp.": ".feed_forward.", ".attn.proj": ".attention.o_proj",
    ".attn": ".attention",
    "vision.": "vision_tower.",
}
_GEMMA4 = {
    "vision.merger.linear_fc1": "embed_vision.embedding_projection", "vision.merger.": "vision.",
    "vision.patch_embed.proj": "vision.patch_embedder.input_proj",
    "vision.pos_embed.weight": "vision.patch_embedder.position_embedding_table",
    "vision.blocks": "vision.encoder.layers",
    ".post_norm1": ".post_attention_layernorm", ".post_norm2": ".post_feedforward_layernorm",
    ".norm1": ".input_layernorm",
    ".norm2": ".pre_feedforward_layernorm", **_GATED, ".attn.proj": ".self_attn.o_proj", ".attn": ".self_attn",
    "vision.": "vision_tower.",
}
_GEMMA4_UNIFIED = {
    "vision.merger.linear_fc1": "embed_vision.multimodal_embedder.embedding_projection",
    "vision.patch_embed.proj": "vision.patch_dense", "vision.patch_embed.norm": "vision.patch_ln",
    "vision.pos_embed.weight": "vision.pos_embedding", "vision.first_norm": "vision.pos_norm",
    "vision.": "embed_vision.",
}
_QWEN2_5 = {
    "vision.merger.norm": "vision.merger.ln_q", "vision.merger.linear_fc1": "vision.merger.mlp.0",
    "vision.merger.linear_fc2": "vision.merger.mlp.2", **_GATED, "vision.": "visual.",
}
SPELLINGS = {"vision_tower.vision_model.": "vision_tower."}  # of transformers 4
_UNIFIED_SPELLINGS = {
    "embed_vision.embedding_projection": "embed_vision.multimodal_embedder.embedding_projection",
    "vision_embedder.": "embed_vision.",
}
_QWEN_DEFAULTS = {
    **_sizes(1152, 4304, 27, 16, 16), "hidden_act": "gelu_pytorch_tanh", "rope_theta": 10_000.0,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2, "num_position_embeddings": 2304,
}
_PIXTRAL_DEFAULTS = {**_sizes(1024, 4096, 24, 16, 16), "hidden_act": "gelu", "rope_theta": 10_000.0}
_QWEN2_5_DEFAULTS = {**_QWEN_DEFAULTS, **_sizes(3584, 3420, 32, 16, 14), "hidden_act": "silu", "window_size": 112}
_QWEN2_5_DEFAULTS |= {"fullatt_block_indexes": [7, 15, 23, 31]}
_GEMMA4_DEFAULTS = {
    **_sizes(768, 3072, 16, 12, 16), "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10_240, "use_clipped_linears": False, "standardize": False, "rope_theta": 100.0,
    "mm_embed_dim": 3840, "mm_posemb_size": 1120,
}
_QWEN = VisionFamily(_qwen3_vl, _QWEN_DEFAULTS, {"vision.": "visual."}, alternating_axes=True)

VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen3_vl": _QWEN, "qwen3_vl_moe": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN,
    "gemma3": VisionFamily(_gemma3, _SIGLIP_DEFAULTS, _GEMMA3, SPELLINGS),
    "mistral3": VisionFamily(_mistral3, _PIXTRAL_DEFAULTS, _PIXTRAL),
    "gemma4": VisionFamily(_gemma4, _GEMMA4_DEFAULTS, _GEMMA4),
    "gemma4_unified": VisionFamily(_gemma4_unified, _GEMMA4_DEFAULTS, _GEMMA4_UNIFIED, _UNIFIED_SPELLINGS),
    "smolvlm": VisionFamily(_smolvlm, {**_SIGLIP_DEFAULTS, **_sizes(1152, 3072, 12, 16, 32)}, _SMOLVLM),
    "lfm2_vl": VisionFamily(_lfm2_vl, {**_SIGLIP_DEFAULTS, "num_patches": 256}, _LFM2_VL, SPELLINGS),
    "qwen2_5_vl": VisionFamily(_qwen2_5_vl, _QWEN2_5_DEFAULTS, _QWEN2_5, alternating_axes=False),
}
# fmt: on


def read_tower(folder: Path, config: Mapping[str, Any], decoder: "DecoderConfig") -> VisionConfig:
    """`vision_config` of a model folder with this config.json, with the scale of its image processor's colors."""
    tower, rules = vision_config(config, decoder, str(folder / "config.json")), image_rules(folder)
    return replace(tower, mean=rules.mean, std=rules.std)


def vision_config(config: Mapping[str, Any], decoder: "DecoderConfig", where: str = "config.json") -> VisionConfig:
    """The tower that a multimodal model's config.json describes, for the decoder of the same file.

    Raises ValueError if lean_ft does not know the family's tower, or for a field that is missing or has an unknown
    value.
    """
    name, settings = config.get("model_type"), config.get("vision_config")
    if name not in VISION_FAMILIES:
        raise ValueError(f"{where}: model_type is {name!r}; images need one of {listed(VISION_FAMILIES)}.")
    if not isinstance(settings, dict):
        raise ValueError(
            f"{where}: vision_config is {settings!r}; expected an object with the vision tower's settings."
        )
    family, whole = VISION_FAMILIES[name], ConfigFields(config, _WHOLE_DEFAULTS, where)
    vision = whole.object("vision_config", **family.defaults)
    whole.expect(vision_feature_layer=-1, projector_hidden_act="gelu")
    tower = VisionConfig(**{"out_size": decoder.hidden_size, **family.facts(vision, whole, decoder)})
    if family.alternating_axes is not None and not any(layer.rope and layer.rope.axes for layer in decoder.layers):
        raise ValueError(f"{where}: text_config lacks mrope_section in its rotary settings, which images need.")
    same = {"head_dim": tower.head_dim, "num_key_value_heads": tower.num_heads} if tower.num_layers else {}
    vision.expect(**{name: value for name, value in same.items() if vision.get(name) is not None})
    # Rotary positions rotate pairs of features, by rows and by columns.
    of_head, times = (1, "") if tower.rope_theta is None else (4, "4 times ")
    if tower.hidden_size % (of_head * tower.num_heads):
        raise vision.wrong("hidden_size", f"a multiple of {times}the number of attention heads, {tower.num_heads}")
    return tower
