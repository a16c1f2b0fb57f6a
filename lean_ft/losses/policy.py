"""Policy losses of sampled completions. To add one, copy a function and add it to `LOSSES`.

A loss gets `Answers`: log-probabilities now and before the update, and advantages. It returns a value per token, (B, T); `LOSSES`
states the denominator. Denominators are those of the whole step, also if a batch is a part of it.

In the formulas: r = exp(now - old), A the advantage, s the log of the ratio to the reference.

Each function names its source. `grpo` and `gspo` divide by the number of completions with a token in their mask; TRL divides by
all.

Shapes: B completions, T tokens of the longest, P prompts, G completions of each.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lean_ft.losses.statistics import TokenStatistics
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import check_shape, is_function_path, load_function

# Added to a standard deviation, as TRL does. If only a divergence in the reward differs within a group, its rounding error (3e-6
# over 8 tokens) then weighs 1% of a reward; with verl's 1e-6 it would weigh as much as a reward.
STD_FLOOR = 1e-4


class Answers(NamedTuple):
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


def grpo(answers: Answers, epsilon: float = 0.2, epsilon_high: float = 0.2) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), a mean over each answer's tokens and then over answers. Shao et al. 2024, arXiv:2402.03300."""
    ratio = answers.log_ratio.exp()
    return _clipped(ratio, answers.advantages, epsilon, epsilon_high), ratio


def dapo(answers: Answers, epsilon: float = 0.2, epsilon_high: float = 0.28) -> tuple[Tensor, Tensor]:
    """As grpo with more room upwards, a mean over all tokens of the step. Yu et al. 2025, arXiv:2503.14476."""
    return grpo(answers, epsilon, epsilon_high)


def dr_grpo(answers: Answers, epsilon: float = 0.2, epsilon_high: float = 0.2) -> tuple[Tensor, Tensor]:
    """As grpo, divided by answers times the longest that one may be, so that length gains nothing. Liu et al. 2025,
    arXiv:2503.20783."""
    return grpo(answers, epsilon, epsilon_high)


def gspo(answers: Answers, epsilon: float = 3e-4, epsilon_high: float = 4e-4) -> tuple[Tensor, Tensor]:
    """One ratio an answer, the geometric mean of its tokens'. Zheng et al. 2025, arXiv:2507.18071."""
    lengths = answers.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (answers.log_ratio.sum(1, keepdim=True) / lengths).exp()
    return _clipped(ratio, answers.advantages, epsilon, epsilon_high), ratio


def cispo(answers: Answers, epsilon_max: float = 5.0) -> tuple[Tensor, Tensor]:
    """-stop_gradient(min(r, epsilon_max)) A log p: the weight is clipped, and no token loses its gradient. MiniMax 2025,
    arXiv:2506.13585; 5 is ScaleRL's, arXiv:2510.13786."""
    ratio = answers.log_ratio.exp()
    return -ratio.clamp(max=epsilon_max).detach() * answers.advantages * answers.log_probs, ratio


def rloo(answers: Answers, epsilon: float = 0.2, epsilon_high: float = 0.2) -> tuple[Tensor, Tensor]:
    """REINFORCE of whole answers with a clipped ratio, a sum over an answer's tokens and a mean over answers; with advantages
    that leave one out. Ahmadian et al. 2024, arXiv:2402.14740."""
    ratio = answers.log_ratio.sum(1, keepdim=True).exp()
    lengths = answers.mask.sum(1, keepdim=True).clamp(min=1)
    # Its tokens add up to the answer's.
    return _clipped(ratio, answers.advantages, epsilon, epsilon_high) / lengths, ratio


