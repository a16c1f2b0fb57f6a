"""Losses of single completions labeled desirable or not. To add one, copy a function.

A loss gets, for P completions, d (the sum of log-probabilities minus the reference's) and a baseline b, and returns (P,). It moves
desirable completions above the baseline and others below it.

    kto                b = max(0, the mean of d over the micro-batch's prompts, each with another prompt's completion)
    apo_zero_unpaired  b = 0: kto without a baseline
    bco                b = the mean of d over all completions of earlier steps: `RunningMean`

bco's mean leaves out the current step's completions, so that a step does not depend on its micro-batches.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_ft.losses.answer_log_probs import Answers
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.settings import UnpairedLossConfig
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.spelling import did_you_mean


def kto(gained: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta (d - b)), and of an undesirable answer 1 - sigmoid(beta (b - d)). Ethayarajh et al. 2024,
    arXiv:2402.01306, eq. 7."""
    above = beta * (gained - baseline)
    return torch.sigmoid(torch.where(is_desirable, -above, above))


def apo_zero_unpaired(gained: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta d), and of an undesirable answer sigmoid(beta d). D'Oosterlinck et al. 2024, arXiv:2408.06266."""
    return torch.sigmoid(beta * torch.where(is_desirable, -gained, gained))


def bco(gained: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (d - b)), and of an undesirable answer -log sigmoid(beta (b - d)). Jung et al. 2024,
    arXiv:2404.04656."""
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
    """The loss `name` of each of P answers.

    Args:
        name: one of `UNPAIRED_LOSSES`.
        gained: each answer's log-probability less the reference's, (P,); it may have gradients.
        is_desirable: (P,) bool.
        baseline: what it is compared with, a scalar without gradients; the module tells which.
        beta: how far the model may go from the reference; larger is nearer.
        desirable_weight, undesirable_weight: what an answer of either kind counts.

    Returns:
        (P,), in the type of `gained`.

    Raises:
        ValueError: for a loss that is not there.
    """
    if name not in UNPAIRED_LOSSES:
        raise ValueError(
            f"no loss of single answers is called '{name}'.{did_you_mean(name, UNPAIRED_LOSSES)} There are "
            f"{', '.join(UNPAIRED_LOSSES)}."
        )
    losses = UNPAIRED_LOSSES[name](gained, is_desirable, baseline, beta)
    return losses * torch.where(is_desirable, desirable_weight, undesirable_weight)


class RunningMean:
    """The mean of what was added to it, 0 before; it stays on the device, and goes into checkpoints."""

    def __init__(self, device: torch.device) -> None:
        self.mean = torch.zeros((), device=device)
        self._count = 0

    def add(self, mean: Tensor, count: int) -> None:
        """Adds `count` values by their mean, a scalar; one that is not finite, of a step that is skipped, changes nothing."""
        self._count += count
        moved = self.mean + (mean - self.mean) * (count / self._count)
        self.mean = torch.where(moved.isfinite(), moved, self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self._count = torch.full_like(self.mean, state["mean"]), state["count"]


class Baseline(RunningMean):
    """`baseline(model, batch)`: what the answers of a batch on the device are compared with, a scalar without gradients. Who
    trains adds the mean of what the answers of each step gained."""

    def __init__(self, loss: UnpairedLossConfig, log_probs: Any, reference: Any, device: torch.device) -> None:
        """Takes what gives the `Answers` of a batch, and what gives the frozen reference's log-probabilities."""
        super().__init__(device)
        self._loss, self._log_probs, self._reference = loss, log_probs, reference

    @torch.no_grad()
    def __call__(self, model: Any, batch: Any) -> Tensor:
        """batch: on the device, as `lean_ft.data.UnpairedBatch` is."""
        if self._loss.name == "bco":
            return self.mean
        if not self._loss.needs_mismatched or batch.mismatched is None:
            return torch.zeros_like(self.mean)
        gained = self._log_probs(model, batch.mismatched).log_probs - self._reference(batch.mismatched)
        # A single answer, at an epoch's end, has no other to be compared with.
        return gained.mean().clamp(min=0) * (batch.num_pairs > 1)


class UnpairedStatistics(TokenStatistics):
    """Adds up what the metrics tell of answers; their means are over the desirable or the undesirable ones."""

    def __init__(self, ranks: Ranks = ALONE, counted: Iterable[Any] = ()) -> None:
        """counted: the micro-batches of a step, of all ranks."""
        super().__init__(ranks)
        self.num_desirable = self.num_undesirable = self.num_compared = 0  # of all ranks
        for batch in counted:
            self.count(batch.is_desirable)

    def count(self, is_desirable: Tensor) -> None:
        """Counts the answers of a micro-batch of any rank, which are on the host."""
        desirable = int(is_desirable.sum())
        undesirable = len(is_desirable) - desirable
        self.num_desirable += desirable
        self.num_undesirable += undesirable
        self.num_compared += desirable * undesirable

    def total_counts(self) -> None:
        """Counts what each rank counted for all."""
        for name in ("num_desirable", "num_undesirable", "num_compared"):
            setattr(self, name, self._ranks.total(getattr(self, name)))

    @torch.no_grad()
    def add_answers(self, gained: Tensor, log_probs: Tensor, is_desirable: Tensor, beta: float) -> None:
        """Adds P answers of this rank, each (P,)."""
        wins = (gained[:, None] - gained).sign()  # (P, P): of the one in a row over the one in a column
        compared = is_desirable[:, None] & ~is_desirable
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
        """`loss`, `baseline` and `gain`, which are over all answers, and the rewards and log-probabilities of each kind where there are."""
        num_answers = self.num_desirable + self.num_undesirable
        counts = {"chosen": self.num_desirable, "rejected": self.num_undesirable, "accuracies": self.num_compared}
        means: dict[str, Tensor] = {}
        for name, mean in self.means(1).items():
            count = counts.get(name.rpartition("/")[2], num_answers)
            if count:
                means[prefix + name] = mean / count
        if self.num_desirable and self.num_undesirable:
            chosen, rejected = (means[f"{prefix}rewards/{side}"] for side in ("chosen", "rejected"))
            means[f"{prefix}rewards/margins"] = chosen - rejected
        return means


def answer_losses(
    loss: UnpairedLossConfig,
    answers: Answers,
    reference: Tensor,
    baseline: Tensor,
    is_desirable: Tensor,
    statistics: UnpairedStatistics,
) -> Tensor:
    """The loss of each of P answers, (P,), by what the settings say and what `AnswerLogProbs` made of the answers.

    reference (P, 1): log-probabilities under it; baseline: a scalar; is_desirable (P,). What the metrics tell is added to
    the statistics.
    """
    gained = (answers.log_probs - reference)[:, 0]
    statistics.add_answers(gained, answers.log_probs[:, 0], is_desirable, loss.beta)
    statistics.add(baseline=baseline * len(gained))
    return unpaired_loss(gained=gained, is_desirable=is_desirable, baseline=baseline, **loss.model_dump())
