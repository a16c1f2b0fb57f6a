"""Settings of losses, reference models, value models and teachers."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, ValidationError, model_validator

from lean_ft.settings.base import Dtype, FilePath, Fraction, Name, OwnFunction, PositiveShare, Settings, Share
from lean_ft.system.units import enumerated
from lean_ft.system.user_functions import check_function


class LossConfig(Settings):
    """Terms added to the cross-entropy in training. Held-out losses are the plain cross-entropy."""

    label_smoothing: Fraction = 0.0
    """Fraction of each target's probability that is spread over the whole vocabulary."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the squared log-normalizer of the softmax, added to each token's loss. It keeps logits from
    drifting. PaLM used 1e-4."""


class ReferencedLossConfig(Settings):
    """A loss that may compare the model with a frozen reference model."""

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def divergence_weight(self) -> float | None:
        """Weight of the KL divergence from the reference model; None for a loss without this term."""
        return None

    @property
    def needs_mismatched(self) -> bool:
        """Whether the loss compares prompts with completions of other prompts."""
        return False


class LossFacts(NamedTuple):
    """Facts about a value of `loss.name`."""

    reads: Mapping[str, float] = MappingProxyType({})
    """Settings that only some losses read, with their defaults: parameters of the loss's function besides beta."""
    needs_reference: bool = True
    beta: float = 0.1


def _only_of(losses: Mapping[str, LossFacts], name: str, meaning: str) -> Any:
    """A field for the setting `name`, which only some of the losses read; its description names them and their
    defaults."""
    defaults = {loss: f"{facts.reads[name]:g}" for loss, facts in losses.items() if name in facts.reads}
    common = Counter(defaults.values()).most_common(1)[0][0]
    others = [f"{value} for {loss}" for loss, value in defaults.items() if value != common]
    null = enumerated([common, *others]) if len(others) != 1 else f"{common}, and {others[0]}"
    if len({*defaults.values()}) == len(defaults) > 1:
        null = enumerated([f"{value} for {loss}" for loss, value in defaults.items()])
    return Field(None, description=f"For {enumerated([*defaults])}: {meaning} null is {null}.")


class NamedLossConfig(ReferencedLossConfig):
    """A loss chosen by name. Its own settings are fields whose null is the default of the loss's function."""

    losses: ClassVar[dict[str, LossFacts]]
    name: Any

    @property
    def own_settings(self) -> dict[str, float]:
        """The given settings that only some losses read."""
        return self.model_dump(
            include={name for loss in self.losses.values() for name in loss.reads}, exclude_none=True
        )

    @model_validator(mode="after")
    def _are_read(self) -> Self:
        for name, value in self.own_settings.items():
            if self.name not in self.losses or name not in self.losses[self.name].reads:
                whose = ", ".join(loss for loss, facts in self.losses.items() if name in facts.reads)
                raise ValueError(
                    f"{name}={value:g} has no effect with the loss {self.name}, only with {whose}. Remove it, or "
                    "choose another loss."
                )
        return self

    @classmethod
    def check(cls, loss: str, arguments: dict[str, float]) -> None:
        """Raise ValueError for arguments of a loss's function that it does not read, or out of the ranges of the
        fields."""
        reads = cls.losses[loss].reads if loss in cls.losses else {}
        readable = [name for name in ("beta", *reads) if name in cls.model_fields]
        for name in arguments:
            if name not in readable:
                remedy = f"Remove it, or set {' or '.join(readable)}" if readable else "Remove it"
                raise ValueError(f"{name} is no setting of the loss {loss}. {remedy}.")
        try:
            cls.model_validate({**({"name": loss} if loss in cls.losses else {}), **arguments})
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{name}={first['input']} of the loss {loss}: " for name in first["loc"])
            reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "the value should be")
            raise ValueError(f"{place}{reason.removesuffix('.')}.") from None


