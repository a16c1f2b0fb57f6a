"""Every setting a recipe takes: its name, default, unit and meaning, stated here and nowhere else.

A recipe's `Config` subclasses `RecipeConfig` and lists the groups below that it uses. `lean_ft.settings_text` turns
YAML and `key=value` overrides into one of these; `leanft cat RECIPE` prints them all.
"""

import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
# Optimizer steps, or what they are of an epoch.
Every = NonNegativeInt | Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["epoch"]

FormatName = Literal[
    "auto",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "input_output",
    "text",
    "tokens",
    "preference",
    "unpaired",
]

MUON_MOMENTUM = 0.95  # where optimizer.momentum is null


def _is_regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}.") from None
    return pattern


class Settings(BaseModel):
    """A group of settings: unknown keys are errors, values are checked and never silently converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


GroupT = TypeVar("GroupT", bound=Settings)


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


class Source(Settings):
    """One of several sources of rows."""

    path: str = Field(description="A file, a glob, or a Hugging Face dataset.")
    format: FormatName | None = Field(default=None, description="As data.format, for this source alone.")
    columns: dict[str, str] | None = Field(default=None, description="As data.columns, for this source alone.")
    weight: PositiveFloat = Field(
        default=1.0,
        description="How often an epoch shows each row of this source: 2 shows all twice, 0.5 a half of them, drawn by "
        "the seed and the same in every epoch.",
    )
    subset: str | None = Field(default=None, description="As data.subset, for this source alone.")
    split: str | None = Field(default=None, description="As data.split, for this source alone.")


Sources = str | list[str | Source]


class RowsConfig(Settings):
    """Where rows come from and how they are read."""

    source: Sources = Field(
        description="A JSONL, JSON, CSV, TSV, TXT or Parquet file (text ones may be gzip or zstd), a glob of them, or a "
        "Hugging Face dataset (org/name, or a folder that save_to_disk wrote); or a list of these, each a path or "
        "{path, format, columns, weight, subset, split}."
    )
    format: FormatName = Field(
        "auto", description="How a row is read. `auto` decides from the fields of the first rows of a source."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Field names, ours to yours: `columns.prompt=question`."
    )
    subset: str | None = Field(
        None, description="The subset (configuration) of a Hugging Face dataset that has several."
    )
    split: str = Field("train", description="The split of a Hugging Face dataset.")
    streaming: bool = Field(False, description="Read a Hugging Face dataset as it arrives, without storing it first.")
    on_bad_row: Literal["raise", "skip"] = Field(
        "raise",
        description="What a row that cannot be read does: stop with its file, line, field and reason, or be left out and "
        "counted.",
    )
    max_bad_rows: NonNegativeInt = Field(
        100, description="Bad rows that `on_bad_row=skip` leaves out before it stops after all."
    )
    validation_source: Sources | None = Field(
        None, description="Held-out rows for evaluation; what `source` takes, without weights."
    )
    validation_fraction: Fraction = Field(
        0.0,
        description="Share of the source's rows held out for evaluation when there is no validation_source.",
    )
    chat_template: Path | None = Field(
        None, description="A file of a Jinja chat template, in place of the model's; it is saved with the checkpoints."
    )
    system: str | None = Field(
        None, description="A system message put in front of every chat that does not begin with one."
    )
    separator: str | None = Field(
        None,
        description="What stands between a prompt and its completion where a model without a chat template reads them as "
        "one text; in a shell 'data.separator=\"\\n\"' is a line break. null: nothing, and an empty line in alpaca.",
    )

    @field_validator("validation_source")
    @classmethod
    def _has_no_weights(cls, sources: Sources | None) -> Sources | None:
        if not isinstance(sources, str | None) and any(isinstance(s, Source) and s.weight != 1 for s in sources):
            raise ValueError("a weight says how often a row is trained on; held-out rows are each seen once.")
        return sources


class PromptDataConfig(RowsConfig):
    """Prompts that the model answers itself, with what its answers are judged by."""

    max_prompt_length: PositiveInt = Field(
        512, description="Tokens that a prompt may have; rows with longer ones are left out and counted."
    )
    chat: Literal["auto"] | bool = Field(
        "auto",
        description="Whether a prompt that is a text is a user's message, written with the chat template; `auto`: where there "
        "is one.",
    )


class DataConfig(RowsConfig):
    """What every objective's data has: where rows come from, how long they may be, and how they become batches.

    A recipe's `data` is of a subclass, and that tells `lean_ft.data` how a row is rendered: SFTDataConfig,
    PreferenceDataConfig, or a recipe's own subclass of one of them.
    """

    sides: ClassVar[tuple[str, ...]] = ("",)
    """The sequences that a row of data becomes, by their names; they stay together in one batch."""
    tells: ClassVar[Literal["", "label", "margin"]] = ""
    """What a row tells of them beside their text."""

    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="Longest sequence, in tokens.")
    overflow: Literal["truncate", "drop", "raise"] = Field(
        "truncate", description="What happens to a row longer than max_length."
    )
    truncation_side: Literal["right", "left"] = Field(
        "right", description="Where `overflow=truncate` cuts: `right` keeps the beginning, `left` the end."
    )
    packing: Literal["none", "bfd", "bfd_split", "wrapped", "padding_free"] = Field(
        "none",
        description="`none` pads each batch to its longest row. `bfd` fills rows of max_length with whole documents "
        "(best-fit decreasing) that cannot see each other; `bfd_split` does so after cutting longer documents, and loses "
        "nothing. `wrapped` lays all documents end to end and cuts every max_length tokens: those in one row see each "
        "other. `padding_free` makes a batch of whole documents, however long, one row without padding.",
    )
    batch_tokens: PositiveInt | None = Field(
        None,
        description="Most positions of a batch, padding included, for packing=none: batches hold as many rows of about "
        "one length as fit, in place of batch_size.",
    )
    num_processes: PositiveInt | None = Field(
        None, description="Processes that tokenise many rows; null starts one for every core that this one may use."
    )
    cache_dir: Path | None = Field(
        None,
        description="Where prepared data is kept for the next start; null is the environment's LEAN_FT_CACHE, or "
        "lean_ft/data in the user's cache (~/.cache). It can be deleted at any time.",
    )
    cache_gib: PositiveFloat = Field(
        50.0, description="Size, in GiB, above which the data that was not used for longest is deleted from cache_dir."
    )

    @property
    def packs_rows(self) -> bool:
        """Whether rows of one length are filled with documents."""
        return self.packing not in ("none", "padding_free")

    @property
    def longest(self) -> int | None:
        """Tokens that one sequence may have; None where packing takes any length."""
        return self.max_length if self.packing in ("none", "bfd") else None

    @model_validator(mode="after")
    def _check_packing(self) -> "DataConfig":
        if self.longest is None and self.overflow != "truncate":
            raise ValueError(
                f"overflow={self.overflow} cannot be with packing={self.packing}, to which no row is too long. Leave it "
                "out, or set packing=bfd or packing=none."
            )
        if self.batch_tokens is not None and self.packing != "none":
            raise ValueError(
                f"batch_tokens={self.batch_tokens} cannot be with packing={self.packing}: it is for rows that are not "
                "packed. Set packing=none, or leave it out and set batch_size."
            )
        if self.batch_tokens is not None and self.batch_tokens < self.max_length * len(self.sides):
            times = f" for each of {len(self.sides)} answers" if len(self.sides) > 1 else ""
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is less than max_length={self.max_length}{times}, so the longest row would "
                "fit into no batch. Raise the one or lower the other."
            )
        return self


class SFTDataConfig(DataConfig):
    """Single answers to learn from."""

    train_on: Literal["completion", "assistant", "last", "all"] = Field(
        "assistant",
        description="Which tokens of a chat carry a label: every assistant message (`assistant`), only those behind the "
        "prompt of a prompt/completion row (`completion`; in other rows the same as `assistant`), only the last one "
        "(`last`), or all tokens. Each includes the token that ends its turn. A message with `train: false` or "
        "`weight: 0` never does. Rows of `text` are trained whole; `tokens` follow their labels.",
    )


class AnswerDataConfig(DataConfig):
    """Answers to learn from as a whole, each behind its prompt."""

    max_prompt_length: PositiveInt | None = Field(
        None, description="Tokens of a prompt, of which the last ones are kept; null keeps all."
    )
    max_completion_length: PositiveInt | None = Field(
        None, description="Tokens of a chosen or rejected answer, of which the first ones are kept; null keeps all."
    )
    truncation_side: Literal["right", "left"] = Field(
        "right",
        description="What `overflow=truncate` cuts of prompt and answer together, after the two limits above: the end of "
        "the longer answer (`right`), or the beginning of the prompt (`left`), which both answers share.",
    )

    @property
    def longest(self) -> int | None:
        return self.max_length

    @model_validator(mode="after")
    def _keeps_answers_whole(self) -> "AnswerDataConfig":
        if self.packing in ("bfd_split", "wrapped"):
            raise ValueError(
                f"packing={self.packing} cuts sequences, and the answers of a pair are compared whole. Set packing=bfd, "
                "packing=padding_free or packing=none."
            )
        return self


class PreferenceDataConfig(AnswerDataConfig):
    """Pairs of a chosen and a rejected answer to learn from."""

    sides: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    shared_prompt: Literal["auto"] | bool = Field(
        "auto",
        description="Compute the prompt of a pair once for both answers, which stand behind it in one row and do not see each "
        "other: P + C + R positions in place of 2P + C + R, and the same numbers to rounding. `auto` does where the model "
        "allows it: all do but those whose rotary scaling changes with the length of the text within max_length.",
    )


class UnpairedDataConfig(AnswerDataConfig):
    """Single answers, each with a label that says whether it is desirable; of a pair both answers, each by itself."""

    tells: ClassVar[Literal["", "label", "margin"]] = "label"


class RewardDataConfig(PreferenceDataConfig):
    """Pairs of a chosen and a rejected answer, which may tell by how much the one is better: their `margin`."""

    tells: ClassVar[Literal["", "label", "margin"]] = "margin"


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


# What a preference loss reads beside beta.
LOSS_READS = {
    "sigmoid": ("label_smoothing",),
    "robust": ("label_smoothing",),
    "exo": ("label_smoothing",),
    "simpo": ("gamma",),
    "cpo": ("alpha",),
}


class PreferenceLossConfig(Settings):
    """The loss of a pair of answers; docs/preferences.md has the formulas."""

    name: Literal[
        "sigmoid",
        "robust",
        "ipo",
        "hinge",
        "sigmoid_norm",
        "apo_zero",
        "apo_down",
        "nca",
        "bco_pair",
        "sppo",
        "exo",
        "simpo",
        "cpo",
        "orpo",
    ] = Field("sigmoid", description="Which loss: `sigmoid` is DPO. simpo, cpo and orpo have no reference model.")
    beta: PositiveFloat | None = Field(
        None, description="How near the model stays to the reference; more is nearer. null is 0.1, and 2.5 for simpo."
    )
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] | None = Field(
        None,
        description="sigmoid, robust, exo: share of pairs taken to be the wrong way round. null is 0, 0.1 and 0.001.",
    )
    gamma: float | None = Field(None, description="simpo: by how much the chosen answer is to be ahead. null is 1.375.")
    alpha: NonNegativeFloat | None = Field(
        None, description="cpo: weight of the chosen answer's own loss a token. null is 1."
    )
    sft_weight: NonNegativeFloat = Field(
        0.0,
        description="With any loss: weight of the chosen answers' cross-entropy, a mean over the step's tokens of them.",
    )
    ld_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        1.0,
        description="LD-DPO: what a token counts behind the length of the shorter answer, in the reference as well; below "
        "1 longer answers gain less from their length.",
    )
    wpo: bool = Field(
        False, description="WPO: weigh each pair by how likely the model itself is to give these answers, a token."
    )

    @property
    def beta_of_loss(self) -> float:
        if self.beta is not None:
            return self.beta
        return 2.5 if self.name == "simpo" else 0.1

    @property
    def own_settings(self) -> dict[str, float]:
        """What is given of the settings that some losses alone read."""
        values = {name: getattr(self, name) for name in ("label_smoothing", "gamma", "alpha")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def needs_reference(self) -> bool:
        return self.name not in ("simpo", "cpo", "orpo")

    @model_validator(mode="after")
    def _is_read(self) -> "PreferenceLossConfig":
        reads = LOSS_READS.get(self.name, ())
        for name, value in self.own_settings.items():
            if name not in reads:
                whose = ", ".join(loss for loss, settings in LOSS_READS.items() if name in settings)
                raise ValueError(
                    f"{name}={value:g} is not read by the loss {self.name}, but by {whose}. Leave it out, or choose another."
                )
        if self.name == "exo" and self.label_smoothing == 0:
            raise ValueError("label_smoothing=0: the loss exo takes its logarithm. Set it above 0, or leave it out.")
        return self


class UnpairedLossConfig(Settings):
    """The loss of single answers that are desirable or not; docs/preferences.md has the formulas."""

    name: Literal["kto", "apo_zero_unpaired", "bco"] = Field(
        "kto",
        description="Which loss. What an answer gained on the reference is compared with: `kto` what the prompts of its "
        "micro-batch gain with other answers, `apo_zero_unpaired` 0, `bco` the mean of all answers before its step.",
    )
    beta: PositiveFloat = Field(0.1, description="How near the model stays to the reference; more is nearer.")
    desirable_weight: NonNegativeFloat = Field(
        1.0,
        description="What a desirable answer counts. Where the two kinds are not of one number, the authors of KTO set the "
        "weights so that weight times number of the desirable is 1 to 1.33 times that of the others.",
    )
    undesirable_weight: NonNegativeFloat = Field(1.0, description="What an undesirable answer counts.")

    needs_reference: ClassVar[bool] = True
    ld_alpha: ClassVar[float] = 1.0  # all tokens of an answer count alike
    wpo: ClassVar[bool] = False

    @property
    def needs_mismatched(self) -> bool:
        """Whether it looks at prompts with answers of others."""
        return self.name == "kto"


class RewardLossConfig(Settings):
    """The loss of a pair of scores."""

    centering: NonNegativeFloat = Field(
        0.01,
        description="Weight of the squared sum of a pair's two scores, which keeps scores around 0: only their difference "
        "is learned otherwise.",
    )
    per_token: bool = Field(
        False,
        description="Give every token of an answer a reward, whose mean is the answer's, in place of one score at its end: "
        "leanft score --per-token reads them. Models for sequence classification read the last one alone.",
    )


class ReferenceConfig(Settings):
    """The frozen model that a preference is measured against: the one that training begins with."""

    kind: Literal["auto", "cached", "adapter_off", "model", "nf4", "none"] = Field(
        "auto",
        description="Where its log-probabilities come from. `cached`: computed once before training, and kept beside the "
        "prepared data. `adapter_off`: the model itself without its adapter. `model`: a second copy in memory. `nf4`: that "
        "in 4 bits, so that margins do not begin at 0. `none`: there is none, and zeros stand for it. `auto` is none where "
        "the loss reads none, adapter_off for an adapter that sees no answer twice, and cached otherwise.",
    )


# What a policy loss reads of its own.
POLICY_LOSS_READS = {
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "gspo", "rloo"), ("epsilon", "epsilon_high")),
    "cispo": ("epsilon_max",),
}


class PolicyLossConfig(Settings):
    """The loss of answers that the model sampled itself; docs/online.md has the formulas."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] = Field(
        "dapo",
        description="Which loss: how far the ratio to the sampling model may go, and what tokens are divided by.",
    )
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None, description="How far a ratio may fall below 1 before it gains nothing. null is 0.2, and 3e-4 for gspo."
    )
    epsilon_high: PositiveFloat | None = Field(
        None,
        description="How far it may rise above 1. null is 0.2, 0.28 for dapo and 4e-4 for gspo.",
    )
    epsilon_max: PositiveFloat | None = Field(
        None, description="cispo: the largest weight that a token has by its ratio. null is 5."
    )
    advantage: Literal["group", "batch", "mean", "leave_one_out"] | None = Field(
        None,
        description="What of a reward counts: that above the mean of the prompt's answers, divided by their standard "
        "deviation (`group`), by that of all answers of a round (`batch`) or by nothing (`mean`); or above the mean of the "
        "prompt's other answers (`leave_one_out`). null is group, mean for dr_grpo and leave_one_out for rloo.",
    )
    kl_weight: NonNegativeFloat = Field(
        0.0, description="What the divergence from the reference counts; above 0 there has to be one, see reference."
    )
    kl: Literal["corrected", "k1", "k2", "k3", "in_reward"] = Field(
        "corrected",
        description="How it is estimated and where it stands: in the loss of each token by k1, k2, k3 or the ratio times "
        "k3 (`corrected`); or in an answer's reward, a sum of k1 (`in_reward`).",
    )
    mask_truncated: bool = Field(
        False,
        description="Learn nothing from answers that max_new_tokens cut; their rewards still count for the others'.",
    )
    entropy_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0,
        description="Learn from this share of a round's tokens, those where the model was least sure; 0.2 is usual.",
    )
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "none",
        description="Weights for answers that were drawn from other probabilities than the trainer's (generation.top_p and the "
        "like): their ratio, of each token or the whole answer, that is cut at correction_max or leaves out what is above.",
    )
    correction_max: PositiveFloat = Field(2.0, description="The largest such weight.")

    @property
    def own_settings(self) -> dict[str, float]:
        """What is given of the settings that some losses alone read."""
        values = {name: getattr(self, name) for name in ("epsilon", "epsilon_high", "epsilon_max")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight > 0

    @property
    def advantage_of_loss(self) -> Literal["group", "batch", "mean", "leave_one_out"]:
        if self.advantage is not None:
            return self.advantage
        return "mean" if self.name == "dr_grpo" else "leave_one_out" if self.name == "rloo" else "group"

    @property
    def of_tokens(self) -> dict[str, Any]:
        """What `policy_loss` is told beside its name: the divergence that stands in the loss, and the loss's own."""
        in_loss = self.kl != "in_reward" and self.needs_reference
        divergence = {"kl": self.kl, "kl_weight": self.kl_weight} if in_loss else {"kl": "corrected", "kl_weight": 0.0}
        return divergence | self.own_settings

    @model_validator(mode="after")
    def _is_read(self) -> "PolicyLossConfig":
        for name, value in self.own_settings.items():
            if name not in POLICY_LOSS_READS[self.name]:
                whose = ", ".join(loss for loss, settings in POLICY_LOSS_READS.items() if name in settings)
                raise ValueError(
                    f"{name}={value:g} is not read by the loss {self.name}, but by {whose}. Leave it out, or choose another."
                )
        return self


class GenerationConfig(Settings):
    """How a model in training answers prompts, and how the answers are learned from."""

    num_answers: Annotated[int, Field(ge=2)] = Field(
        8, description="Answers to each prompt, the group that they are compared in."
    )
    max_new_tokens: PositiveInt = Field(256, description="Tokens after which an answer is cut, if it has not ended.")
    temperature: PositiveFloat = Field(
        1.0, description="What logits are divided by, in sampling and in the log-probabilities that are learned from."
    )
    eval_temperature: NonNegativeFloat | None = Field(
        None,
        description="The same for answers to held-out prompts; 0 takes the likeliest tokens, null is as in training.",
    )
    top_k: PositiveInt | None = Field(None, description="Draw among this many likeliest tokens.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw among the fewest tokens whose probabilities reach this share."
    )
    min_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw among the tokens at least so likely as this share of the likeliest's probability."
    )
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

    @property
    def drawn(self) -> dict[str, Any]:
        """How long answers may be and which tokens can be in them, as `Sampling` is told."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "top_k", "top_p", "min_p")}

    @property
    def narrows(self) -> bool:
        """Whether some tokens are never drawn, so that the sampler's probabilities are not the model's."""
        return self.top_k is not None or (self.top_p or 1.0) < 1 or self.min_p is not None


class Reward(Settings):
    """One of several rewards."""

    function: str = Field(
        description="A function of your own, `my_rewards.py:name`, or one that is there: `exact_answer`, `format`, `length`."
    )
    weight: float = Field(1.0, description="What it counts in the sum.")
    pattern: Annotated[str, AfterValidator(_is_regular_expression)] | None = Field(
        None, description="A regular expression: what `format` looks for, and what of a text `exact_answer` compares."
    )


class DistillConfig(Settings):
    """The teacher, and how far from its predictions the model is; docs/distillation.md has the formulas."""

    teacher: str | None = Field(
        None,
        description="The frozen model to learn from: what model.path takes, of any family and size, with the same tokenizer.",
    )
    teacher_dtype: Literal["bfloat16", "float32", "float16", "nf4"] | None = Field(
        None,
        description="Type of the teacher's weights and arithmetic; nf4 keeps its linear layers in 4 bits. null is "
        "model.dtype.",
    )
    cached: Path | None = Field(
        None,
        description="In place of a teacher: the folder of its likeliest next tokens that `leanft score` wrote, for a teacher "
        "that does not fit beside the student.",
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="What is made small at each target: KL(teacher || student), KL(student || teacher), or jsd, both to "
        "what lies beta of the way to the teacher.",
    )
    beta: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(
        None, description="jsd: how near it is to reverse_kl, which 1 is; 0 is forward_kl. null is 0.5."
    )
    temperature: PositiveFloat = Field(
        1.0, description="What the logits of both are divided by; above 1 unlikely tokens count more."
    )
    cross_entropy_weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0,
        description="Share of the loss that is the cross-entropy of the data's own tokens; the divergence has the rest.",
    )
    on_policy: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0,
        description="Share of the steps, drawn by the seed, in which the student answers the prompts itself and learns what "
        "the teacher makes of its answers.",
    )

    @property
    def beta_of_jsd(self) -> float:
        return 0.5 if self.beta is None else self.beta

    @model_validator(mode="after")
    def _is_read(self) -> "DistillConfig":
        if (self.teacher is None) == (self.cached is None):
            raise ValueError(
                "expected one of teacher=MODEL and cached=FOLDER, which `leanft score MODEL FILE FOLDER --top-k 64` writes; "
                f"came {'neither' if self.cached is None else 'both'}."
            )
        if self.beta is not None and self.divergence != "jsd":
            raise ValueError(
                f"beta={self.beta:g} is not read by divergence={self.divergence}, but by jsd. Leave it out, or choose jsd."
            )
        if self.cached is not None and self.teacher_dtype is not None:
            raise ValueError(
                f"teacher_dtype={self.teacher_dtype} is of a teacher in memory, and cached={self.cached} is what one said "
                "before. Leave it out."
            )
        if self.cached is not None and self.on_policy:
            raise ValueError(
                f"on_policy={self.on_policy:g}: the teacher has to read what the student writes, and cached={self.cached} "
                "knows the data alone. Set teacher, or on_policy=0."
            )
        if self.cross_entropy_weight == 1:
            raise ValueError("cross_entropy_weight=1 leaves nothing of the teacher in the loss: run finetune for that.")
        return self


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
    host_pool: bool | None = Field(
        None,
        description="CPU: keep the memory that tensors free for the next ones, never more than was once in use; without, "
        "every step pays the system for fresh pages. Linux with a C++ compiler. null: true where it can be had.",
    )


class ParallelConfig(Settings):
    """How several processes share the model and the work; of one process nothing. `leanft run --nproc-per-node` starts
    them."""

    replicate: PositiveInt = Field(
        1,
        description="Copies of the model. Each is cut over `shard` processes; as many copies as processes are DDP, fewer "
        "HSDP.",
    )
    shard: PositiveInt | None = Field(
        None,
        description="Processes with other data that a copy of the model, its gradients and the optimizer's state are cut over "
        "(FSDP); null takes all that the others leave.",
    )
    context: PositiveInt = Field(
        1,
        description="Processes that share the tokens of each row, and exchange heads for tokens around attention: for rows "
        "too long for one device.",
    )
    tensor: PositiveInt = Field(
        1,
        description="Processes that share the heads and inner features of each layer, and its tokens between layers: for "
        "neighbouring GPUs with fast links.",
    )
    experts: PositiveInt = Field(
        1,
        description="Of the processes that share a copy, as many neighbours each keep other experts of a mixture, to which "
        "tokens are sent; 1 gathers all experts of a layer instead.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered weights after forward and gather them again for backward; false keeps them, "
        "which takes the memory of a whole model and sends a third less.",
    )
    vocabulary: Literal["auto", "cut", "gathered"] = Field(
        "auto",
        description="Whether the embedding and the output layer stay cut while they are used (no process has them whole, and "
        "hidden states travel instead), or are gathered as layers are; auto cuts large ones where that sends less.",
    )
    timeout_minutes: PositiveInt = Field(
        30,
        description="How long a process waits for the others, before it takes one of them for dead and ends the run.",
    )


LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # name -> module


def _have_their_packages(names: list[str]) -> list[str]:
    for name in names:
        if name in LOGGER_PACKAGES and importlib.util.find_spec(LOGGER_PACKAGES[name]) is None:
            raise ValueError(f"{name} is not installed here: pip install 'lean-ft[{name}]', or leave it out.")
    return names


class LogConfig(Settings):
    """Where a run's numbers go beside metrics.jsonl, which every run writes."""

    to: Annotated[
        list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]], AfterValidator(_have_their_packages)
    ] = Field(
        default=["jsonl"],
        description="`csv` writes metrics.csv, `tensorboard` event files, both into output_dir; `wandb` and `mlflow` are "
        "services, or with log.offline folders in output_dir. A resumed run goes on in the same record.",
    )
    project: str = Field(default="lean_ft", description="What wandb calls a project, and mlflow an experiment.")
    name: str | None = Field(default=None, description="The run's name there; null: the last part of output_dir.")
    offline: bool = Field(
        default=False, description="wandb and mlflow write into output_dir, and nothing goes to a network."
    )