Divided = Literal["answers", "tokens", "longest", "sums"]
LOSSES: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Divided]] = {
    "grpo": (grpo, "answers"),  # by an answer's tokens, then answers
    "dapo": (dapo, "tokens"),  # by the step's tokens
    "dr_grpo": (dr_grpo, "longest"),  # by answers times max_length
    "gspo": (gspo, "answers"),
    "cispo": (cispo, "tokens"),
    "rloo": (rloo, "sums"),  # by answers alone
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
    """The loss `name` of a step, a scalar. The losses of the parts of a step add up to the step's loss.

    Args:
        name: one of `LOSSES`, or FILE.py:FUNCTION: a function from `Answers` to a value per token, (B, T); the loss is
            their mean over the step's tokens.
        logps: log-probabilities of the sampled tokens, (B, T), with the temperature that they were sampled at.
        old_logps: the same before the first update on these answers, (B, T).
        advantages: of each answer, (B,), or of each token, (B, T).
        mask: (B, T), true on trained tokens.
        reference_logps: the same under the reference, (B, T), for `kl_weight` above 0.
        kl_weight: weight of the divergence from the reference.
        kl: its estimate per token, with s = logps - reference_logps: `k1` s, `k2` s^2 / 2, `k3` exp(-s) - 1 + s, or
            `corrected`, the ratio times k3, whose gradient alone is that of the divergence.
        weights: factors on the losses of tokens, (B, T) or (B, 1), such as `correction` gives; not on the divergence.
        max_length: the most tokens of a completion, for dr_grpo.
        num_answers, num_tokens: completions with a trained token and trained tokens of the step; None counts the given ones.
        statistics: where to add `kl` and `clip_share`, sums over tokens.
        settings: the loss's own (`epsilon`, `epsilon_high`, `epsilon_max`); the default is the loss's.

    Raises:
        ValueError: for an unknown loss, a setting that it does not read, or a missing argument.
    """
    if name not in LOSSES and not is_function_path(name):
        raise ValueError(
            f"no policy loss is called '{name}'.{did_you_mean(name, LOSSES)} There are {', '.join(LOSSES)}."
        )
    reads = () if is_function_path(name) else settings_of(name)
    for setting in settings:
        if setting not in reads:
            raise ValueError(f"the loss {name} does not read {setting}; it reads {', '.join(reads)}. Leave it out.")
    if kl not in KINDS_OF_KL:
        raise ValueError(f"kl={kl} is no estimate of a divergence; expected one of {', '.join(KINDS_OF_KL)}.")
    loss, divided = (_own(name), "tokens") if is_function_path(name) else LOSSES[name]
    if divided == "longest" and max_length is None:
        raise ValueError(f"the loss {name} divides by the longest answer that there may be: give max_length.")
    if kl_weight and reference_logps is None:
        raise ValueError(f"kl_weight={kl_weight:g} weighs the divergence from a reference: give reference_logps.")
    counted = mask.to(logps.dtype)
    lengths = counted.sum(1, keepdim=True)
    answers = Answers(logps, old_logps, advantages if advantages.ndim == 2 else advantages[:, None], counted)
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
    function = load_function(name)

    def loss(answers: Answers) -> tuple[Tensor, Tensor]:
        return check_shape(name, function(answers), answers.log_probs.shape), answers.log_ratio.exp()

    return loss


def batch_loss(
    cfg: Any,
    batch: Any,
    now: Any,
    reference: Tensor | None = None,
    *,
    num_answers: int | None = None,
    num_tokens: int,
    statistics: TokenStatistics | None = None,
) -> Tensor:
    """The share of its step's loss that a batch has, as `cfg.loss` and `cfg.generation` say.

    batch: on the device, as `lean_ft.data.PolicyBatch` is; now: what `TokenLogProbs` makes of it; reference (B, T), where the
    divergence from it stands in the loss; num_answers, num_tokens: of the step, the former for losses that are divided by it.
    """
    old = now.log_probs.detach() if batch.old is None else batch.old  # one update a round: they are the same
    weights = None
    if cfg.loss.correction != "none":
        weights = correction(old, batch.sampled, batch.counts, cfg.loss.correction, cfg.loss.correction_max)
    return policy_loss(
        cfg.loss.name,
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
        **cfg.loss.of_tokens,
    )


def _divergence(s: Tensor, ratio: Tensor, kind: str) -> Tensor:
    """Schulman's estimates, http://joschu.net/blog/kl-approx.html; in a loss k1's gradient is zero in the mean and k3's
    biased (Tang and Munos 2025, arXiv:2506.09477)."""
    if kind == "k1":
        return s
    if kind == "k2":
        return s.square() / 2
    k3 = (-s).exp() - 1 + s
    return k3 * ratio if kind == "corrected" else k3


def _is_clipped(name: str, ratio: Tensor, advantages: Tensor, settings: dict[str, float]) -> Tensor:
    """Which tokens (B, T) or answers (B, 1) the clip leaves without a gradient, or for cispo with a smaller one."""
    defaults = {p.name: p.default for p in inspect.signature(LOSSES[name][0]).parameters.values()}
    bounds = {**defaults, **settings}
    if "epsilon_max" in bounds:
        return (ratio > bounds["epsilon_max"]).to(ratio.dtype)
    low = (ratio < 1 - bounds["epsilon"]) & (advantages < 0)
    return (low | ((ratio > 1 + bounds["epsilon_high"]) & (advantages > 0))).to(ratio.dtype)


def settings_of(name: str) -> tuple[str, ...]:
    """What a loss reads of its own."""
    return tuple(inspect.signature(LOSSES[name][0]).parameters)[1:]


def advantages(rewards: Tensor, kind: Literal["group", "batch", "mean", "leave_one_out"]) -> Tensor:
    """How much better each of G answers to P prompts is than the others to its prompt, (P, G).

    rewards (P, G), NaN for an answer that has none: it is left out of the others' means and its own is 0. `group` divides by
    the standard deviation in the group, `batch` by that of all P * G, `mean` by nothing (Dr. GRPO); `leave_one_out` takes
    off the mean of the others, and divides by nothing.
    """
    has_one = ~rewards.isnan()
    counts = has_one.sum(1, keepdim=True)
    kept = torch.where(has_one, rewards, 0.0)
    means = kept.sum(1, keepdim=True) / counts.clamp(min=1)
    above = torch.where(has_one, rewards - means, 0.0)
    if kind == "leave_one_out":
        return above * counts / (counts - 1).clamp(min=1)
    if kind == "group":
        above = above / (_deviation(rewards, has_one, 1) + STD_FLOOR)
    elif kind == "batch":
        above = above / (_deviation(rewards.flatten()[None], has_one.flatten()[None], 1) + STD_FLOOR)
    return above


def _deviation(values: Tensor, counted: Tensor, dim: int) -> Tensor:
    """Bessel's standard deviation of the values that count; 0 for one alone."""
    counts = counted.sum(dim, keepdim=True)
    means = torch.where(counted, values, 0.0).sum(dim, keepdim=True) / counts.clamp(min=1)
    squares = torch.where(counted, values - means, 0.0).square().sum(dim, keepdim=True)
    return (squares / (counts - 1).clamp(min=1)).sqrt()


def correction(old_logps: Tensor, sampler_logps: Tensor, mask: Tensor, kind: str, bound: float = 2.0) -> Tensor:
    """Weights for answers that were sampled by other numbers than the trainer's (another engine, top-p), detached.

    exp(old - sampler) of each token, (B, T), or of the whole answer, (B, 1), by the first word of `kind`, token or sequence;
    where it is above `bound`, `truncate` makes it that and `mask` zero. Yao et al. 2025 (truncated importance sampling), and
    TRL's names for it.
    """
    level, _, what = kind.partition("_")
    log_ratio = ((old_logps - sampler_logps) * mask).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    return ratio.clamp(max=bound) if what == "truncate" else torch.where(ratio > bound, 0.0, ratio)
