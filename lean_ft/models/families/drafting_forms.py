"""How families' folders have drafting layers (multi-token prediction): names, counts and configuration of a layer.

A drafting layer is a layer of the model's own kind, named `model.layers.N` after the last one. It has further modules:
`enorm` norms the embedding of a later token, `hnorm` the hidden state, `eh_proj` joins the two, and `shared_head.norm`
norms the layer's output. That is DeepSeek's form; other forms rename it.

Sources: DeepSeek-V3 technical report, section 2.2 (arXiv:2412.19437); transformers' `MtpLayer`; vLLM's
`deepseek_mtp.py`, `glm4_moe_mtp.py`, `hy_v3_mtp.py`, `qwen3_next_mtp.py` and `qwen3_5_mtp.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lean_ft.models.families.family import Family


@dataclass(frozen=True)
class DraftingForm:
    """One form of drafting layers in folders."""

    count: str  # the field of config.json with their number
    # Starts of the names of a layer's tensors, whose place is N, and the folder's; absent: the same.
    names: Mapping[str, str] = field(default_factory=dict)
    # Ends of the names of tensors that repeat the embedding or the output layer.
    copies: tuple[str, ...] = ()
    most: int = 8  # drafting layers of a folder
    # Fields of a config.json whose first layer is a drafting layer. None: the layer after the last is one.
    of_layer: Mapping[str, Any] | None = None

    def config_of_layer(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """A config.json that describes a drafting layer, and the layer's place in it."""
        if self.of_layer is not None:
            return {**config, **self.of_layer}, 0
        number = config["num_hidden_layers"]
        of_layers = {
            name: [*value, value[-1]]
            for name, value in config.items()
            if isinstance(value, list) and len(value) == number and name.endswith("layer_types")
        }
        return {**config, **of_layers, "num_hidden_layers": number + 1}, number


_AFTER_THE_LAST = DraftingForm(
    count="num_nextn_predict_layers", copies=(".embed_tokens.weight", ".shared_head.head.weight")
)
_APART = DraftingForm(
    count="num_nextn_predict_layers",
    names={
        "model.layers.N.eh_proj.": "mtp.fc.",
        "model.layers.N.enorm.": "mtp.pre_fc_norm_embedding.",
        "model.layers.N.hnorm.": "mtp.pre_fc_norm_hidden.",
        "model.layers.N.shared_head.norm.": "mtp.norm.",
        "model.layers.N.": "mtp.layers.0.",
    },
    most=1,  # several would share all but the layer itself
    of_layer={"num_hidden_layers": 1, "layer_types": ["full_attention"]},
)

FORMS: dict[str, DraftingForm] = {
    "deepseek_v3": _AFTER_THE_LAST,
    "glm4_moe": _AFTER_THE_LAST,
    "hy_v3": replace(
        _AFTER_THE_LAST,
        names={"model.layers.N.shared_head.norm.": "model.layers.N.final_layernorm."},
        copies=(".embed_tokens.weight", ".shared_head.weight", ".shared_head.head.weight"),
    ),
    "qwen3_next": _APART,
    "qwen3_5_text": replace(_APART, count="mtp_num_hidden_layers"),
    "qwen3_5_moe_text": replace(_APART, count="mtp_num_hidden_layers"),
}


@dataclass(frozen=True)
class DraftingFamily(Family):
    """The row of a model whose drafting layers are built, instead of being copied or left out."""

    first: int = 0  # the place of the first drafting layer
    form: DraftingForm = _AFTER_THE_LAST
    is_new: bool = False  # whether the layers start with random weights, because the folder has none

    @classmethod
    def of(cls, family: Family, form: DraftingForm, first: int, number: int) -> "DraftingFamily":
        """The row with the names of `number` drafting layers behind `first` layers."""
        on_disk = dict[str, tuple[str, ...]]()
        for place in map(str, range(first, first + number)):
            names = {own.replace("N", place): theirs.replace("N", place) for own, theirs in form.names.items()}
            start = f"model.layers.{place}."
            block = names.pop(start, start)
            on_disk |= {own: (theirs,) for own, theirs in names.items()}
            if block != start:  # only one part of a name is replaced, so here are the family's with the layer's
                on_disk |= {
                    f"{start}{own}": tuple(block + one for one in theirs) for own, theirs in family.on_disk.items()
                }
                on_disk[start] = (block,)
        facts = {fact.name: getattr(family, fact.name) for fact in fields(Family)}
        return cls(**{**facts, "on_disk": {**on_disk, **family.on_disk}}, first=first, form=form)

    def is_of_drafting(self, name: str) -> bool:
        """Whether a parameter of the decoder belongs to a drafting layer."""
        _, is_of_layer, rest = name.partition("model.layers.")
        return bool(is_of_layer) and int(rest.partition(".")[0]) >= self.first
