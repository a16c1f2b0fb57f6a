"""What to load of a model's folder, and in which form: the options of `load_model`, typed by hand or taken from
`ModelConfig`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import torch

from lean_ft.models.config_json import VECTORS, Labels
from lean_ft.models.decoder import Decoder
from lean_ft.models.vision.loading import tower_of
from lean_ft.settings import MemoryConfig, ModelConfig, TowerMode, spelled_out
from lean_ft.system.user_functions import OWN_FAMILIES, use_family
from lean_ft.tokenizers import load_tokenizer

Quantize = Callable[[Decoder, str], None]
"""Called with a model on the meta device and the name of each of its modules. It may replace weights by quantized
ones."""


@dataclass(frozen=True)
class LoadOptions:
    """The form in which a model is loaded. The defaults load a language model in float32."""

    dtype: torch.dtype = torch.float32
    """Dtype of the parameters."""
    random_init: bool = False
    """Draw the weights as transformers does; only config.json is needed."""
    images: TowerMode | Literal["auto"] = "none"
    """Of a multimodal model, load the language model alone, or also the vision tower, frozen or to train. `auto`:
    frozen, if lean_ft knows the tower and the folder has a file of its image processor."""
    scores: Labels | None = None
    """Labels of a reward model (`REWARD_LABELS`) or classifier (`label_fields`, `stored_labels`). A language model gets
    a zero-initialized score layer with these labels. `VECTORS` loads a model without its output layer, for vectors of
    texts, with the layers after pooling that its folder has. None loads a model that gives text."""
    new_ids: Sequence[int] = ()
    """Ids of added tokens. Their rows are the mean of the rows before the first new id."""
    router_aux_loss_coef: float | None = None
    """None uses config.json's coefficient if `output_router_logits` is true there."""
    quantize: Quantize | None = None
    """Quantizes weights before they are read, so that the unquantized ones never take memory (`quantize_as_loaded`)."""
    memory: MemoryConfig | None = None
    """Frozen weights that these settings keep on the host are loaded there; None loads all to the device."""

    def for_folder(self, folder: Path) -> Self:
        """The options with what `auto` means for a model folder. Raises ValueError if its tower cannot be used."""
        return replace(self, images=tower_of(folder)) if self.images == "auto" else self

    @property
    def gives_vectors(self) -> bool:
        return self.scores == VECTORS

    @property
    def has_tower(self) -> bool:
        return self.images != "none"

    @property
    def trains_tower(self) -> bool:
        return self.images == "train"


class TowerKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` that say which parts of a multimodal model are loaded."""

    images: TowerMode | Literal["auto"]


class LoadKeywords(TowerKeywords, total=False):
    """The fields of `LoadOptions` as keyword arguments; a dtype may be a name."""

    dtype: torch.dtype | str
    random_init: bool
    scores: Labels | None
    new_ids: Sequence[int]
    router_aux_loss_coef: float | None
    quantize: Quantize | None
    memory: MemoryConfig | None


def load_options(model: str | Path | ModelConfig, keywords: LoadKeywords) -> tuple[str | Path, LoadOptions]:
    """The path of a model, and the options for it: the settings of a `ModelConfig`, unless `keywords` replace them."""
    if isinstance(model, ModelConfig):
        if model.family not in [own.setting for own in OWN_FAMILIES.values()]:  # other settings named another row since
            use_family(model.family)
        keywords = {
            "dtype": "float32" if model.dtype == "float16" else model.dtype,  # mixed precision with float32 parameters
            "random_init": model.random_init,
            "images": model.images,
            "new_ids": new_token_ids(model),
            "router_aux_loss_coef": model.router_aux_loss_coef,
            **keywords,
        }
        model = model.path
    scores = keywords.get("scores")
    if not isinstance(scores, Mapping | None):
        raise ValueError(
            f"scores is {scores!r}; expected labels from lean_ft.models: REWARD_LABELS for a reward model, "
            "label_fields(...) for a classifier, VECTORS for a model that gives vectors, stored_labels(folder) for any "
            "of them as it is, or None for a model that gives text."
        )
    options: dict[str, object] = {**keywords, "dtype": torch_dtype(keywords.get("dtype", torch.float32))}
    return model, LoadOptions(**options)  # pyright: ignore[reportArgumentType]


def tower_of_run(settings: Mapping[str, Any]) -> TowerMode:
    """How a run with these settings, by dotted key, loaded the model's vision tower; `none` without settings."""
    mode = settings.get("model.images", "none")
    return mode if mode in ("frozen", "train") else "none"


def keywords_of_run(settings: Mapping[str, Any]) -> TowerKeywords:
    """The options that load the same parts of a model as a run with these settings, by dotted key."""
    return {"images": tower_of_run(settings)}


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of weights from a torch.dtype or a name: `bfloat16`, `torch.bfloat16` or `bf16`."""
    name = str(spelled_out(dtype))
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype}; expected float32, bfloat16 or float16 (a torch.dtype or its name).")
    return getattr(torch, name)


def new_token_ids(cfg: ModelConfig) -> Sequence[int]:
    """The ids of `model.new_tokens`, in order."""
    return range(load_tokenizer(cfg).vocab_size)[-len(cfg.new_tokens) :] if cfg.new_tokens else ()