# The preference losses: functions of `lean_ft.losses.preference` by name.
PREFERENCE_LOSSES = {
    "sigmoid": LossFacts({"label_smoothing": 0.0}),
    "robust": LossFacts({"label_smoothing": 0.1}),
    **dict.fromkeys(("ipo", "hinge", "sigmoid_norm", "apo_zero", "apo_down", "nca", "bco_pair", "sppo"), LossFacts()),
    "exo": LossFacts({"label_smoothing": 1e-3}),
    "simpo": LossFacts({"gamma": 1.375}, needs_reference=False, beta=2.5),
    "cpo": LossFacts({"alpha": 1.0}, needs_reference=False),
    "orpo": LossFacts(needs_reference=False),
}
PreferenceLossName = Literal[tuple(PREFERENCE_LOSSES)]


class PreferenceLossConfig(NamedLossConfig):
    """The loss of a preference pair; docs/preferences.md has the formulas."""

    losses: ClassVar[dict[str, LossFacts]] = PREFERENCE_LOSSES
    name: Annotated[PreferenceLossName | OwnFunction, AfterValidator(check_function)] = "sigmoid"  # pyright: ignore[reportInvalidTypeForm]
    """Loss function. `sigmoid` is DPO. simpo, cpo and orpo need no reference model. `my_loss.py:fn` is your own
    function of `Pairs` and beta."""
    beta: PositiveFloat | None = None
    """Strength of the tie to the reference model; larger values stay closer. null is 0.1, and 2.5 for simpo."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] | None = _only_of(
        PREFERENCE_LOSSES, "label_smoothing", "assumed fraction of pairs with swapped labels."
    )
    gamma: float | None = _only_of(PREFERENCE_LOSSES, "gamma", "target margin of the chosen completion.")
    alpha: NonNegativeFloat | None = _only_of(
        PREFERENCE_LOSSES, "alpha", "weight of the chosen completion's negative log-likelihood."
    )
    sft_weight: NonNegativeFloat = 0.0
    """With any loss: weight of the chosen completions' cross-entropy, averaged over the tokens of the step."""
    ld_alpha: Share = 1.0
    """LD-DPO: weight of the tokens beyond the length of the shorter completion, also under the reference. Below 1,
    longer completions gain less from their length."""
    wpo: bool = False
    """WPO: weight each pair by the policy's mean probability of its tokens."""

    @property
    def beta_of_loss(self) -> float:
        return self._facts.beta if self.beta is None else self.beta

    @property
    def needs_reference(self) -> bool:
        return self._facts.needs_reference

    @property
    def _facts(self) -> LossFacts:
        return self.losses.get(self.name, LossFacts())

    @model_validator(mode="after")
    def _has_a_logarithm(self) -> Self:
        if self.name == "exo" and self.label_smoothing == 0:
            raise ValueError("label_smoothing=0: the loss exo takes its logarithm. Set it above 0, or leave it out.")
        return self


class UnpairedLossConfig(ReferencedLossConfig):
    """The loss of desirable and undesirable completions; docs/preferences.md has the formulas."""

    name: Literal["kto", "apo_zero_unpaired", "bco"] = "kto"
    """Loss function. It compares a completion's gain over the reference with a baseline: for `kto` the gain of
    mismatched completions of the micro-batch, for `apo_zero_unpaired` 0, for `bco` the mean of all earlier
    completions."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model; larger values stay closer."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable completions. For unbalanced data, the KTO paper sets the weights so that weight times number
    is 1 to 1.33 times as large for desirable as for undesirable completions."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable completions."""

    @property
    def needs_mismatched(self) -> bool:
        return self.name == "kto"


class ScoreLossConfig(Settings):
    """A loss of scores. The model has an output layer for them instead of logits, and writes no text."""


