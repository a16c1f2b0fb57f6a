"""Settings of what is learned from: the losses, their reference, and a teacher."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from lean_ft.settings.base import Dtype, Fraction, OwnFunction, PositiveShare, Settings, Share
from lean_ft.system.own_functions import check_function


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


def _check_read(given: dict[str, float], loss: str, reads: dict[str, tuple[str, ...]]) -> None:
    """Raises ValueError where one of the settings that are given is read by other losses alone."""
    for name, value in given.items():
        if name not in reads.get(loss, ()):
            whose = ", ".join(other for other, settings in reads.items() if name in settings)
            raise ValueError(
                f"{name}={value:g} is not read by the loss {loss}, but by {whose}. Leave it out, or choose another."
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

    name: Annotated[
        Literal[
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
        ]
        | OwnFunction,
        AfterValidator(check_function),
    ] = Field(
        "sigmoid",
        description="Which loss: `sigmoid` is DPO. simpo, cpo and orpo have no reference model. `my_loss.py:fn` is "
        "a function of your own, of `Pairs` and beta.",
    )
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
    ld_alpha: Share = Field(
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
        return self.model_dump(include={"label_smoothing", "gamma", "alpha"}, exclude_none=True)

    @property
    def needs_reference(self) -> bool:
        return self.name not in ("simpo", "cpo", "orpo")

    @model_validator(mode="after")
    def _is_read(self) -> "PreferenceLossConfig":
        _check_read(self.own_settings, self.name, LOSS_READS)
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

    kind: Literal["auto", "cached", "adapter_off", "model", "streamed", "nf4", "none"] = Field(
        "auto",
        description="Where its log-probabilities come from. `cached`: computed once before training, and kept beside the "
        "prepared data. `adapter_off`: the model itself without its adapter. `model`: a second copy in memory. `streamed`: "
        "that in the host's memory, whose layers travel to the GPU as they compute. `nf4`: a copy in 4 bits, so that margins do "
        "not begin at 0. `none`: there is none, and zeros stand for it. `auto` is none where "
        "the loss reads none, adapter_off for an adapter that sees no answer twice, and cached otherwise.",
    )


# What a policy loss reads of its own.
POLICY_LOSS_READS = {
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "gspo", "rloo"), ("epsilon", "epsilon_high")),
    "cispo": ("epsilon_max",),
}


class PolicyLossConfig(Settings):
    """The loss of answers that the model sampled itself; docs/online.md has the formulas."""

    name: Annotated[
        Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] | OwnFunction, AfterValidator(check_function)
    ] = Field(
        "dapo",
        description="Which loss: how far the ratio to the sampling model may go, and what tokens are divided by. "
        "`my_loss.py:fn` is a function of your own, of `Answers`.",
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
    entropy_share: PositiveShare = Field(
        1.0,
        description="Share of a round's tokens whose policy loss counts: those with the highest entropy; the paper uses 0.2. "
        "The divergence and the denominators are those of all tokens.",
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
        return self.model_dump(include={"epsilon", "epsilon_high", "epsilon_max"}, exclude_none=True)

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence stands in the rewards, and not in the loss."""
        return self.kl == "in_reward" and self.needs_reference

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
        _check_read(self.own_settings, self.name, POLICY_LOSS_READS)
        return self


class PPOLossConfig(Settings):
    """The losses of the policy and of the value model, and what they are of; docs/online.md has the formulas."""

    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.2, description="How far a token's ratio to the sampling model may go from 1 before it gains nothing."
    )
    value_epsilon: PositiveFloat = Field(
        0.2,
        description="How far a token's value may go from what it was when the answer was sampled, as far as it gains.",
    )
    value_weight: PositiveFloat = Field(0.1, description="What the value model's loss counts beside the policy's.")
    gamma: PositiveShare = Field(1.0, description="What a reward counts for the token before, and so on back.")
    gae_lambda: Share = Field(
        0.95,
        description="Between 0, which compares a token with the value behind it, and 1, which compares it with the reward "
        "that came.",
    )
    kl_weight: NonNegativeFloat = Field(
        0.05, description="What each token's divergence from the reference costs of the reward; 0 has no reference."
    )
    mask_truncated: bool = Field(False, description="Learn nothing from answers that max_new_tokens cut.")

    name: ClassVar[str] = "dapo"  # of the policy's loss, a mean over the step's tokens
    correction: ClassVar[str] = "none"

    @property
    def of_tokens(self) -> dict[str, Any]:
        """What `policy_loss` is told beside its name."""
        return {"epsilon": self.epsilon, "epsilon_high": self.epsilon}

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight > 0


class ValueConfig(Settings):
    """The value model, which tells of each token of an answer what is still to come. With an adapter it is an output layer on
    the policy itself, and else a model of its own."""

    path: str | None = Field(
        None,
        description="The model that it begins as, with an output layer of zeros, or a reward model with its own; null is "
        "model.path.",
    )
    lr_ratio: PositiveFloat = Field(10.0, description="Its learning rate over optimizer.lr.")


class DistillConfig(Settings):
    """The teacher, and how far from its predictions the model is; docs/distillation.md has the formulas."""

    teacher: str | None = Field(
        None,
        description="The frozen model to learn from: what model.path takes, of any family and size, with the same tokenizer.",
    )
    teacher_streamed: bool = Field(
        False,
        description="Keep the teacher's layers in the host's memory, from which they travel to the GPU as they compute.",
    )
    teacher_dtype: Dtype | Literal["nf4"] | None = Field(
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
    beta: Share | None = Field(
        None, description="jsd: how near it is to reverse_kl, which 1 is; 0 is forward_kl. null is 0.5."
    )
    temperature: PositiveFloat = Field(
        1.0, description="What the logits of both are divided by; above 1 unlikely tokens count more."
    )
    cross_entropy_weight: Share = Field(
        0.0,
        description="Share of the loss that is the cross-entropy of the data's own tokens; the divergence has the rest.",
    )
    on_policy: Share = Field(
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
        if self.teacher_streamed and (self.cached is not None or self.teacher_dtype == "nf4"):
            other = "teacher_dtype=nf4" if self.cached is None else f"cached={self.cached}"
            raise ValueError(
                f"teacher_streamed=true brings a whole teacher's layers from the host's memory, and {other} has none there. "
                "Leave one of them out."
            )
        if self.cached is not None and self.on_policy:
            raise ValueError(
                f"on_policy={self.on_policy:g}: the teacher has to read what the student writes, and cached={self.cached} "
                "knows the data alone. Set teacher, or on_policy=0."
            )
        if self.cross_entropy_weight == 1:
            raise ValueError("cross_entropy_weight=1 leaves nothing of the teacher in the loss: run finetune for that.")
        return self
