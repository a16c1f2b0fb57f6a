"""Policy losses of sampled completions. To add one, copy a function and add it to `LOSSES`.

A loss gets `SampledTokens`: log-probabilities now and before the update, and advantages. It returns a value per token,
(B, T); `LOSSES` states the denominator. Denominators are those of the whole step, also if a batch is a part of it.

In the formulas: r = exp(now - old), A the advantage, s the log of the ratio to the reference.

Each function names its source. `grpo` and `gspo` divide by the number of completions with a token in their mask; TRL
divides by all.

Shapes: B completions, T tokens of the longest, P prompts, G completions of each.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.statistics import TokenStatistics
from lean_ft.losses.token_log_probs import AnswerTokens
from lean_ft.settings import OnlineConfig, PolicyLossConfig
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import check_shape, is_function_path, load_function

if TYPE_CHECKING:
    from lean_ft.data import PolicyBatch

# Added to a standard deviation, as TRL does. If only a divergence in the reward differs within a group, its rounding
# error (3e-6 over 8 tokens) then weighs 1% of a reward; with verl's 1e-6 it would weigh as much as a reward.
STD_FLOOR = 1e-4


class SampledTokens(NamedTuple):
    """B completions; values outside the mask can be anything finite."""

    log_probs: Tensor  # (B, T), with gradients
    old: Tensor  # (B, T): before the first update
    advantages: Tensor  # (B, T) or (B, 1)
    mask: Tensor  # (B, T) in the type of log_probs: 1 on trained tokens

    @property
    def log_ratio(self) -> Tensor:
        return (self.log_probs - self.old) * self.mask


def _clipped(ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


def grpo(answers: SampledTokens, epsilon: float = 0.2, epsilon_high: float = 0.2) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), averaged over each completion's tokens, then over completions. Shao et al. 2024,
    arXiv:2402.03300."""
    ratio = answers.log_ratio.exp()
    return _clipped(ratio, answers.advantages, epsilon, epsilon_high), ratio


def dapo(answers: SampledTokens, epsilon: float = 0.2, epsilon_high: float = 0.28) -> tuple[Tensor, Tensor]:
    """grpo with a higher upper clip bound, averaged over all tokens of the step. Yu et al. 2025, arXiv:2503.14476."""
    return grpo(answers, epsilon, epsilon_high)


def dr_grpo(answers: SampledTokens, epsilon: float = 0.2, epsilon_high: float = 0.2) -> tuple[Tensor, Tensor]:
    """grpo divided by the number of completions times `max_length`, which removes the length bias. Liu et al. 2025,
    arXiv:2503.20783."""
    return grpo(answers, epsilon, epsilon_high)


def gspo(answers: SampledTokens, epsilon: float = 3e-4, epsilon_high: float = 4e-4) -> tuple[Tensor, Tensor]:
    """One ratio per completion, the geometric mean of its token ratios. Zheng et al. 2025, arXiv:2507.18071."""
    lengths = answers.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (answers.log_ratio.sum(1, keepdim=True) / lengths).exp()
    return _clipped(ratio, answers.advantages, epsilon, epsilon_high), ratio


def cispo(answers: SampledTokens, epsilon_max: float = 5.0) -> tuple[Tensor, Tensor]:
    """-stop_gradient(min(r, epsilon_max)) A log p: clips the weight, so every token keeps its gradient. MiniMax 2025,
    arXiv:2506.13585; the default 5 is from ScaleRL, arXiv:2510.13786."""
    ratio = answers.log_ratio.exp()
    return -ratio.clamp(max=epsilon_max).detach() * answers.advantages * answers.log_probs, ratio


def rloo(answers: SampledTokens, epsilon: float = 0.2, epsilon_high: float = 0.2) -> tuple[Tensor, Tensor]:
    """REINFORCE of whole completions with a clipped ratio and leave-one-out advantages, averaged over completions.
    Ahmadian et al. 2024, arXiv:2402.14740."""
    ratio = answers.log_ratio.sum(1, keepdim=True).exp()
    lengths = answers.mask.sum(1, keepdim=True).clamp(min=1)
    # The tokens' values add up to the completion's loss.
    return _clipped(ratio, answers.advantages, epsilon, epsilon_high) / lengths, ratio


Divided = Literal["answers", "tokens", "longest", "sums"]
LOSSES: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Divided]] = {
    "grpo": (grpo, "answers"),  # a completion's tokens, then the number of completions
    "dapo": (dapo, "tokens"),  # the step's tokens
    "dr_grpo": (dr_grpo, "longest"),  # completions times max_length
    "gspo": (gspo, "answers"),
    "cispo": (cispo, "tokens"),
    "rloo": (rloo, "sums"),  # completions
}
KINDS_OF_KL = ("corrected", "k1", "k2", "k3")


