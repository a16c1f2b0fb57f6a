"""Settings of sampled completions: generation during training, rewards, and recipes that run a model."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from lean_ft.settings.base import Device, FunctionName, Name, OwnFunction, PositiveShare, RegularExpression, Settings
from lean_ft.settings.model import ModelConfig
from lean_ft.system.user_functions import check_function

if TYPE_CHECKING:
    import torch

# Settings that restrict the tokens to sample from.
TopK = Annotated[PositiveInt | None, Field(description="Sample from this many likeliest tokens only.")]
TopP = Annotated[
    PositiveShare | None, Field(description="Sample from the fewest tokens whose probabilities add up to this share.")
]
MinP = Annotated[
    PositiveShare | None,
    Field(description="Sample from tokens with at least this share of the likeliest token's probability."),
]


class GenerationConfig(Settings):
    """How completions are sampled during training."""

    num_answers: PositiveInt = 8
    """Completions per prompt; rewards are compared within this group."""
    max_new_tokens: PositiveInt = 256
    """Maximum length of a completion in tokens."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of the log-probabilities that are trained."""
    eval_temperature: NonNegativeFloat | None = None
    """Temperature for held-out prompts. 0 is greedy. null uses `temperature`."""
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    stop: list[str] = Field([])
    """Strings that end a completion, in addition to the model's end tokens."""
    steps_per_round: PositiveInt = 1
    """Optimizer steps per round of sampling. A round has batch_size x gradient_accumulation_steps x steps_per_round
    completions."""
    passes: PositiveInt = 1
    """Number of passes over the completions of a round."""
    most_attempts: PositiveInt = 1
    """Dynamic sampling: with 2 or more, prompts whose completions all have the same reward are replaced by new ones, in
    at most this many attempts per round. 1 keeps them."""
    cache_gib: PositiveFloat | None = None
    """Maximum memory of the KV cache while sampling, in GiB. Prompts that do not fit take the places of completions
    that have ended. null is a quarter of the memory that the weights leave free."""

    compile: bool = False
    """Compile the layers for decoding, and on a GPU the choice of the token; takes some seconds once. For one process.
    Layers with a recurrent state, mixtures of experts and latent attention are not compiled."""
    offload_training_state: bool = False
    """Keep the optimizer state in host memory while sampling, which frees GPU memory for the KV cache. Costs two copies
    per round."""
    gather: Literal["layer", "whole"] = "layer"
    """With a sharded model: gather the weights one `layer` at a time for every token, or the `whole` model once per
    round, which is faster and must fit in memory."""

    max_given_tokens: PositiveInt = 1024
    """With `tools` or `environment`: maximum number of tokens that a completion is given, such as results of calls. A
    completion whose next result does not fit ends and counts as cut."""
    turn_discount: PositiveShare = 1.0
    """With an environment that returns a reward for each turn: the factor from one turn's reward to the next. A
    completion's reward is their sum."""
    router_replay: bool = False
    """Mixture of experts: record the experts that every token chooses while sampling, and use them in training too,
    with weights from the present router. Rounding then changes no expert between sampling and training (R3, Ma et al.
    2025)."""
    engine: Literal["own", "vllm"] = "own"
    """What samples the completions: the model that trains (`own`), or a vLLM server beside it (see docs/online.md)."""
    engine_url: Name = "http://127.0.0.1:8000"
    """URL of the server, for engine=vllm. The environment variable VLLM_API_KEY is its API key, if it needs one."""
    engine_weights: Literal["auto", "merged", "adapter", "nccl"] = "auto"
    """How the server gets new weights: `adapter` sends the adapter alone, `merged` whole tensors, `nccl` broadcasts
    them between GPUs. auto is the adapter if the run has one that the server loads, else merged."""
    engine_seconds: PositiveFloat = 300.0
    """How long the run waits for a server that does not answer, at the start or because it is restarted, in seconds."""
    ahead: int = Field(0, ge=0, le=1)
    """1: the server samples the next round while this one trains, with the weights from before this round's updates.
    Tools then need tools.process=true, and checkpoints wait for the round that is sampled."""

    @property
    def drawn(self) -> dict[str, Any]:
        """Arguments of `Sampling` for the length of completions and the tokens to sample from."""
        return self.model_dump(include={"max_new_tokens", "top_k", "top_p", "min_p"})

    @property
    def narrows(self) -> bool:
        """Whether some tokens are never sampled, so that the sampling probabilities differ from the model's."""
        return self.top_k is not None or (self.top_p or 1.0) < 1 or self.min_p is not None


