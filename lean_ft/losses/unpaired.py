"""Losses of single completions labeled desirable or not. To add one, copy a function.

A loss gets, for P completions, d (the sum of log-probabilities minus the reference's) and a baseline b, and returns
(P,). It moves desirable completions above the baseline and others below it.

    kto                b = max(0, the mean of d over the micro-batch's prompts, each with another prompt's completion)
    apo_zero_unpaired  b = 0: kto without a baseline
    bco                b = the mean of d over all completions of earlier steps: `RunningMean`

bco's mean leaves out the current step's completions, so that a step does not depend on its micro-batches.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_ft.losses.answer_log_probs import Answers
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import UnpairedLossConfig
from lean_ft.system.passes import evaluating
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.spelling import did_you_mean

if TYPE_CHECKING:
    from lean_ft.data import PairBatch, UnpairedBatch
    from lean_ft.models import Decoder


def kto(gained: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta (d - b)) if desirable, else 1 - sigmoid(beta (b - d)). Ethayarajh et al. 2024, arXiv:2402.01306,
    eq. 7."""
    above = beta * (gained - baseline)
    return torch.sigmoid(torch.where(is_desirable, -above, above))


def apo_zero_unpaired(gained: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta d) if desirable, else sigmoid(beta d). D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return torch.sigmoid(beta * torch.where(is_desirable, -gained, gained))


def bco(gained: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (d - b)) if desirable, else -log sigmoid(beta (b - d)). Jung et al. 2024, arXiv:2404.04656."""
    above = beta * (gained - baseline)
    return -logsigmoid(torch.where(is_desirable, above, -above))


UNPAIRED_LOSSES: dict[str, Callable[..., Tensor]] = {loss.__name__: loss for loss in (kto, apo_zero_unpaired, bco)}


def unpaired_loss(
    name: str,
    gained: Tensor,
    is_desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the loss `name` of each of P completions.

    Args:
        name: one of `UNPAIRED_LOSSES`.
        gained: d, the log-probability minus the reference's, (P,); may have gradients.
        is_desirable: (P,) bool.
        baseline: b, a scalar without gradients.
        beta: larger values keep the model closer to the reference.
        desirable_weight, undesirable_weight: factors on the losses of each kind.

    Returns:
        (P,), in the dtype of `gained`.

    Raises:
        ValueError: if `name` is unknown.
    """
    if name not in UNPAIRED_LOSSES:
        names = ", ".join(UNPAIRED_LOSSES)
        raise ValueError(f"unknown unpaired loss {name!r}.{did_you_mean(name, UNPAIRED_LOSSES)} Expected {names}.")
    losses = UNPAIRED_LOSSES[name](gained, is_desirable, baseline, beta)
    return losses * torch.where(is_desirable, desirable_weight, undesirable_weight)


class RunningMean:
    """Running mean, initially 0. It stays on the device and is saved in checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self.mean = torch.zeros((), device=device)
        self._count = 0

    def add(self, mean: Tensor, count: int) -> None:
        """Add `count` values by their mean, a scalar. A mean that is not finite (a skipped step) is ignored."""
        self._count += count
        moved = self.mean + (mean - self.mean) * (count / self._count)
        self.mean = torch.where(moved.isfinite(), moved, self.mean)

    def state_dict(self) -> dict[str, Tensor | float]:
        return {"mean": self.mean, "count": self._count}

    def load_state_dict(self, state: dict[str, Tensor | float]) -> None:
        self.mean, self._count = torch.full_like(self.mean, float(state["mean"])), int(state["count"])


class Baseline(RunningMean):
    """`baseline(model, batch)` returns a batch's baseline b, a scalar without gradients.

    The trainer adds the mean of d over each step's completions.
    """

    def __init__(
        self,
        loss: UnpairedLossConfig,
        log_probs: Callable[["Decoder", "PairBatch"], Answers],
        reference: Callable[["UnpairedBatch"], Tensor],
        device: torch.device,
    ) -> None:
        """log_probs: computes the `Answers` of a batch; reference: returns the frozen reference's log-probabilities."""
        super().__init__(device)
        self._loss, self._log_probs, self._reference = loss, log_probs, reference

    def __call__(self, model: "Decoder", batch: "UnpairedBatch") -> Tensor:
        """batch: like `lean_ft.data.UnpairedBatch`, on the device."""
        if self._loss.name == "bco":
            return self.mean
        if not self._loss.needs_mismatched or batch.mismatched is None:
            return torch.zeros_like(self.mean)
        with evaluating(model):
            gained = self._log_probs(model, batch.mismatched).log_probs - self._reference(batch.mismatched)
        # A single completion, at the end of an epoch, has no mismatched prompt.
        return gained.mean().clamp(min=0) * (batch.num_pairs > 1)