def policy_loss(
    name: str,
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    reference_logps: Tensor | None = None,
    kl_weight: float = 0.0,
    kl: str = "corrected",
    weights: Tensor | None = None,
    max_length: int | None = None,
    num_answers: int | None = None,
    num_tokens: int | None = None,
    statistics: TokenStatistics | None = None,
    **settings: float,
) -> Tensor:
    """Return the loss `name` of a step, a scalar. The losses of the parts of a step add up to the step's loss.

    Args:
        name: one of `LOSSES`, or FILE.py:FUNCTION: a function from `SampledTokens` to a value per token, (B, T); the
            loss is their mean over the step's tokens.
        logps: log-probabilities of the sampled tokens, (B, T), at the sampling temperature.
        old_logps: log-probabilities before the first update on these completions, (B, T).
        advantages: per completion, (B,), or per token, (B, T).
        mask: (B, T), true on trained tokens.
        reference_logps: log-probabilities under the reference, (B, T); required if `kl_weight` is above 0.
        kl_weight: weight of the divergence from the reference.
        kl: its estimate per token, with s = logps - reference_logps: `k1` s, `k2` s^2 / 2, `k3` exp(-s) - 1 + s, or
            `corrected`, the ratio times k3, whose mean gradient is that of the divergence, also after updates.
        weights: factors on the token losses, (B, T) or (B, 1), such as those from `correction`; not on the divergence.
        max_length: maximum tokens of a completion, for dr_grpo.
        num_answers, num_tokens: the step's completions with a trained token, and its trained tokens; None counts the
            given ones.
        statistics: receives `kl` and `clip_share`, sums over tokens.
        settings: the loss's own settings (`epsilon`, `epsilon_high`, `epsilon_max`); defaults are the loss's.

    Raises:
        ValueError: for an unknown loss, a setting that it does not read, or a missing argument.
    """
    if name not in LOSSES and not is_function_path(name):
        raise ValueError(f"unknown policy loss {name!r}.{did_you_mean(name, LOSSES)} Expected {', '.join(LOSSES)}.")
    PolicyLossConfig.check(name, settings)
    if kl not in KINDS_OF_KL:
        raise ValueError(f"kl is {kl!r}; expected one of {', '.join(KINDS_OF_KL)}.")
    loss, divided = (_own(name), "tokens") if is_function_path(name) else LOSSES[name]
    if divided == "longest" and max_length is None:
        raise ValueError(f"the loss {name} divides by the maximum length of completions. Pass max_length.")
    if kl_weight and reference_logps is None:
        raise ValueError(f"kl_weight={kl_weight:g} needs a reference model. Pass reference_logps, or kl_weight=0.")
    counted = mask.to(logps.dtype)
    lengths = counted.sum(1, keepdim=True)
    answers = SampledTokens(logps, old_logps, advantages if advantages.ndim == 2 else advantages[:, None], counted)
    losses, ratio = loss(answers, **settings)
    if weights is not None:
        losses = losses * weights
    divergence = None
    if reference_logps is not None:
        divergence = _divergence((logps - reference_logps) * counted, ratio, kl)
        losses = losses + kl_weight * divergence
    if statistics is not None:
        statistics.add(**({} if divergence is None else {"kl": (divergence * counted).sum()}))
        if not is_function_path(name):
            clips = _is_clipped(name, ratio.detach(), answers.advantages, settings) * counted
            statistics.add(clip_share=clips.sum())

    if divided == "tokens":
        return (losses * counted).sum() / (max(1, int(lengths.sum())) if num_tokens is None else num_tokens)
    if num_answers is None:
        num_answers = max(1, int((lengths > 0).sum()))
    if divided == "answers":
        return (losses * counted / lengths.clamp(min=1)).sum() / num_answers
    return (losses * counted).sum() / (num_answers * (max_length if divided == "longest" and max_length else 1))


