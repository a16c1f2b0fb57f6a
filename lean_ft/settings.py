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

MUON_MOMENTUM = 0.95  # where optimizer.momentum is null


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

    name: Literal[
        "adamw",
        "adamw_8bit",
        "adamw_8bit_torchao",
        "paged_adamw_8bit",
        "adamw_4bit",
        "adafactor",
        "muon",
        "apollo_mini",
        "sgd",
    ] = Field(
        "adamw",
        description="The update rule. `_8bit` and `_4bit` keep both AdamW moments in so many bits, with a scale a block; "
        "`_torchao` by torchao's functions in place of bitsandbytes'. `muon` and `apollo_mini` are for the matrices inside "
        "the layers, with AdamW for the rest. `paged_adamw_8bit` is adamw_8bit with state=paged.",
    )
    state: Literal["device", "paged", "streamed"] = Field(
        "device",
        description="Where the rule's state lives. GPU: `paged` is CUDA's managed memory, which the driver moves to the "
        "host where there is no room (adamw_8bit alone); `streamed` is pinned host memory, from which each parameter's "
        "state travels ahead of its update and back.",
    )
    lr: NonNegativeFloat = Field(2e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.999), description="AdamW: decay of the two moments; also where another rule leaves a part to it."
    )
    eps: PositiveFloat = Field(1e-8, description="AdamW: added to the root of the second moment.")
    momentum: Fraction | None = Field(
        None, description="SGD and Muon: momentum. null is 0 for sgd, which then keeps no state, and 0.95 for muon."
    )
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


class LossConfig(Settings):
    """What the training loss has beside the cross-entropy; held-out losses are plain."""

    label_smoothing: Fraction = Field(
        0.0, description="Share of each target's probability that is spread over the whole vocabulary."
    )
    z_loss: NonNegativeFloat = Field(
        0.0,
        description="Coefficient of the squared logarithm of the softmax's normaliser, added to each token's loss: it "
        "keeps logits from drifting. PaLM took 1e-4.",
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

    activation_checkpointing: Literal["none", "full", "every_n", "selective", "budget"] = Field(
        "none",
        description="Keep only the input of each layer and recompute the rest in backward: for no layer, every layer, "
        "or every n-th. `selective` is `full` that also keeps what selective_keeps names. `budget` lets the compiler "
        "choose within activation_budget; it needs compile=true.",
    )
    selective_keeps: Literal["attention", "products"] = Field(
        "attention",
        description="What `selective` keeps: what attention returned, one hidden state a token and layer, so that it "
        "attends once; or that and every matrix product, so that only norms and activations are recomputed.",
    )
    activation_budget: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5,
        description="Share of a layer's activations that `budget` keeps: 0 recomputes all of them, 1 nothing that "
        "costs time.",
    )
    checkpoint_every_n: PositiveInt = Field(2, description="The n of `every_n`: layers 0, n, 2n ... recompute.")
    loss_chunk_tokens: NonNegativeInt | Literal["auto"] = Field(
        "auto",
        description="Target tokens whose logits exist at a time; 0 computes them all at once. `auto` gives them 1/64 of "
        "the memory that the weights leave on the device, with at least 256 and at most 4096 tokens.",
    )
    activation_offload: bool = Field(
        False, description="GPU: keep what layers save for backward in pinned host memory, and fetch it back ahead."
    )
    tile_mlp: NonNegativeInt = Field(
        0,
        description="Tiles of tokens that each feed-forward layer works through one after the other, so that only one "
        "tile's inner activations exist; 0 takes all tokens at once.",
    )
    tied_gradient: Literal["fused", "host", "separate"] = Field(
        "fused",
        description="Where the output layer is the embedding: `fused` adds the embedding's rows to the output layer's "
        "gradient, `separate` makes a gradient each and adds them. `host` is `fused`, and on a GPU the output layer's "
        "waits in pinned host memory while the layers go backward.",
    )
    float8_products: bool = Field(
        False,
        description="GPU with float8: the layers' linear projections multiply in 8 bits, faster and less exactly; best "
        "with compile=true.",
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
