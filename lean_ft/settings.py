"""Every setting a recipe takes: its name, default, unit and meaning, stated here and nowhere else.

A recipe's `Config` subclasses `RecipeConfig` and lists the groups below that it uses. `lean_ft.config` turns
YAML and `key=value` overrides into one of these; `leanft cat RECIPE` prints them all.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Settings(BaseModel):
    """A group of settings: unknown keys are errors, values are checked and never silently converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Settings):
    """The model that is trained."""

    path: str = Field(
        description="A Hugging Face model folder, a repository of the hub (`org/name`, or `org/name@revision`), or the "
        "embedded model: `tiny`. A run records the commit, and goes on with it."
    )
    dtype: Literal["bfloat16", "float32", "float16"] = Field(
        "bfloat16",
        description="Type of the weights and the arithmetic. `float16` keeps float32 master weights, computes "
        "in float16 and scales the loss.",
    )
    random_init: bool = Field(
        False,
        description="Build from config.json alone, with random weights: for benchmarks, no safetensors needed.",
    )
    router_aux_loss_coef: NonNegativeFloat | None = Field(
        None,
        description="Mixtures of experts: weight of the router's load-balancing loss, added to the mean loss; 0 leaves "
        "it out. null takes config.json's own weight if output_router_logits is true there, and 0 if not: as "
        "transformers does, and so most published models train without it.",
    )


class SFTDataConfig(Settings):
    """What is trained on, and how it becomes batches."""

    source: str | list[str] = Field(description="A JSONL or JSON file, or a list of them.")
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "text"] = Field(
        "auto", description="How a row is read. `auto` decides from the fields of the first rows."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Field names, ours to yours: `columns.prompt=question`."
    )
    train_on: Literal["completion", "assistant", "last", "all"] = Field(
        "assistant",
        description="Which tokens carry a label: every assistant turn (`assistant`; `completion` is its name for "
        "prompt/completion rows), only the last assistant turn, or all tokens.",
    )
    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="Longest sequence, in tokens.")
    overflow: Literal["truncate", "drop", "raise"] = Field(
        "truncate", description="What happens to a row longer than max_length."
    )
    packing: Literal["none", "bfd"] = Field(
        "none",
        description="`bfd` fills rows of max_length with whole documents (best-fit decreasing) that cannot see "
        "each other; `none` pads each batch to its longest row.",
    )
    validation_source: str | list[str] | None = Field(None, description="Held-out file or files for evaluation.")
    validation_fraction: Fraction = Field(
        0.0,
        description="Share of the source's rows held out for evaluation when there is no validation_source.",
    )


class OptimizerConfig(Settings):
    """The update rule and how its state is kept."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"] = Field(
        "adamw", description="The update rule. `_8bit` keeps both AdamW moments in 8 bits, in blocks of 256."
    )
    lr: NonNegativeFloat = Field(2e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="AdamW: decay of the two moments.")
    eps: PositiveFloat = Field(1e-8, description="AdamW: added to the root of the second moment.")
    momentum: Fraction = Field(0.0, description="SGD: momentum; 0 keeps no state.")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Decoupled weight decay, for matrices; vectors (norms, biases) are never decayed."
    )
    in_backward: bool = Field(
        False,
        description="Update each parameter as soon as its gradient is complete and free the gradient at once.",
    )
    update_clipping: bool = Field(
        False,
        description="AdamW: divide a tensor's learning rate by its update's RMS where that exceeds 1 (StableAdamW); "
        "needs no global norm, so it works in backward.",
    )
    stochastic_rounding: bool = Field(
        False,
        description="bfloat16 weights: round the update up or down at random, so small updates are not lost.",
    )


class LoRAConfig(Settings):
    """The adapter that is trained in place of the model's own weights."""

    rank: PositiveInt = Field(16, description="Width of the two matrices that train beside each layer.")
    alpha: PositiveFloat = Field(
        32.0, description="What the matrices' product is multiplied by, times the rank (its root with rslora)."
    )
    targets: list[str] = Field(
        ["all-linear"],
        min_length=1,
        description="Layers that get an adapter: `all-linear` (all of attention and feed-forward), ends of names "
        "(q_proj, lm_head, embed_tokens), or names with wildcards (model.layers.[0-3].*).",
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
    dtype: Literal["float32", "model"] = Field(
        "float32", description="Type in which the adapter is kept and updated; products take the model's type."
    )
    quantize: Literal["none", "nf4"] = Field(
        "none",
        description="QLoRA: keep the linear layers' frozen weights in 4 bits (NF4, double quantisation), made whole "
        "for each product.",
    )


class ScheduleConfig(Settings):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape after the warm-up.")
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps of linear warm-up from 0.")
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="Learning rate at the end, as a share of the peak."
    )


class MemoryConfig(Settings):
    """Every trade of memory against time."""

    activation_checkpointing: Literal["none", "full", "every_n", "selective"] = Field(
        "none",
        description="Keep only the input of each layer and recompute the rest in backward: for no layer, every layer, "
        "or every n-th. `selective` is `full` that also keeps what attention returned, and so attends once.",
    )
    checkpoint_every_n: PositiveInt = Field(2, description="The n of `every_n`: layers 0, n, 2n ... recompute.")
    loss_chunk_tokens: NonNegativeInt = Field(
        1024, description="Target tokens whose logits exist at a time; 0 computes them all at once."
    )
    loss_accumulation_dtype: Literal["float32", "weight"] = Field(
        "float32",
        description="Type that sums the output weight's gradient over chunks: `float32`, or the weight's own type, "
        "which takes half the memory and rounds once a chunk.",
    )


class RecipeConfig(Settings):
    """The settings that every training recipe has."""

    batch_size: PositiveInt = Field(2, description="Sequences (packed rows, when packing) a forward pass.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Forward passes an optimizer step.")
    clip_grad_norm: PositiveFloat | None = Field(
        None, description="Largest global norm of the gradients; null does not clip."
    )
    epochs: PositiveInt = Field(1, description="Passes over the data.")
    max_steps: PositiveInt | None = Field(
        None, description="Optimizer steps after which to stop, if before the epochs end."
    )
    compile: bool = Field(False, description="torch.compile each layer, the loss and the optimizer's update.")
    eval_every: NonNegativeInt = Field(
        0, description="Optimizer steps between evaluations; 0 evaluates only at the end."
    )
    save_every: NonNegativeInt = Field(0, description="Optimizer steps between checkpoints; 0 saves only at the end.")
    log_every: PositiveInt = Field(
        1, description="Optimizer steps between writes to metrics.jsonl and the progress bar."
    )
    seed: NonNegativeInt = Field(0, description="Seeds data order, dropout and stochastic rounding.")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field("auto", description="`auto` takes cuda, then mps, then cpu.")
    output_dir: Path = Field(description="The run directory: config, metrics and checkpoints.")
    resume: str = Field(
        "auto",
        description="`auto` goes on from the newest whole checkpoint in output_dir, `never` refuses a directory that "
        "holds a run, a path names a checkpoint.",
    )