class Reward(Settings):
    """One of several rewards: a function or a model."""

    function: FunctionName | None = None
    """Your own function, `my_rewards.py:name`, or a built-in one: `exact_answer`, `math_answer`, `format`, `length`,
    `environment`."""
    model: Name | None = None
    """Instead of a function, a reward model: a run of `reward`, its checkpoint, another folder, or org/name."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    pattern: RegularExpression | None = None
    """Regular expression: what `format` looks for, and the part of a text that `exact_answer` compares."""

    @property
    def name(self) -> str:
        return self.function or self.model or ""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "Reward":
        if (self.function is None) == (self.model is None):
            raise ValueError(f"expected a function or a model, found {'neither' if self.model is None else 'both'}.")
        if self.model is not None and self.pattern is not None:
            raise ValueError("pattern is only used by functions, and this reward is a model. Remove pattern.")
        return self


class ToolsConfig(Settings):
    """Tools that the model may call while it samples a completion. `tools=my_tools.py:search` sets `functions`."""

    model_config = ConfigDict(json_schema_extra={"list_of": "functions"})

    functions: list[Annotated[Literal["calculator"] | OwnFunction, AfterValidator(check_function)]] = Field([])
    """Python functions with type hints and a docstring that describes each parameter: `my_tools.py:search`.
    `calculator` is built in."""
    process: bool = False
    """Run each call in a new process, which is killed after `seconds`. Python then starts once per call."""
    seconds: PositiveFloat = 30.0
    """Maximum time of a call. A call that takes longer gets an error message as its result."""
    result_characters: PositiveInt = 8192
    """Maximum length of a result. A longer one is cut, with a note."""
    calls: PositiveInt = 8
    """Maximum number of turns with calls in a completion."""
    parallel: PositiveInt = 8
    """Maximum number of calls in one turn. Further ones get an error message as their result."""

    @model_validator(mode="before")
    @classmethod
    def _from_functions(cls, value: object) -> object:
        return {"functions": value} if isinstance(value, list) else value


class SamplingConfig(Settings):
    """How the student samples completions in the steps of distill.on_policy."""

    max_new_tokens: PositiveInt = 256
    """Maximum length of a completion in tokens. Prompt and completion together have at most data.max_length tokens."""
    temperature: NonNegativeFloat = 1.0
    """Temperature of sampling. 0 is greedy."""


class AskedModelConfig(ModelConfig):
    """The model to run."""

    path: Name = "auto"
    """A run (its newest complete checkpoint), a checkpoint, an adapter, a Hugging Face model folder, a Hub repository
    (`org/name` or `org/name@revision`), or `tiny`, the embedded model. `auto` is the base model of `adapter`."""

    images: Literal["auto", "none", "frozen"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the vision tower is loaded, so that prompts may have images. `auto`: if the model has one that lean_ft
    knows, and a file of its image processor. `none` saves its memory."""

    @model_validator(mode="after")
    def _does_not_train(self) -> "AskedModelConfig":
        for name in ("new_tokens", "router_aux_loss_coef", "mtp", "mtp_trunk", "mtp_weight"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for training. Remove it; a trained model's folder has its tokens.")
        return self

    def for_texts(self) -> "AskedModelConfig":
        """The settings for prompts of text alone."""
        return self.model_copy(update={"images": "none"})


class AskedModel(TypedDict, total=False):
    """Settings of `AskedModelConfig` as keyword arguments."""

    dtype: "str | torch.dtype"
    random_init: bool
    images: Literal["auto", "none", "frozen"]
    family: str | None


class AskConfig(Settings):
    """The model to run, and how it samples."""

    model: AskedModelConfig = AskedModelConfig.model_validate({})
    adapter: Name | list[Name] = Field([])
    """Folder of an adapter in PEFT's format, or a run that trained one. The adapters of a list are added up."""
    max_new_tokens: PositiveInt = 256
    """Maximum length of the answer in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of sampling. 0 is greedy."""
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    stop: list[str] = Field([])
    """Strings that end an answer. They are not part of it."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables of the chat template. They replace those of the model's run."""
    seed: NonNegativeInt = 0
    """Seed of the sampling."""
    device: Device = "auto"

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `Sampling`."""
        names = {"max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed", "chat_template_kwargs"}
        return self.model_dump(include=names)
