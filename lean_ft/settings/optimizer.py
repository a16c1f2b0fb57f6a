"""Settings of the optimizer and the learning rate schedule."""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from lean_ft.settings.base import Fraction, OwnFactory, OwnFunction, Settings
from lean_ft.system.user_functions import (
    check_factory,
    check_function,
    content_digest,
    is_function_path,
    load_code,
    load_function,
)

BITSANDBYTES_RULES = ("adamw_8bit", "paged_adamw_8bit")
CLIPPING_RULES = ("adamw", *BITSANDBYTES_RULES, "adamw_4bit")  # rules that keep AdamW's second moment for every tensor
MATRIX_RULES = ("muon", "apollo_mini")
ADAMW_RULES = (*CLIPPING_RULES, "adamw_8bit_torchao", *MATRIX_RULES)  # rules that use betas and eps
MUON_MOMENTUM = 0.95  # if optimizer.momentum is null


class UsualRates(NamedTuple):
    """An objective's default learning rates, which replace optimizer.lr=null.

    They are for language models of 0.5 billion parameters or more, for every update rule but SGD, and for adapters of
    rank 8 to 64 on all linear layers.

    An adapter takes 10 times the rate of all parameters, and its best rate hardly depends on the rank: "LoRA Without
    Regret", Schulman et al. 2025, thinkingmachines.ai/blog/lora. For supervised fine-tuning, 2e-4 is the rate of LoRA
    for GPT-2 and GPT-3 (2106.09685, appendix D), QLoRA for 7B and 13B at rank 64 (2305.14314), axolotl's examples at
    rank 32 and Unsloth's guide; torchtune has 3e-4 at rank 8 and 64. For preferences, TRL's scripts and the handbook
    of Zephyr have 5e-7 for all parameters and 5e-6 for an adapter. TRL's guide to GRPO has 1e-6 and 1e-5.
    """

    all_parameters: float
    adapter: float

    def __str__(self) -> str:
        return f"{self.all_parameters:g}, or {self.adapter:g} for an adapter"


class OptimizerConfig(Settings):
    """The optimizer and where its state is stored."""

    name: Annotated[
        Literal[
            "adamw",
            "adamw_8bit",
            "adamw_8bit_torchao",
            "paged_adamw_8bit",
            "adamw_4bit",
            "adafactor",
            "muon",
            "apollo_mini",
            "sgd",
        ]
        | OwnFactory,
        AfterValidator(check_factory),
    ] = "adamw"
    """Update rule. `_8bit` and `_4bit` store both AdamW moments in that many bits with one scale per block; `_torchao`
    uses torchao's functions instead of bitsandbytes'. `muon` and `apollo_mini` update the matrices inside the layers,
    and AdamW the rest. `paged_adamw_8bit` is adamw_8bit with state=paged. Your own rule `my_opt.py:Lion` is a subclass
    of lean_ft.optim.Rule, called with the settings that its parameters name."""
    state: Literal["device", "paged", "streamed"] = "device"
    """GPU: where the optimizer state is stored. `device`: GPU memory. `paged`: CUDA managed memory, which the driver
    moves to the host if the GPU is full (adamw_8bit only). `streamed`: pinned host memory, copied to the GPU and back
    around each parameter's update."""
    lr: NonNegativeFloat | None = None
    """Peak learning rate. null takes the usual rate of the recipe, which is higher for an adapter."""
    lr_ratios: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Factors of the learning rate by parameters, named as in `freeze`: {embed_tokens: 0.1, lora_B: 16}, or {vision:
    0.1} for a vision tower. A parameter that several names match gets the product, also with lora.lr_ratio and
    value.lr_ratio."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW: decay rates of the two moments. Rules that leave some parameters to AdamW use them too."""
    eps: PositiveFloat = 1e-8
    """AdamW: constant added to the root of the second moment."""
    momentum: Fraction | None = None
    """SGD and Muon: momentum. null is 0 for sgd, which then has no state, and 0.95 for muon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices. Vectors (norms, biases) are not decayed."""
    in_backward: bool = False
    """Update each parameter in the backward pass as soon as its gradient is complete, then free the gradient."""
    update_clipping: bool = False
    """AdamW: divide a tensor's learning rate by the RMS of its update if that exceeds 1 (StableAdamW). It needs no
    global norm, so it works with in_backward."""
    stochastic_rounding: bool = False
    """Round updates of bfloat16 weights up or down at random, so that small updates are not lost."""

    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Also average the trained weights: after each step, average = ema * average + (1 - ema) * weight, in float32, 4
    bytes per parameter. Checkpoints have the averaged model too, in the folder `ema`. 0.999 looks back on about 1,000
    steps. null: no average."""

    @property
    def peak_lr(self) -> float:
        """`lr` as a number. The settings of a recipe replace null by their usual rate."""
        if self.lr is None:
            raise ValueError(
                "optimizer.lr is null, which only the settings of a recipe (RecipeConfig) replace by a number. Set it."
            )
        return self.lr

    @cached_property
    def rule(self) -> Callable[..., object]:
        """The user's class or function that `name` names, also in a plan. It stays the same for the whole run, also if
        its file is edited."""
        return load_code(self.name)

    @cached_property
    def content(self) -> str | None:
        """A hash of the source of the user's rule; None for other rules. It stays the same for the whole run."""
        return content_digest(self.name) if is_function_path(self.name) else None

    def for_adapter(self) -> dict[str, object]:
        return {"stochastic_rounding": False} if self.stochastic_rounding else {}  # an adapter is float32


class ScheduleConfig(Settings):
    """The learning rate schedule."""

    name: Annotated[Literal["constant", "linear", "cosine", "wsd"] | OwnFunction, AfterValidator(check_function)] = (
        "cosine"
    )
    """Shape of the schedule after the warm-up. `wsd` (warm-up, stable, decay) is constant and falls at the end. Your
    own function `my_schedule.py:fn`, called as fn(step, total_steps) with steps from 0, returns the factor of
    optimizer.lr, warm-up included."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up. The first step has learning rate 0."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a fraction of the run's steps, instead of warmup_steps."""
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Final learning rate as a fraction of the peak."""
    decay: NonNegativeInt | Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Length of the decay of `wsd` at the end, in optimizer steps or as a fraction of the run's (0.2)."""
    decay_shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    """Shape of the decay of `wsd`."""

    @cached_property
    def function(self) -> Callable[[int, int], Any]:
        """The user's function that `name` names. It stays the same for the whole run, also if its file is edited."""
        return load_function(self.name)

    def without_contents(self) -> "ScheduleConfig":
        return self.model_copy(update={"name": "constant"}) if is_function_path(self.name) else self

    @model_validator(mode="after")
    def _uses_what_is_set(self) -> "ScheduleConfig":
        unused = () if self.name == "wsd" else ("decay", "decay_shape")
        unused += ("warmup_steps", "warmup_ratio", "min_lr_ratio") if is_function_path(self.name) else ()
        for name in unused:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value} has no effect with schedule.name={self.name}. Remove {name}.")
        return self

    @model_validator(mode="after")
    def _has_one_warmup(self) -> "ScheduleConfig":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio:g} both set the length of the "
                "warm-up. Set one of them to 0."
            )
        return self
