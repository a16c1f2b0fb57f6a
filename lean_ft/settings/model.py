"""Settings of the model that trains, and of the adapters on it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lean_ft.settings.base import Dtype, Fraction, Settings, spelled_out


class ModelConfig(Settings):
    """The model that is trained."""

    path: str = Field(
        description="A Hugging Face model folder, a repository of the hub (`org/name`, or `org/name@revision`), or the "
        "embedded model: `tiny`. A run records the commit, and goes on with it."
    )
    dtype: Dtype = Field(
        "bfloat16",
        description="Type of the weights and the arithmetic. `float16` keeps float32 master weights, computes "
        "in float16 and scales the loss.",
    )
    random_init: bool = Field(
        False,
        description="Build from config.json alone, with random weights: for benchmarks, no safetensors needed.",
    )
    new_tokens: list[str] = Field(
        [],
        description="Tokens to add to the model's: their rows of the embedding and of the output layer start at the mean of the "
        "others, and train, beside an adapter too, or alone (lora.targets=[]). What is saved has them in its tokenizer.json.",
    )
    router_aux_loss_coef: NonNegativeFloat | None = Field(
        None,
        description="Mixtures of experts: weight of the router's load-balancing loss, added to the mean loss; 0 leaves "
        "it out. null takes config.json's own weight if output_router_logits is true there, and 0 if not: as "
        "transformers does, and so most published models train without it.",
    )


class LoRAConfig(Settings):
    """The adapter that is trained in place of the model's own weights."""

    rank: PositiveInt = Field(16, description="Width of the two matrices that train beside each layer.")
    alpha: PositiveFloat = Field(
        32.0, description="What the matrices' product is multiplied by, times the rank (its root with rslora)."
    )
    targets: list[str] = Field(
        ["all-linear"],
        description="Layers that get an adapter: `all-linear` (all of attention and feed-forward), ends of names "
        "(q_proj, lm_head, embed_tokens), or names with wildcards (model.layers.[0-3].*). `[]`: none, and the rows of "
        "model.new_tokens train alone.",
    )
    dropout: Fraction = Field(0.0, description="Share of the adapter's inputs that are dropped in training.")
    rslora: bool = Field(False, description="Scale by alpha / sqrt(rank), which suits high ranks, not alpha / rank.")
    dora: bool = Field(False, description="DoRA: each output's magnitude trains by itself, the product its direction.")
    init: Literal["zero", "pissa"] = Field(
        "zero",
        description="Where the adapter starts: a product of zero, or the weight's largest singular directions, which "
        "are taken off the weight (PiSSA).",
    )
    lr_ratio: PositiveFloat = Field(
        1.0, description="LoRA+: learning rate of the second matrix (B) over optimizer.lr; its authors advise 16."
    )
    dtype: Annotated[Literal["float32", "model"], BeforeValidator(spelled_out)] = Field(
        "float32", description="Type in which the adapter is kept and updated; products take the model's type."
    )
    quantize: Literal["none", "nf4"] = Field(
        "none",
        description="QLoRA: keep the linear layers' frozen weights in 4 bits (NF4, double quantisation), made whole "
        "for each product.",
    )


# What torchao has and lean_ft does not -> why.
_NOT_QUANTIZED_TO = {
    **dict.fromkeys(
        ("nvfp4", "mxfp4", "mxfp8"), "torchao's is a prototype, and its products are for GPUs from Blackwell on"
    ),
    **dict.fromkeys(
        ("float8_dynamic", "float8_dynamic_int4_weight"), "its products are for GPUs from Ada and Hopper on"
    ),
    "int4_packed": "its kernels (mslk) are for GPUs",
}


def _is_not_refused(name: Any) -> Any:
    if name in _NOT_QUANTIZED_TO:
        raise ValueError(f"{name} is not done here: {_NOT_QUANTIZED_TO[name]}, and nothing was tested there.")
    return name


QuantizedKind = Annotated[
    Literal["int8", "int4", "float8", "int8_dynamic_int8_weight", "int8_dynamic_int4_weight"],
    BeforeValidator(_is_not_refused),
]
GroupSize = Annotated[
    PositiveInt,
    Field(description="Weights of 4 bits: neighbouring inputs that share a scale. It has to divide their number."),
]


class QuantizeConfig(Settings):
    """Quantisation that the model is trained for (QAT); `leanft run quantize` then does it."""

    train: Annotated[Literal["int4", "int8_dynamic_int4_weight"], BeforeValidator(_is_not_refused)] | None = Field(
        None,
        description="In training, round the layers' weights to 4 bits, and with int8_dynamic_int4_weight their inputs to 8 bits "
        "a token, as torchao's quantised layers do; checkpoints hold the weights as they are. null rounds nothing.",
    )
    group_size: GroupSize = 32