class UnpairedStatistics(TokenStatistics):
    """Sums of completion metrics, averaged over the desirable or the undesirable completions."""

    def __init__(self, ranks: Ranks = ALONE, counted: Iterable["UnpairedBatch"] = ()) -> None:
        """counted: the micro-batches of a step, of all ranks."""
        super().__init__(ranks)
        self.num_desirable = self.num_undesirable = self.num_compared = 0  # of all ranks
        for batch in counted:
            self.count(batch.is_desirable)

    def count(self, is_desirable: Tensor) -> None:
        """Count the completions of a micro-batch of any rank. `is_desirable` is on the host."""
        desirable = int(is_desirable.sum())
        undesirable = len(is_desirable) - desirable
        self.num_desirable += desirable
        self.num_undesirable += undesirable
        self.num_compared += desirable * undesirable

    def total_counts(self) -> None:
        """Sum the counts over all ranks."""
        for name in ("num_desirable", "num_undesirable", "num_compared"):
            setattr(self, name, self._ranks.total(getattr(self, name)))

    @torch.no_grad()
    def add_answers(self, gained: Tensor, log_probs: Tensor, is_desirable: Tensor, beta: float) -> None:
        """Add P completions of this rank; arguments (P,)."""
        wins = (gained[:, None] - gained).sign()  # (P, P): row's completion against column's
        compared = is_desirable[:, None] & ~is_desirable
        self._of_sources.add_pairs(compared, **{"rewards/accuracies": (wins + 1) / 2})
        self.add(
            **{
                "rewards/chosen": (beta * gained * is_desirable).sum(),
                "rewards/rejected": (beta * gained * ~is_desirable).sum(),
                "rewards/accuracies": ((wins + 1) / 2 * compared).sum(),
                "gain": gained.sum(),
                "logps/chosen": (log_probs * is_desirable).sum(),
                "logps/rejected": (log_probs * ~is_desirable).sum(),
            }
        )

    def answer_means(self, prefix: str = "") -> dict[str, Tensor]:
        """Return `loss`, `baseline` and `gain` averaged over all completions, and the rewards and log-probabilities of
        each kind that occurs."""
        num_answers = self.num_desirable + self.num_undesirable
        counts = {"chosen": self.num_desirable, "rejected": self.num_undesirable, "accuracies": self.num_compared}
        means: dict[str, Tensor] = {}
        for name, mean in self._whole_means(1).items():
            count = counts.get(name.rpartition("/")[2], num_answers)
            if count:
                means[prefix + name] = mean / count
        if self.num_desirable and self.num_undesirable:
            chosen, rejected = (means[f"{prefix}rewards/{side}"] for side in ("chosen", "rejected"))
            means[f"{prefix}rewards/margins"] = chosen - rejected
        return means | self.source_means(prefix)


def answer_losses(
    loss: UnpairedLossConfig,
    answers: Answers,
    reference: Tensor,
    baseline: Tensor,
    is_desirable: Tensor,
    statistics: UnpairedStatistics,
) -> Tensor:
    """Return the loss of each of P completions, (P,), and add their metrics to the statistics.

    answers: from `AnswerLogProbs`; reference: log-probabilities under the reference, (P, 1); baseline: scalar;
    is_desirable: (P,).
    """
    gained = (answers.log_probs - reference)[:, 0]
    statistics.add_answers(gained, answers.log_probs[:, 0], is_desirable, loss.beta)
    statistics.add(baseline=baseline * len(gained))
    return unpaired_loss(gained=gained, is_desirable=is_desirable, baseline=baseline, **loss.model_dump())