class RewardLossConfig(ScoreLossConfig):
    """The loss of a reward model: a pair of scores."""

    centering: NonNegativeFloat = 0.01
    """Weight of the squared sum of a pair's scores. It keeps scores around 0."""
    per_token: bool = False
    """Give every token a reward, whose mean is the reward of the completion, instead of one score at its end. `leanft
    score --per-token` reads them. Sequence classification models use only the last one."""


class ClassificationLossConfig(ScoreLossConfig):
    """The loss of text classification."""

    class_weights: dict[str, PositiveFloat] | Literal["balanced"] | None = None
    """Factor of each label's loss, 1 if not named. `balanced`: inverse to its number of texts."""

    def without_contents(self) -> Self:
        return self.model_copy(update={"class_weights": None})


class ReferenceConfig(Settings):
    """The frozen reference model: the model at the start of training."""

    kind: Literal["auto", "cached", "adapter_off", "model", "streamed", "nf4", "none"] = "auto"
    """Where the reference log-probabilities come from. `cached`: computed once before training and stored with the
    prepared data. `adapter_off`: the model without its adapter. `model`: a second copy in memory. `streamed`: a copy in
    host memory, whose layers are copied to the GPU as they compute. `nf4`: a 4-bit copy; margins then do not start at
    0. `none`: zeros. `auto`: none if the loss needs none, adapter_off for an adapter that sees no completion twice, and
    cached otherwise."""


# The policy losses: keys of `lean_ft.losses.policy.LOSSES`.
POLICY_LOSSES = {
    "grpo": LossFacts({"epsilon": 0.2, "epsilon_high": 0.2}),
    "dapo": LossFacts({"epsilon": 0.2, "epsilon_high": 0.28}),
    "dr_grpo": LossFacts({"epsilon": 0.2, "epsilon_high": 0.2}),
    "gspo": LossFacts({"epsilon": 3e-4, "epsilon_high": 4e-4}),
    "cispo": LossFacts({"epsilon_max": 5.0}),
    "rloo": LossFacts({"epsilon": 0.2, "epsilon_high": 0.2}),
}
PolicyLossName = Literal[tuple(POLICY_LOSSES)]


class PolicyLossConfig(NamedLossConfig):
    """The policy loss of sampled completions; docs/online.md has the formulas."""

    losses: ClassVar[dict[str, LossFacts]] = POLICY_LOSSES
    name: Annotated[PolicyLossName | OwnFunction, AfterValidator(check_function)] = "dapo"  # pyright: ignore[reportInvalidTypeForm]
    """Loss function: how ratios to the sampling policy are clipped, and what the token losses are divided by.
    `my_loss.py:fn` is your own function of `SampledTokens`."""
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] | None = _only_of(
        POLICY_LOSSES, "epsilon", "how far a ratio may fall below 1 before it is clipped."
    )
    epsilon_high: PositiveFloat | None = _only_of(
        POLICY_LOSSES, "epsilon_high", "how far a ratio may rise above 1 before it is clipped."
    )
    epsilon_max: PositiveFloat | None = _only_of(
        POLICY_LOSSES, "epsilon_max", "maximum weight of a token by its ratio."
    )
    advantage: Literal["group", "batch", "mean", "leave_one_out"] | None = None
    """Baseline and scale of rewards: the prompt's mean, divided by the standard deviation of the prompt's completions
    (`group`), of all completions of a round (`batch`) or by nothing (`mean`); or the mean of the prompt's other
    completions (`leave_one_out`). null is group, mean for dr_grpo and leave_one_out for rloo."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference model. 0 uses no reference model."""
    kl: Literal["corrected", "k1", "k2", "k3", "in_reward"] = "corrected"
    """Estimator and place of the KL divergence: in the loss of each token by k1, k2, k3 or the ratio times k3
    (`corrected`), or in the reward as a sum of k1 (`in_reward`)."""
    mask_truncated: bool = False
    """Do not train on completions that max_new_tokens cut. Their rewards still count in the baseline."""
    entropy_share: PositiveShare = 1.0
    """Fraction of a round's tokens whose policy loss counts: those with the highest entropy. The paper uses 0.2. The KL
    divergence and the denominators use all tokens."""
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Importance weights for completions that were sampled from other probabilities than the trainer's, for example
    with generation.top_p. The ratio of each token or of the sequence is truncated at correction_max, or masked above
    it."""
    correction_max: PositiveFloat = 2.0
    """Maximum importance weight."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight > 0

    @property
    def divergence_weight(self) -> float:
        return self.kl_weight

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL divergence is part of the rewards instead of the loss."""
        return self.kl == "in_reward" and self.needs_reference

    @property
    def advantage_of_loss(self) -> Literal["group", "batch", "mean", "leave_one_out"]:
        if self.advantage is not None:
            return self.advantage
        return "mean" if self.name == "dr_grpo" else "leave_one_out" if self.name == "rloo" else "group"

    @property
    def of_tokens(self) -> dict[str, Any]:
        """Arguments of `policy_loss` after the name: the KL term of the loss, and the loss's own settings."""
        in_loss = self.kl != "in_reward" and self.needs_reference
        divergence = {"kl": self.kl, "kl_weight": self.kl_weight} if in_loss else {"kl": "corrected", "kl_weight": 0.0}
        return divergence | self.own_settings


