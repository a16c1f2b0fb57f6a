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
    model_validator,
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
    save_async: bool = Field(
        False,
        description="Copy what a checkpoint holds to host memory and write it while training goes on. The copy takes "
        "the trained weights and the optimizer's state once more until it is written: on a CPU that doubles them. The "
        "last checkpoint is waited for.",
    )
    keep_last: PositiveInt | None = Field(
        None, description="Checkpoints kept, the newest ones; older ones are deleted. null keeps all."
    )
    keep_every: NonNegativeInt = Field(
        0, description="With keep_last: checkpoints of steps that are multiples of this are kept as well; 0: none."
    )
    keep_best: NonNegativeInt = Field(
        0,
        description="With keep_last: checkpoints kept as well, those with the lowest held-out loss. Needs an evaluation "
        "at each checkpoint: save_every a multiple of eval_every.",
    )
    max_bad_steps: NonNegativeInt = Field(
        10,
        description="Steps of a run whose loss or gradients may be not finite: each is skipped and its batch kept in "
        "output_dir/bad_batches. One more stops the run with a report.",
    )
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

    @model_validator(mode="after")
    def _check_retention(self) -> "RecipeConfig":
        if self.keep_last is None and (self.keep_every or self.keep_best):
            name = "keep_every" if self.keep_every else "keep_best"
            raise ValueError(
                f"{name} tells what is kept beyond the last checkpoints, and keep_last=null keeps all of them. "
                f"Set keep_last (1 keeps the newest), or leave {name} out."
            )
        if self.keep_best and self.save_every and (not self.eval_every or self.save_every % self.eval_every):
            raise ValueError(
                f"keep_best={self.keep_best} compares checkpoints by their held-out loss, and with "
                f"save_every={self.save_every} and eval_every={self.eval_every} some would have none. Set save_every to "
                f"a multiple of eval_every."
            )
        return self