def _own(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    function = load_function(name, lambda answers: LOSSES["grpo"][0](answers)[0])

    def loss(answers: SampledTokens) -> tuple[Tensor, Tensor]:
        return check_shape(name, function(answers), answers.log_probs.shape), answers.log_ratio.exp()

    return loss


def batch_loss(
    cfg: OnlineConfig,
    batch: "PolicyBatch",
    now: AnswerTokens,
    reference: Tensor | None = None,
    *,
    num_answers: int | None = None,
    num_tokens: int,
    statistics: TokenStatistics | None = None,
) -> Tensor:
    """Return a batch's part of the step's loss, with the settings of `cfg`, whose loss is a `PolicyLossConfig`.

    batch: like `lean_ft.data.PolicyBatch`, on the device; now: the output of `TokenLogProbs`; reference: (B, T), if the
    loss includes the divergence; num_answers, num_tokens: counts of the step; num_answers only for losses that divide
    by it.
    """
    loss, weights = cfg.needed(PolicyLossConfig), None
    old = now.log_probs.detach() if batch.old is None else batch.old  # equal with one update per round
    if loss.correction != "none":
        weights, limited = correction(old, batch.sampled, batch.counts, loss.correction, loss.correction_max)
        if statistics is not None:
            statistics.add(correction_share=(limited * batch.counts).sum())
    return policy_loss(
        loss.name,
        now.log_probs,
        old,
        batch.advantages,
        batch.counts,
        reference_logps=reference,
        weights=weights,
        max_length=cfg.generation.max_new_tokens,
        num_answers=num_answers,
        num_tokens=num_tokens,
        statistics=statistics,
        **loss.of_tokens,
    )


def _divergence(s: Tensor, ratio: Tensor, estimator: str) -> Tensor:
    """Return Schulman's estimates of the divergence, http://joschu.net/blog/kl-approx.html. As a loss, k1's gradient
    has mean zero and k3's is biased (Tang and Munos 2025, arXiv:2506.09477)."""
    if estimator == "k1":
        return s
    if estimator == "k2":
        return s.square() / 2
    k3 = (-s).exp() - 1 + s
    return k3 * ratio if estimator == "corrected" else k3


def _is_clipped(name: str, ratio: Tensor, advantages: Tensor, settings: dict[str, float]) -> Tensor:
    """Mark the tokens (B, T) or completions (B, 1) whose gradient the clip removes, or for cispo reduces."""
    defaults = {p.name: p.default for p in inspect.signature(LOSSES[name][0]).parameters.values()}
    bounds = {**defaults, **settings}
    if "epsilon_max" in bounds:
        return (ratio > bounds["epsilon_max"]).to(ratio.dtype)
    low = (ratio < 1 - bounds["epsilon"]) & (advantages < 0)
    return (low | ((ratio > 1 + bounds["epsilon_high"]) & (advantages > 0))).to(ratio.dtype)


def advantages(rewards: Tensor, kind: Literal["group", "batch", "mean", "leave_one_out"]) -> Tensor:
    """Return the advantages of G completions of each of P prompts within their group, (P, G).

    rewards: (P, G), NaN for none: such a completion is excluded from the statistics, and its advantage is 0. `group`
    subtracts the group's mean and divides by its standard deviation, `batch` divides by the standard deviation of all P
    * G, `mean` does not divide (Dr. GRPO). `leave_one_out` subtracts the mean of the others and does not divide.
    """
    has_one = ~rewards.isnan()
    counts = has_one.sum(1, keepdim=True)
    kept = torch.where(has_one, rewards, 0.0)
    means = kept.sum(1, keepdim=True) / counts.clamp(min=1)
    above = torch.where(has_one, rewards - means, 0.0)
    if kind == "leave_one_out":
        return above * counts / (counts - 1).clamp(min=1)
    if kind == "group":
        above = above / (deviation(rewards, has_one, 1) + STD_FLOOR)
    elif kind == "batch":
        above = above / (deviation(rewards.flatten()[None], has_one.flatten()[None], 1) + STD_FLOOR)
    return above


def deviation(values: Tensor, counted: Tensor, dim: int) -> Tensor:
    """Return the Bessel-corrected standard deviation of the counted values; 0 for a single value."""
    counts = counted.sum(dim, keepdim=True)
    means = torch.where(counted, values, 0.0).sum(dim, keepdim=True) / counts.clamp(min=1)
    squares = torch.where(counted, values - means, 0.0).square().sum(dim, keepdim=True)
    return (squares / (counts - 1).clamp(min=1)).sqrt()


def correction(
    old_logps: Tensor, sampler_logps: Tensor, mask: Tensor, mode: str, bound: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Return importance weights for completions sampled with other probabilities than the trainer's (another engine,
    older weights, top-p), and whether each was limited.

    mode: LEVEL_ACTION, with TRL's names. The weight is exp(old - sampler) per token, (B, T), with the level `token`, or
    per completion, (B, 1), with `sequence`. Above `bound`, `truncate` sets it to `bound` and `mask` to zero. Weights
    have no gradient. Yao et al. 2025 (truncated importance sampling).
    """
    level, _, what = mode.partition("_")
    log_ratio = ((old_logps - sampler_logps) * mask).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    limited = ratio > bound
    return torch.where(limited, bound if what == "truncate" else 0.0, ratio), limited