class PPOLossConfig(ReferencedLossConfig):
    """The losses of the policy and the value model; docs/online.md has the formulas."""

    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """How far a token's ratio to the sampling policy may move from 1 before it is clipped."""
    value_epsilon: PositiveFloat = 0.2
    """How far a token's value may move from its value at sampling before it is clipped."""
    value_weight: PositiveFloat = 0.1
    """Weight of the value loss relative to the policy loss."""
    gamma: PositiveShare = 1.0
    """Discount factor of rewards."""
    gae_lambda: Share = 0.95
    """Lambda of generalized advantage estimation: 0 uses one-step values, 1 uses full returns."""
    kl_weight: NonNegativeFloat = 0.05
    """Weight of each token's KL divergence from the reference model, subtracted from the reward. 0 uses no reference
    model."""
    mask_truncated: bool = False
    """Do not train on completions that max_new_tokens cut."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight > 0

    @property
    def divergence_weight(self) -> float:
        return self.kl_weight


class ValueConfig(Settings):
    """The value model, which predicts the remaining reward at each token. With an adapter it is an output layer on the
    policy, otherwise a separate model."""

    path: Name | None = None
    """Initial weights of the value model: a language model, which gets an output layer of zeros, or a reward model.
    null is model.path."""
    lr_ratio: PositiveFloat = 10.0
    """Learning rate of the value model, as a multiple of optimizer.lr."""


SELF = "self"  # the value of distill.teacher for the student itself
SelfKind = Literal["adapter_off", "model", "ema", "current"]


class DistillConfig(Settings):
    """The teacher and the divergence from it; docs/distillation.md has the formulas."""

    teacher: Name | None = None
    """The frozen teacher model, given like model.path. Family and size are free; the tokenizer must be the
    student's. `self` is the student, which reads the context of data.columns.context as the teacher."""
    teacher_kind: Literal["auto", "adapter_off", "model", "ema", "current"] = "auto"
    """With teacher=self: the weights that teach. `adapter_off`: the model without its adapter. `model`: a second copy
    of the model before training, in memory. `ema`: the averages of optimizer.ema. `current`: those that train. `auto`:
    adapter_off for an adapter, unless teacher_dtype or teacher_streamed is set, else model."""
    teacher_streamed: bool = False
    """Keep the teacher's layers in host memory and copy each to the GPU as it computes."""
    teacher_dtype: Dtype | Literal["nf4"] | None = None
    """Dtype of the teacher. `nf4` keeps its linear layers in 4 bits. null is model.dtype."""
    cached: FilePath | None = None
    """Instead of a teacher: a folder with its likeliest next tokens, written by `leanft score`. For a teacher that does
    not fit beside the student."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence to minimize at each target: KL(teacher || student), KL(student || teacher), or the generalized
    Jensen-Shannon divergence with beta."""
    beta: Share | None = None
    """For jsd: interpolation between forward_kl (0) and reverse_kl (1). null is 0.5."""
    temperature: PositiveFloat = 1.0
    """Temperature of both models' logits. Above 1, unlikely tokens count more."""
    cross_entropy_weight: Share = 0.0
    """Fraction of the loss that is the data's cross-entropy. The divergence has the rest."""
    on_policy: Share = 0.0
    """Fraction of the steps, drawn by the seed, in which the student answers the prompts and the teacher scores its
    completions."""

    @property
    def beta_of_jsd(self) -> float:
        return 0.5 if self.beta is None else self.beta

    def kind_of_self(self, *, has_adapter: bool) -> SelfKind | None:
        """The weights that teach if the teacher is the student; None for another teacher."""
        if self.teacher != SELF:
            return None
        if self.teacher_kind != "auto":
            return self.teacher_kind
        is_second = self.teacher_streamed or self.teacher_dtype is not None
        return "adapter_off" if has_adapter and not is_second else "model"

    def without_contents(self) -> Self:
        return self.model_copy(update={"on_policy": 0.0})

    @model_validator(mode="after")
    def _is_read(self) -> "DistillConfig":
        if (self.teacher is None) == (self.cached is None):
            raise ValueError(
                "expected one of teacher=MODEL and cached=FOLDER, which `leanft score MODEL FILE FOLDER --top-k 64` "
                f"writes; found {'neither' if self.cached is None else 'both'}."
            )
        if self.teacher != SELF and (self.teacher or "").lower() == SELF:
            raise ValueError(
                f"teacher={self.teacher}: did you mean {SELF}, the student? Write ./{self.teacher} for a folder."
            )
        if self.teacher_kind != "auto" and self.teacher != SELF:
            raise ValueError(
                f"teacher_kind={self.teacher_kind} chooses the weights of teacher=self, and the teacher is another "
                "model. Remove teacher_kind, or set teacher=self."
            )
        second = "teacher_streamed=true" if self.teacher_streamed else f"teacher_dtype={self.teacher_dtype}"
        if self.teacher_kind not in ("auto", "model") and (self.teacher_streamed or self.teacher_dtype is not None):
            raise ValueError(
                f"{second} is for a second model in memory, and with teacher_kind={self.teacher_kind} there is none. "
                f"Remove it, or set teacher_kind=model."
            )
        if self.beta is not None and self.divergence != "jsd":
            raise ValueError(
                f"beta={self.beta:g} has no effect with divergence={self.divergence}. Remove it, or set divergence=jsd."
            )
        if self.cached is not None and self.teacher_dtype is not None:
            raise ValueError(
                f"teacher_dtype={self.teacher_dtype} needs a teacher in memory, but cached={self.cached} has stored "
                "predictions. Remove teacher_dtype."
            )
        if self.teacher_streamed and (self.cached is not None or self.teacher_dtype == "nf4"):
            other = "teacher_dtype=nf4" if self.cached is None else f"cached={self.cached}"
            raise ValueError(
                f"teacher_streamed=true reads a 16-bit or 32-bit teacher's layers from host memory, which {other} does "
                "not have. Remove one of them."
            )
        if self.cached is not None and self.on_policy:
            raise ValueError(
                f"on_policy={self.on_policy:g} needs a teacher that reads the student's completions, but "
                f"cached={self.cached} has predictions for the data only. Set teacher instead of cached, or "
                "on_policy=0."
            )
        if self.cross_entropy_weight == 1:
            raise ValueError(
                "cross_entropy_weight=1 gives the teacher no weight in the loss. Set it below 1, or run finetune."
            )
        return self