class RecipeConfig(Settings):
    """The settings that every training recipe has."""

    batch_size: PositiveInt = Field(2, description="Sequences (packed rows, when packing) a forward pass.")
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Forward passes an optimizer step, those of all processes together."
    )
    clip_grad_norm: PositiveFloat | None = Field(
        None, description="Largest global norm of the gradients; null does not clip."
    )
    epochs: PositiveFloat = Field(1, description="Passes over the data, the last of which may be a part: 2.5.")
    max_steps: PositiveInt | None = Field(
        None, description="Optimizer steps after which to stop, if before the epochs end."
    )
    compile: bool = Field(False, description="torch.compile each layer, the loss and the optimizer's update.")
    freeze: list[str] = Field(
        default_factory=list,
        description="Parameters that keep their values: ends of names, of parameters or of what holds them "
        "(embed_tokens, mlp, lora_A), or names with wildcards (model.layers.[0-3].*).",
    )
    train: list[str] = Field(
        default_factory=list,
        description="Of what would train, the parameters that do, named as in freeze; empty leaves all of it.",
    )
    neftune_alpha: NonNegativeFloat = Field(
        0.0,
        description="NEFTune: noise on the embeddings in training, evenly from -1 to 1 times this over the root of a "
        "sequence's tokens times the hidden size. Its authors took 5 to 15; 0 adds none.",
    )
    eval_every: Every = Field(
        0,
        description="How often to evaluate: after so many optimizer steps, after each `epoch`, or after a share of one "
        "(0.25); 0 evaluates only at the end.",
    )
    stop_after_evals: NonNegativeInt = Field(
        0,
        description="Early stopping: ends the run after so many evaluations in a row without a held-out loss below the "
        "lowest before; 0 never does.",
    )
    eval_answers: NonNegativeInt = Field(
        0,
        description="Held-out questions that the model answers before and after training, right where the whole answer is "
        "the held-out one; 0 asks none.",
    )
    eval_pattern: Annotated[str, AfterValidator(_is_regular_expression)] | None = Field(
        None,
        description="What of an answer eval_answers compares: the first group of this regular expression's last match, in "
        "the model's answer and in the held-out one. GSM8K: `#### (.*)`.",
    )
    save_every: Every | Literal["auto"] = Field(
        "auto",
        description="How often to save a checkpoint, as eval_every; 0 saves only at the end. `auto` saves after each "
        "epoch, as long as saving takes less than a tenth of the time, and at least every 30 minutes; of these it keeps "
        "the last two unless keep_last says otherwise.",
    )
    save_async: bool = Field(
        False,
        description="Copy what a checkpoint holds to host memory and write it while training goes on. The copy takes "
        "the trained weights and the optimizer's state once more until it is written: on a CPU that doubles them. The "
        "last checkpoint is waited for.",
    )
    keep_last: PositiveInt | None = Field(
        None,
        description="Checkpoints kept, the newest ones; older ones are deleted. null keeps all, or the last two where "
        "save_every is auto.",
    )
    keep_every: NonNegativeInt = Field(
        0, description="Beside the newest: checkpoints of steps that are multiples of this are kept as well; 0: none."
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
    log: LogConfig = LogConfig()
    seed: NonNegativeInt = Field(0, description="Seeds data order, dropout and stochastic rounding.")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field("auto", description="`auto` takes cuda, then mps, then cpu.")
    plan: Literal["auto"] | bool = Field(
        "auto",
        description="Rehearse one step on shapes before weights are loaded, and tell its peak memory. `auto` does for the "
        "recipes that come with lean_ft, and runs no file of yours twice; `leanft plan` plans that.",
    )
    output_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        description="The run directory: config, metrics and checkpoints."
    )
    resume: str = Field(
        "auto",
        description="`auto` goes on from the newest whole checkpoint in output_dir, `never` refuses a directory that "
        "holds a run, a path names a checkpoint.",
    )

    @model_validator(mode="after")
    def _check_retention(self) -> "RecipeConfig":
        if self.most_kept is None and (self.keep_every or self.keep_best):
            name = "keep_every" if self.keep_every else "keep_best"
            raise ValueError(
                f"{name} tells what is kept beyond the last checkpoints, and keep_last=null keeps all of them. "
                f"Set keep_last (1 keeps the newest), or leave {name} out."
            )
        if self.keep_best and self.save_every and not _is_multiple(self.save_every, self.eval_every):
            raise ValueError(
                f"keep_best={self.keep_best} compares checkpoints by their held-out loss, and with "
                f"save_every={self.save_every} and eval_every={self.eval_every} some would have none. Set save_every to "
                f"a multiple of eval_every."
            )
        if self.stop_after_evals and not self.eval_every:
            raise ValueError(
                f"stop_after_evals={self.stop_after_evals} compares evaluations, and with eval_every=0 there is only the "
                "last. Set eval_every (epoch evaluates after each epoch), or leave it out."
            )
        return self

    @property
    def most_kept(self) -> int | None:
        """Checkpoints kept for being the newest; None keeps all."""
        return 2 if self.keep_last is None and self.save_every == "auto" else self.keep_last

    @property
    def row_tokens(self) -> int | None:
        """Tokens that a row of a batch may have; None where the recipe has no data of ours."""
        if (data := self.group(DataConfig)) is not None:
            return data.max_length
        prompts, generation = self.group(PromptDataConfig), self.group(GenerationConfig)
        return prompts.max_prompt_length + generation.max_new_tokens if prompts and generation else None

    @property
    def pass_tokens(self) -> int | None:
        """Tokens that a forward pass may have; None where the recipe has no data of ours."""
        data, row_tokens = self.group(DataConfig), self.row_tokens
        if data is not None and data.batch_tokens is not None:
            return data.batch_tokens
        return None if row_tokens is None else self.batch_size * row_tokens

    def group(self, kind: type[GroupT]) -> GroupT | None:
        """The recipe's group of settings of this kind, the first of several; None where it has none."""
        return next((value for _, value in self if isinstance(value, kind)), None)


