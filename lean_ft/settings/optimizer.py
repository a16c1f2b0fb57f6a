"""Settings of the update rule and of the learning rate's schedule."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from lean_ft.settings.base import Fraction, Settings

MUON_MOMENTUM = 0.95  # where optimizer.momentum is null


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


class ScheduleConfig(Settings):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape after the warm-up.")
    warmup_steps: NonNegativeInt = Field(
        0, description="Optimizer steps of linear warm-up from 0, which is the rate of the first."
    )
    warmup_ratio: Fraction = Field(0.0, description="The same as a share of the run's steps; warmup_steps is then 0.")
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="Learning rate at the end, as a share of the peak."
    )

    @model_validator(mode="after")
    def _has_one_warmup(self) -> "ScheduleConfig":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio:g} both say how long the warm-up "
                "is. Set one of them to 0."
            )
        return self
