"""Settings of the trained model, its adapters and its quantization."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lean_ft.settings.base import Dtype, Fraction, Name, Settings, spelled_out
from lean_ft.system.user_functions import use_family

TowerMode = Literal["none", "frozen", "train"]
FrozenKind = Literal["auto", "none", "nf4", "as_stored", "float8"]


class ModelConfig(Settings):
    """The model that is trained."""

    path: Name
    """A Hugging Face model folder, a run (its newest checkpoint), a Hub repository (`org/name` or `org/name@revision`),
    a GGUF file (`model.gguf`, or `org/name:model.gguf` of a repository), or an embedded model (`tiny`, `tiny-images`,
    `tiny-tools`). A run records the commit or checkpoint and resumes with it."""
    family: Annotated[Name | None, AfterValidator(use_family)] = None
    """Your own row of a family that lean_ft does not read, `my_family.py:NAME`: a `Family` in a variable with the
    model_type's name, with `_` for `-`. See docs/new_family.md. Every command that reads the model or its checkpoints
    needs it, also `--family` of export, serve and score. A run uses the row as it was when its model was read."""
    dtype: Dtype = "bfloat16"
    """Dtype of the weights and of the computation. `float16` keeps float32 master weights, computes in float16 and
    scales the loss."""
    random_init: bool = False
    """Build the model from config.json with random weights, for benchmarks. No safetensors file is needed."""
    new_tokens: list[str] = Field([])
    """Tokens to add to the vocabulary. Their rows in the embedding and the output layer start at the mean of the other
    rows and are trained, also beside an adapter, or alone with lora.targets=[]. Checkpoints have them in
    tokenizer.json."""
    images: TowerMode = "none"
    """Images in rows. `none`: only the language model of a multimodal model is loaded, and rows have no images.
    `frozen`: the vision tower computes embeddings and is not trained. `train`: it trains too, and beside an adapter the
    layers of the tower
    that `lora.targets` names. `train: [vision.*merger*]` trains the projector alone, and optimizer.lr_ratios={vision:
    0.1} lowers the tower's learning rate."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Mixture of experts: weight of the router's load-balancing loss, added to the mean loss. 0 disables it. null uses
    config.json's weight if output_router_logits is true there, and 0 otherwise, as transformers does."""

    mtp: Literal["keep", "train", "drop"] = "keep"
    """Drafting layers, with which engines decode speculatively (multi-token prediction). `keep`: saved folders have
    their tensors as they were. `train`: they are computed and trained; a folder without them gets one with random
    weights. `drop`: saved folders have none, and their config.json promises none. See docs/drafting.md."""
    mtp_trunk: Literal["frozen", "train"] = "frozen"
    """With mtp=train: whether the rest of the model is frozen, or trains with its own loss plus mtp_weight times the
    loss of the drafting layers."""
    mtp_weight: PositiveFloat = Field(0.3, le=100)
    """With mtp_trunk=train: weight of the drafting layers' loss, the mean over the layers. DeepSeek-V3 used 0.3, and
    0.1 for the last third of its tokens."""

    @property
    def trains_drafting_alone(self) -> bool:
        return self.mtp == "train" and self.mtp_trunk == "frozen"

    @property
    def has_tower(self) -> bool:
        """Whether the vision tower of a multimodal model is loaded."""
        return self.images != "none"

    def for_adapter(self) -> dict[str, object]:
        return {"images": "frozen"} if self.images == "train" else {}  # an adapter leaves the vision tower alone

    def of_same_rows(self, path: str) -> Self:
        """The settings of a model at `path` that reads the same rows and is not trained."""
        is_not_trained = {"random_init": False, "new_tokens": [], "router_aux_loss_coef": None}
        return self.model_copy(update={"path": path, **is_not_trained})


class LoRAConfig(Settings):
    """The LoRA adapter that trains instead of the model's weights."""

    rank: PositiveInt = 16
    """Rank of the adapter: the inner width of its two matrices."""
    alpha: PositiveFloat = Field(32.0, le=1e6)
    """Scale of the adapter: its product is multiplied by alpha / rank, or alpha / sqrt(rank) with rslora."""
    targets: list[str] = Field(["all-linear"])
    """Layers that get an adapter: `all-linear` (all of attention and feed-forward), ends of names (q_proj, lm_head,
    embed_tokens), or names with wildcards (model.layers.[0-3].*). With `[]`, only the rows of model.new_tokens
    train. With model.images=train, names match layers of the vision tower too, as in PEFT. If one pattern names the
    tower alone (vision.blocks.*), the others match only the language model."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapter's inputs."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank; suits high ranks."""
    dora: bool = False
    """DoRA: train the magnitude of each output separately from its direction."""
    init: Literal["zero", "pissa"] = "zero"
    """Start of the adapter. `zero`: the product is zero. `pissa`: the weight's largest singular directions, which are
    subtracted from the weight (PiSSA)."""
    lr_ratio: PositiveFloat = 1.0
    """LoRA+: learning rate of the second matrix (B), as a multiple of optimizer.lr. The paper advises 16."""
    dtype: Annotated[Literal["float32", "model"], BeforeValidator(spelled_out)] = "float32"
    """Dtype in which the adapter is stored and updated. Products use the model's dtype."""
    quantize: FrozenKind = "auto"
    """How the frozen weights of linear layers and experts are stored. Each weight is dequantized for its product. `nf4`
    (QLoRA): 4 bits, NF4 with double quantization; experts that the folder has in MXFP4 stay so. `float8`: 8 bits, a
    scale per row.
    `as_stored`: as the folder has them, in MXFP4 (gpt-oss) or fp8. `none`: in model.dtype. `auto`: as_stored for
    folders with quantized weights, and none for others."""


# torchao's kinds that lean_ft does not support -> reason.
_UNSUPPORTED_KINDS = {
    **dict.fromkeys(("nvfp4", "mxfp4", "mxfp8"), "it is a prototype in torchao, and needs a GPU from Blackwell on"),
    **dict.fromkeys(("float8_dynamic", "float8_dynamic_int4_weight"), "it needs a GPU from Ada or Hopper on"),
    "int4_packed": "it needs the GPU kernels of mslk",
}


def _check_kind(name: Any) -> Any:
    if name in _UNSUPPORTED_KINDS:
        raise ValueError(f"{name} is not supported: {_UNSUPPORTED_KINDS[name]}.")
    return name


QuantizedKind = Annotated[
    Literal["int8", "int4", "float8", "int8_dynamic_int8_weight", "int8_dynamic_int4_weight"],
    BeforeValidator(_check_kind),
]
GroupSize = Annotated[
    PositiveInt,
    Field(
        description="4-bit weights: number of neighboring inputs that share a scale. It must divide the number of "
        "inputs."
    ),
]


class QuantizeConfig(Settings):
    """Quantization-aware training (QAT). `leanft run quantize` then quantizes the weights."""

    train: Annotated[Literal["int4", "int8_dynamic_int4_weight"], BeforeValidator(_check_kind)] | None = None
    """Quantization-aware training: round the layers' weights to 4 bits, and with int8_dynamic_int4_weight their inputs
    to 8 bits per token, as torchao's quantized layers do. Checkpoints hold unrounded weights. null rounds nothing."""
    group_size: GroupSize = 32
