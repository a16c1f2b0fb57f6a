"""Settings of answers: those that a model gives while it learns, what judges them, and those of a model that is asked."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lean_ft.settings.base import Device, PositiveShare, RegularExpression, Settings
from lean_ft.settings.model import ModelConfig

# Which tokens are drawn among.
TopK = Annotated[PositiveInt | None, Field(description="Draw among this many likeliest tokens.")]
TopP = Annotated[
    PositiveShare | None, Field(description="Draw among the fewest tokens whose probabilities reach this share.")
]
MinP = Annotated[
    PositiveShare | None,
    Field(description="Draw among the tokens at least so likely as this share of the likeliest's probability."),
]


class GenerationConfig(Settings):
    """How a model in training answers prompts, and how the answers are learned from."""

    num_answers: PositiveInt = Field(8, description="Answers to each prompt, the group that they are compared in.")
    max_new_tokens: PositiveInt = Field(256, description="Tokens after which an answer is cut, if it has not ended.")
    temperature: PositiveFloat = Field(
        1.0, description="What logits are divided by, in sampling and in the log-probabilities that are learned from."
    )
    eval_temperature: NonNegativeFloat | None = Field(
        None,
        description="The same for answers to held-out prompts; 0 takes the likeliest tokens, null is as in training.",
    )
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    stop: list[str] = Field([], description="Texts that end an answer, beside the model's own end tokens.")
    steps_per_round: PositiveInt = Field(
        1,
        description="Optimizer steps that the answers of one round of sampling are shared out to. A round has batch_size x "
        "gradient_accumulation_steps x steps_per_round answers.",
    )
    passes: PositiveInt = Field(1, description="How often a round's answers are gone through.")
    most_attempts: PositiveInt = Field(
        1,
        description="Dynamic sampling: from 2 on, prompts whose answers all have the same reward give way to new ones, in at "
        "most so many samplings a round. 1 keeps them; they teach nothing and count in the means.",
    )
    cache_gib: PositiveFloat | None = Field(
        None,
        description="Most memory, in GiB, that keys and values take while it samples; what does not fit is sampled after the "
        "rest. null is a quarter of what the weights leave on the device.",
    )

    compile: bool = Field(
        False,
        description="Compile the layers for a token that follows a text; takes seconds once. On one process; layers that keep a "
        "state, mixtures and latent attention stay as they are written.",
    )
    offload_training_state: bool = Field(
        False,
        description="Keep the optimizer's state in the host's memory while it samples, and so more of the GPU's for keys and "
        "values: two copies a round.",
    )
    gather: Literal["layer", "whole"] = Field(
        "layer",
        description="Of a model that is cut over processes: gather the weights of a `layer` at a time, for every token, or "
        "the `whole` model once for a round, which is faster and has to fit.",
    )

    engine: Literal["own", "vllm"] = Field(
        "own",
        description="Who samples: the model that is trained, or a server of vLLM's beside it, see docs/online.md.",
    )
    engine_url: str = Field("http://127.0.0.1:8000", description="engine=vllm: where the server is.")

    @property
    def drawn(self) -> dict[str, Any]:
        """How long answers may be and which tokens can be in them, as `Sampling` is told."""
        return self.model_dump(include={"max_new_tokens", "top_k", "top_p", "min_p"})

    @property
    def narrows(self) -> bool:
        """Whether some tokens are never drawn, so that the sampler's probabilities are not the model's."""
        return self.top_k is not None or (self.top_p or 1.0) < 1 or self.min_p is not None


class Reward(Settings):
    """One of several rewards: a function or a model."""

    function: str | None = Field(
        None,
        description="A function of your own, `my_rewards.py:name`, or one that is there: `exact_answer`, `format`, `length`.",
    )
    model: str | None = Field(
        None,
        description="In place of it a reward model: a run of `reward`, its checkpoint, another folder of one, or org/name.",
    )
    weight: float = Field(1.0, description="What it counts in the sum.")
    pattern: RegularExpression | None = Field(
        None, description="A regular expression: what `format` looks for, and what of a text `exact_answer` compares."
    )

    @property
    def name(self) -> str:
        return self.function or self.model or ""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "Reward":
        if (self.function is None) == (self.model is None):
            raise ValueError(f"expected a function or a model, came {'neither' if self.model is None else 'both'}.")
        if self.model is not None and self.pattern is not None:
            raise ValueError("a pattern is for functions that are there, and this reward is a model. Leave it out.")
        return self


class SamplingConfig(Settings):
    """How the student answers, in the steps that distill.on_policy asks for."""

    max_new_tokens: PositiveInt = Field(
        256,
        description="Tokens after which an answer is cut, if it has not ended; with its prompt it has data.max_length.",
    )
    temperature: NonNegativeFloat = Field(
        1.0, description="What logits are divided by before a token is drawn; 0 takes the likeliest."
    )


class AskedModelConfig(ModelConfig):
    """The model that is asked."""

    path: str = Field(
        "auto",
        description="A run (its newest whole checkpoint), a checkpoint, an adapter, a Hugging Face model folder, a "
        "repository of the hub (`org/name`, or `org/name@revision`), or the embedded model: `tiny`. `auto` is the model "
        "that `adapter` is of.",
    )


class AskConfig(Settings):
    """Which model is asked, and how it answers."""

    model: AskedModelConfig = AskedModelConfig.model_validate({})
    adapter: str | list[str] = Field(
        [],
        description="Folder of an adapter in PEFT's format, or a run that trained one; or a list of them that add up.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Tokens after which to stop, if the text has not ended.")
    temperature: NonNegativeFloat = Field(0.0, description="0 takes the likeliest token; above it, tokens are drawn.")
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    stop: list[str] = Field([], description="Texts that end an answer, and are left out of it.")
    seed: NonNegativeInt = Field(0, description="Seeds the drawing.")
    device: Device = "auto"

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen and what ends an answer."""
        return self.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed"})
