"""Vision configuration: every fact in which towers differ, named by its effect, and one row of facts per family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lean_ft.models.config_fields import ConfigFields, listed

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
    fused_qkv: bool = False  # one matrix for queries, keys and values
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    frames: int = 0  # an image is this many equal frames of a video; 0: the patch projection has no time axis
    table_side: int = 0  # learned positions: a square table, stretched to each image's grid; 0: none
    rope_theta: float | None = None  # rotary positions over rows and columns; None: none

    # The projector: [norm], merge, [norm], linear layers with GELU between them.
    projector_norm: Literal["layer", "rms"] | None = "layer"
    norm_after_merge: bool = False
    projector_sizes: tuple[int, ...] = ()  # outputs of the linear layers before the last
    projector_bias: tuple[bool, ...] = (True, True)
    deepstack: tuple[int, ...] = ()  # after each of these layers, one more projector, for an early layer of the decoder

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class VisionFamily:
    """A family's row."""

    # Facts of VisionConfig, by the fields of vision_config, those of the whole config.json, and the decoder's hidden size.
    facts: Callable[[ConfigFields, ConfigFields, int], dict[str, Any]]
    # Replacements of parts of parameter names in the folder, in order.
    on_disk: Mapping[str, str] = field(default_factory=dict)
    # The decoder's frequencies belong to time, height and width in turn, not section by section.
    alternating_axes: bool = True


# A table: related fields share a line.
# fmt: off
def _qwen3_vl(vision: ConfigFields, whole: ConfigFields, out_size: int) -> dict[str, Any]:
    merge, hidden_size = vision.count("spatial_merge_size"), vision.count("hidden_size")
    return {
        "num_layers": vision.count("depth"), "num_heads": vision.count("num_heads"), "merge": merge, "fused_qkv": True,
        "frames": vision.count("temporal_patch_size"), "table_side": int(vision.count("num_position_embeddings") ** 0.5),
        "rope_theta": 10_000.0, "projector_sizes": (hidden_size * merge**2,),
        "deepstack": tuple(vision.get("deepstack_visual_indexes") or ()),
    }


_QWEN = VisionFamily(_qwen3_vl, {"vision.": "visual."})

VISION_FAMILIES: dict[str, VisionFamily] = {"qwen3_vl": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN}
# fmt: on


def vision_config(config: Mapping[str, Any], out_size: int, where: str = "config.json") -> VisionConfig:
    """The tower that a multimodal model's config.json describes; `out_size` is the decoder's hidden size.

    Raises ValueError if lean_ft does not know the family's tower, or for a field that is missing or has an unknown value.
    """
    name, settings = config.get("model_type"), config.get("vision_config")
    if name not in VISION_FAMILIES:
        raise ValueError(f"{where}: model_type is {name!r}; images need one of {listed(VISION_FAMILIES)}.")
    if not isinstance(settings, dict):
        raise ValueError(
            f"{where}: vision_config is {settings!r}; expected an object with the vision tower's settings."
        )
    vision, whole = ConfigFields(settings, {}, f"{where}: vision_config"), ConfigFields(config, {}, where)
    sizes = {size: vision.count(size) for size in ("hidden_size", "intermediate_size", "patch_size")}
    if (activation := str(vision.get("hidden_act"))) not in _ACTIVATIONS:
        raise ValueError(f"{vision.where}: hidden_act is {activation!r}; expected one of {listed(_ACTIVATIONS)}.")
    facts: dict[str, Any] = {"activation": _ACTIVATIONS[activation], **sizes, "out_size": out_size}
    tower = VisionConfig(**facts | VISION_FAMILIES[name].facts(vision, whole, out_size))
    if tower.hidden_size % (4 * tower.num_heads):
        expected = f"a multiple of 4 times the number of attention heads, {tower.num_heads}"
        raise ValueError(f"{vision.where}: hidden_size is {tower.hidden_size}; expected {expected}.")
    return tower
