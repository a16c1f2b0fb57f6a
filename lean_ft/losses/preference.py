"""Preference losses of a chosen and a rejected completion. To add one, copy a function and add a row to
`PREFERENCE_LOSSES` in `lean_ft/settings/losses.py`.

A loss gets `Pairs`: sums of log-probabilities under the model and a frozen reference, and the number of summed tokens.
Without a reference its sums are zeros. It also takes `beta` and its own settings with defaults, and returns (P,).
`loss.name` is the function's name.

In the formulas: s a sum of log-probabilities, n its tokens, d = s - the reference's, h = d_chosen - d_rejected.

Each function names its source. ipo and sigmoid_norm divide by a completion's tokens. So do the terms of cpo and orpo
for the chosen completion, which other implementations average over a batch including prompts.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from lean_ft.losses.answer_log_probs import Answers
from lean_ft.losses.reward import add_scores
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import PREFERENCE_LOSSES, PreferenceLossConfig
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import check_shape, is_function_path, load_function


class Pairs(NamedTuple):
    """P pairs: sums of log-probabilities and numbers of tokens, each (P,)."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    num_chosen: Tensor
    num_rejected: Tensor

    @property
    def gained(self) -> tuple[Tensor, Tensor]:
        """d of the chosen and of the rejected completions."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def margin(self) -> Tensor:
        """h."""
        chosen, rejected = self.gained
        return chosen - rejected

    @property
    def mean_margin(self) -> Tensor:
        """d per token of the chosen completions minus that of the rejected ones."""
        chosen, rejected = self.gained
        return chosen / self.num_chosen - rejected / self.num_rejected


def sigmoid(pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO: -log sigmoid(beta h). Rafailov et al. 2023, arXiv:2305.18290. label_smoothing: assumed share of swapped
    pairs (conservative DPO, Mitchell 2023)."""
    h = beta * pairs.margin
    return -(1 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)


def robust(pairs: Pairs, beta: float, label_smoothing: float = 0.1) -> Tensor:
    """DPO, unbiased if a share `label_smoothing` of pairs is swapped. Chowdhury et al. 2024, arXiv:2403.00409."""
    h = beta * pairs.margin
    biased = -(1 - label_smoothing) * logsigmoid(h) + label_smoothing * logsigmoid(-h)
    return biased / (1 - 2 * label_smoothing)


def ipo(pairs: Pairs, beta: float) -> Tensor:
    """(h per token - 1 / (2 beta))^2. Azar et al. 2023, arXiv:2310.12036; per token, as its authors confirmed to
    TRL."""
    return (pairs.mean_margin - 1 / (2 * beta)).square()


def hinge(pairs: Pairs, beta: float) -> Tensor:
    """max(0, 1 - beta h). Zhao et al. 2023 (SLiC), arXiv:2305.10425."""
    return relu(1 - beta * pairs.margin)


def sigmoid_norm(pairs: Pairs, beta: float) -> Tensor:
    """DPO of the margin per token. Lambert et al. 2024 (Tulu 3), arXiv:2411.15124."""
    return -logsigmoid(beta * pairs.mean_margin)


def apo_zero(pairs: Pairs, beta: float) -> Tensor:
    """Raise chosen and lower rejected completions; use it if the chosen ones are better than the model's. D'Oosterlinck
    et al. 2024, arXiv:2408.06266."""
    chosen, rejected = pairs.gained
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(pairs: Pairs, beta: float) -> Tensor:
    """Lower both, rejected completions more; use it if the chosen ones are worse than the model's. D'Oosterlinck et al.
    2024, arXiv:2408.06266."""
    chosen, _ = pairs.gained
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * pairs.margin)


def nca(pairs: Pairs, beta: float) -> Tensor:
    """Noise contrastive alignment: optimizes likelihoods, not only their ratio. Chen et al. 2024, arXiv:2402.05369."""
    chosen, rejected = (beta * d for d in pairs.gained)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(pairs: Pairs, beta: float) -> Tensor:
    """Binary classification of chosen and rejected completions. Jung et al. 2024, arXiv:2404.04656, without its running
    mean."""
    chosen, rejected = (beta * d for d in pairs.gained)
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def sppo(pairs: Pairs, beta: float) -> Tensor:
    """Self-play: moves d to 1 / (2 beta) if chosen, to -1 / (2 beta) if rejected. Wu et al. 2024, arXiv:2405.00675."""
    chosen, rejected = pairs.gained
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def exo(pairs: Pairs, beta: float, label_smoothing: float = 1e-3) -> Tensor:
    """Reverse KL between the model's preference and 1 - label_smoothing. Ji et al. 2024, arXiv:2402.00856."""
    h = beta * pairs.margin
    chosen = torch.sigmoid(h) * (logsigmoid(h) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-h) * (logsigmoid(-h) - math.log(label_smoothing))


