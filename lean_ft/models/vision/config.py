"""Vision configuration: every fact in which towers differ, named by its effect, and one row of facts per family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lean_ft.models.config_fields import ConfigFields, listed

if TYPE_CHECKING:
    from lean_ft.models.config import DecoderConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower and its projector. Each default is the value that changes nothing."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int  # pixels of a patch's side
    merge: int  # patches of the side of the square that becomes one embedding
    out_size: int  # the decoder's hidden size
    activation: Literal["gelu", "gelu_tanh", "silu"]
    mean: tuple[float, ...] = _HALF  # of the colors, from 0 to 1; subtracted before the division by `std`
    std: tuple[float, ...] = _HALF
    bias: bool = True  # of all linear layers of the blocks
    patch_bias: bool = True  # of the projection of patches
    is_gated: bool = False  # the feed-forward layer has a gate
    fused_qkv: bool = False  # one matrix for queries, keys and values
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    frames: int = 0  # an image is this many equal frames of a video; 0: the patch projection has no time axis
    table_side: int = 0  # learned positions: a square table, stretched to each image's grid; 0: none
    rope_theta: float | None = None  # rotary positions over rows and columns; None: none
    rope_alternates: bool = False  # rows take the even frequencies, columns the odd ones; False: both take the same
    norms_patches: bool = False  # a norm before the first layer
    norms_output: bool = False  # a norm after the last layer

    # The projector: [norm], merge, [norm], linear layers with GELU between them.
    projector_norm: Literal["layer", "rms"] | None = "layer"
    projector_norm_eps: float = 1e-6
    projector_norm_offset: float = 0.0  # added to the norm's weight
    norm_after_merge: bool = False
    pools: bool = False  # the patches of a square are averaged, not concatenated
    features_first: bool = False  # concatenated patches are ordered by feature, then by place
    projector_sizes: tuple[int, ...] = ()  # outputs of the linear layers before the last
    projector_bias: tuple[bool, ...] = (True, True)
    projector_input_first: bool = False  # the matrices are stored as (inputs, outputs)
    gelu_before: int = 1  # the first linear layer, from 0, with GELU before it
    deepstack: tuple[int, ...] = ()  # after each of these layers, one more projector, for an early layer of the decoder
    # In which layers of the decoder the tokens of an image see each other.
    sees_image: Literal["never", "in_windows", "always"] = "never"

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
    # Replacements of parts of parameter names in the folder, in order.
    on_disk: Mapping[str, str] = field(default_factory=dict)
    # The decoder's frequencies belong to time, height and width in turn, not section by section.
    alternating_axes: bool = True


# Fields of config.json that change the computation, with the only supported value.
_ONLY = {"vision_feature_layer": -1, "projector_hidden_act": "gelu"}
_WHOLE_DEFAULTS = _ONLY | {"mm_tokens_per_image": 256, "spatial_merge_size": 2, "multimodal_projector_bias": False}


def _layers(vision: ConfigFields) -> dict[str, Any]:
    return {"num_layers": vision.count("num_hidden_layers"), "num_heads": vision.count("num_attention_heads")}


def _rope_theta(vision: ConfigFields) -> float:
    rope = vision.get("rope_parameters") or {}
    return ConfigFields(rope, {"rope_theta": 10_000.0} | vision.values, vision.where).positive("rope_theta")


# A table: related fields share a line.
# fmt: off
def _qwen3_vl(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    merge, hidden_size = vision.count("spatial_merge_size"), vision.count("hidden_size")
    return {
        "num_layers": vision.count("depth"), "num_heads": vision.count("num_heads"), "merge": merge, "fused_qkv": True,
        "frames": vision.count("temporal_patch_size"), "table_side": int(vision.count("num_position_embeddings") ** 0.5),
        "rope_theta": _rope_theta(vision), "projector_sizes": (hidden_size * merge**2,),
        "deepstack": tuple(vision.get("deepstack_visual_indexes") or ()),
    }


_QWEN = VisionFamily(_qwen3_vl, {"hidden_act": "gelu_pytorch_tanh"}, {"vision.": "visual."})

def _gemma3(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    side, eps = vision.count("image_size") // vision.count("patch_size"), vision.positive("layer_norm_eps")
    return {
        **_layers(vision), "merge": side // int(whole.count("mm_tokens_per_image") ** 0.5), "table_side": side,
        "norm_eps": eps, "norms_output": True, "pools": True, "projector_norm": "rms", "projector_norm_eps": eps,
        "projector_norm_offset": 1.0, "norm_after_merge": True, "projector_bias": (False,), "projector_input_first": True,
        "sees_image": "always",
    }


def _mistral3(vision: ConfigFields, whole: ConfigFields, decoder: "DecoderConfig") -> dict[str, Any]:
    bias = whole.flag("multimodal_projector_bias")
    return {
        **_layers(vision), "merge": whole.count("spatial_merge_size"), "is_gated": True, "bias": False, "patch_bias": False,
        "norm": "rms", "norm_eps": 1e-5, "rope_theta": _rope_theta(vision), "rope_alternates": True, "norms_patches": True,
        "features_first": True, "projector_norm": "rms", "projector_norm_eps": decoder.norm_eps, "gelu_before": 2,
        "projector_sizes": (vision.count("hidden_size"), decoder.hidden_size), "projector_bias": (False, bias, bias),
    }


_SIGLIP_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_SIGLIP = {
    "vision.patch_embed.proj": "vision.embeddings.patch_embedding", "vision.pos_embed": "vision.embeddings.position_embedding",
    "vision.last_norm": "vision.post_layernorm", "vision.blocks": "vision.encoder.layers", ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.", ".mlp.linear_fc": ".mlp.fc", ".attn.proj": ".self_attn.out_proj", ".attn.": ".self_attn.",
}
_GEMMA3_ON_DISK = {
    "vision.merger.norm": "multi_modal_projector.mm_soft_emb_norm",
    "vision.merger.linear_fc1.weight": "multi_modal_projector.mm_input_projection_weight",
    **_SIGLIP, "vision.": "vision_tower.",
}
_PIXTRAL = {
    "vision.merger.linear_fc1": "multi_modal_projector.patch_merger.merging_layer",
    "vision.merger.linear_fc2": "multi_modal_projector.linear_1", "vision.merger.linear_fc3": "multi_modal_projector.linear_2",
    "vision.merger.norm": "multi_modal_projector.norm", "vision.patch_embed.proj": "vision.patch_conv",
    "vision.first_norm": "vision.ln_pre", "vision.blocks": "vision.transformer.layers", ".norm1.": ".attention_norm.",
    ".norm2.": ".ffn_norm.", ".mlp.gate.": ".feed_forward.gate_proj.", ".mlp.linear_fc1.": ".feed_forward.up_proj.",
    ".mlp.linear_fc2.": ".feed_forward.down_proj.", ".attn.proj.": ".attention.o_proj.", ".attn.": ".attention.",
    "vision.": "vision_tower.",
}

VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen3_vl": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN, "gemma3": VisionFamily(_gemma3, _SIGLIP_DEFAULTS, _GEMMA3_ON_DISK),
    "mistral3": VisionFamily(_mistral3, {"hidden_act": "gelu"}, _PIXTRAL),
}
# fmt: on


def vision_config(config: Mapping[str, Any], decoder: "DecoderConfig", where: str = "config.json") -> VisionConfig:
    """The tower that a multimodal model's config.json describes, for the decoder of the same file.

    Raises ValueError if lean_ft does not know the family's tower, or for a field that is missing or has an unknown value.
    """
    name, settings = config.get("model_type"), config.get("vision_config")
    if name not in VISION_FAMILIES:
        raise ValueError(f"{where}: model_type is {name!r}; images need one of {listed(VISION_FAMILIES)}.")
    if not isinstance(settings, dict):
        raise ValueError(
            f"{where}: vision_config is {settings!r}; expected an object with the vision tower's settings."
        )
    family = VISION_FAMILIES[name]
    vision = ConfigFields(settings, family.defaults, f"{where}: vision_config")
    whole = ConfigFields(config, _WHOLE_DEFAULTS, where)
    for key, value in _ONLY.items():
        if whole.get(key) != value:
            raise ValueError(
                f"{where}: {key} is {whole.get(key)!r}; expected {value!r}, the only value that is supported."
            )
    sizes = {size: vision.count(size) for size in ("hidden_size", "intermediate_size", "patch_size")}
    if (activation := str(vision.get("hidden_act"))) not in _ACTIVATIONS:
        raise ValueError(f"{vision.where}: hidden_act is {activation!r}; expected one of {listed(_ACTIVATIONS)}.")
    facts: dict[str, Any] = {"activation": _ACTIVATIONS[activation], **sizes, "out_size": decoder.hidden_size}
    tower = VisionConfig(**facts | family.facts(vision, whole, decoder))
    if tower.hidden_size % (4 * tower.num_heads):
        expected = f"a multiple of 4 times the number of attention heads, {tower.num_heads}"
        raise ValueError(f"{vision.where}: hidden_size is {tower.hidden_size}; expected {expected}.")
    return tower