def _is_multiple(every: Every | Literal["auto"], other: Every) -> bool:
    """Whether what happens `every` so often comes together with what happens each `other`, whatever an epoch has."""
    long, short = (1.0 if value == "epoch" else value for value in (every, other))
    if isinstance(long, str) or isinstance(short, str) or type(long) is not type(short) or not short:
        return False
    return abs(long / short - round(long / short)) < 1e-9


class SamplingConfig(Settings):
    """How the student answers, in the steps that distill.on_policy asks for."""

    max_new_tokens: PositiveInt = Field(
        256,
        description="Tokens after which an answer is cut, if it has not ended; with its prompt it has data.max_length.",
    )
    temperature: NonNegativeFloat = Field(
        1.0, description="What logits are divided by before a token is drawn; 0 takes the likeliest."
    )


class KeepTeacherConfig(Settings):
    """What `leanft score --top-k` keeps of a teacher's predictions."""

    model: ModelConfig
    data: SFTDataConfig
    destination: Path = Field(description="The folder to write, for distill.cached.")
    top_k: PositiveInt = Field(64, description="Likeliest next tokens kept of each target; 8 bytes each.")
    temperature: PositiveFloat = Field(1.0, description="That of the student's distill.temperature.")
    nf4: bool = Field(False, description="Keep the model's linear layers in 4 bits.")
    batch_size: PositiveInt = Field(8, description="Sequences (packed rows, when packing) a forward pass.")
    memory: MemoryConfig = MemoryConfig.model_validate({})
    compile: bool = Field(False, description="torch.compile each layer.")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field("auto", description="`auto` takes cuda, then mps, then cpu.")


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

    model: AskedModelConfig = AskedModelConfig()
    adapter: str | list[str] = Field(
        [],
        description="Folder of an adapter in PEFT's format, or a run that trained one; or a list of them that add up.",
    )
    max_new_tokens: PositiveInt = Field(256, description="Tokens after which to stop, if the text has not ended.")
    temperature: NonNegativeFloat = Field(0.0, description="0 takes the likeliest token; above it, tokens are drawn.")
    top_k: PositiveInt | None = Field(None, description="Draw among this many likeliest tokens.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw among the fewest tokens whose probabilities reach this share."
    )
    min_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw among the tokens at least so likely as this share of the likeliest's probability."
    )
    stop: list[str] = Field([], description="Texts that end an answer, and are left out of it.")
    seed: NonNegativeInt = Field(0, description="Seeds the drawing.")
    device: Literal["auto", "cuda", "cpu", "mps"] = Field("auto", description="`auto` takes cuda, then mps, then cpu.")

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen and what ends an answer."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed")
        return {name: getattr(self, name) for name in names}


_NAMES_A_MODEL: dict[type[Settings], str] = {ModelConfig: "path", DistillConfig: "teacher"}


def models_of(cfg: BaseModel) -> dict[tuple[str, str], str]:
    """Every model that settings name, by its group and name there: {("model", "path"): "tiny"}."""
    found: dict[tuple[str, str], str | None] = {
        (group, name): getattr(value, name)
        for group, value in cfg
        for kind, name in _NAMES_A_MODEL.items()
        if isinstance(value, kind)
    }
    return {place: path for place, path in found.items() if path is not None}


class TrainingConfig(Protocol):
    """What the Config of a recipe that trains has, whatever its objective: for calls that take the whole of it."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    memory: MemoryConfig
    clip_grad_norm: float | None
    compile: bool