def simpo(pairs: Pairs, beta: float, gamma: float = 1.375) -> Tensor:
    """-log sigmoid(beta (s_c/n_c - s_r/n_r) - gamma), without a reference. Meng et al. 2024, arXiv:2405.14734."""
    return -logsigmoid(beta * (pairs.chosen / pairs.num_chosen - pairs.rejected / pairs.num_rejected) - gamma)


def cpo(pairs: Pairs, beta: float, alpha: float = 1.0) -> Tensor:
    """DPO without a reference, plus alpha times the chosen completion's loss per token. Xu et al. 2024,
    arXiv:2401.08417."""
    return -logsigmoid(beta * (pairs.chosen - pairs.rejected)) - alpha * pairs.chosen / pairs.num_chosen


def orpo(pairs: Pairs, beta: float) -> Tensor:
    """The chosen completion's loss per token minus beta times the log-sigmoid of the log odds ratio, without a
    reference. Hong et al. 2024, arXiv:2403.07691."""
    chosen, rejected = pairs.chosen / pairs.num_chosen, pairs.rejected / pairs.num_rejected
    return -chosen - beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_probability: Tensor) -> Tensor:
    """Return log(p / (1 - p)), accurate for all p, with finite value and gradient if p rounds to 1."""
    # expm1 is accurate near p = 1, log1p near p = 0. Each branch is evaluated only where it is accurate.
    x = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    is_near_one = x > -math.log(2)
    near_one = torch.log(-torch.expm1(torch.where(is_near_one, x, -0.1)))
    further = torch.log1p(-torch.exp(torch.where(is_near_one, -1.0, x)))
    return x - torch.where(is_near_one, near_one, further)


LOSSES: dict[str, Callable[..., Tensor]] = {name: globals()[name] for name in PREFERENCE_LOSSES}


def preference_loss(
    name: str,
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    num_chosen: Tensor,
    num_rejected: Tensor,
    *,
    beta: float = 0.1,
    **settings: float,
) -> Tensor:
    """Return the loss `name` of each of P pairs.

    Args:
        name: one of `LOSSES`, or FILE.py:FUNCTION with the same signature.
        chosen, rejected: summed log-probabilities of the completions, (P,); may have gradients.
        reference_chosen, reference_rejected: the same under the reference, (P,); zeros without a reference.
        num_chosen, num_rejected: numbers of summed tokens, (P,).
        beta: larger values keep the model closer to the reference.
        settings: the loss's own settings (`label_smoothing`, `gamma`, `alpha`); defaults are the loss's.

    Returns:
        (P,), in the dtype of `chosen`.

    Raises:
        ValueError: for an unknown loss, a setting that it does not read, or a setting out of the range of its field.
    """
    loss = load_function(name, sigmoid) if is_function_path(name) else LOSSES.get(name)
    if loss is None:
        raise ValueError(f"unknown preference loss {name!r}.{did_you_mean(name, LOSSES)} Expected {', '.join(LOSSES)}.")
    PreferenceLossConfig.check(name, {"beta": beta, **settings})
    pairs = Pairs(chosen, rejected, reference_chosen, reference_rejected, num_chosen, num_rejected)
    losses = loss(pairs, beta, **settings)
    return losses if name in LOSSES else check_shape(name, losses, chosen.shape)


def pair_losses(
    loss: PreferenceLossConfig, answers: Answers, reference: Tensor, lengths: Tensor, statistics: TokenStatistics
) -> Tensor:
    """Return the loss of each of P pairs, (P,), and add their metrics, summed over pairs, to the statistics.

    answers: from `AnswerLogProbs`; reference: log-probabilities under the reference, (P, 2); lengths: tokens, (P, 2). A
    completion's reward is beta times its log-probability minus the reference's. A margin of 0 counts as half correct.
    """
    beta = loss.beta_of_loss
    columns = [column for both in (answers.log_probs, reference, lengths) for column in both.unbind(1)]
    losses = preference_loss(loss.name, *columns, beta=beta, **loss.own_settings)
    log_probs = answers.log_probs.detach()
    add_scores(statistics, beta * (log_probs - reference))
    statistics.add(**{f"logps/{side}": log_probs[:, i].sum() for i, side in enumerate(("chosen", "rejected"))})
    return losses * answers.weights
