"""Means per source equal those of the logits by hand, for any chunks, batches and ranks, and change no whole mean."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lean_ft.data.by_source import BatchSources
from lean_ft.losses import (
    IGNORED_LABEL,
    TeacherStates,
    TokenStatistics,
    UnpairedStatistics,
    linear_cross_entropy,
    linear_distillation,
)
from lean_ft.losses.reward import add_scores
from lean_ft.system.shards import Ranks

NAMES = ("chats", "maths", "none")
SHAPE, DIM, VOCAB = (3, 17), 24, 101


def problem() -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Hidden states, an output layer, labels, and the source of each position."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((*SHAPE, DIM), (VOCAB, DIM)))
    labels = torch.randint(0, VOCAB, SHAPE, generator=generator)
    labels[torch.rand(SHAPE, generator=generator) < 0.3] = IGNORED_LABEL
    sources = torch.randint(0, 2, SHAPE, generator=generator)
    return hidden, weight, labels, torch.where(labels == IGNORED_LABEL, -1, sources).int().numpy()


def batch_of(positions: np.ndarray, rows: np.ndarray | None = None) -> Any:
    nothing = np.zeros(0, dtype=np.int32)
    return SimpleNamespace(sources=BatchSources(NAMES, nothing if rows is None else rows, positions))


def losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden.double() @ weight.double().T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED_LABEL)


@pytest.mark.parametrize("chunk_tokens", [0, 1, 7])
def test_tokens_have_the_means_of_the_plain_logits(chunk_tokens: int) -> None:
    hidden, weight, labels, sources = problem()
    whole, split = TokenStatistics(), TokenStatistics()
    settings = {"chunk_tokens": chunk_tokens, "z_loss": 0.0}
    for rows in split.following([batch_of(sources[:1]), batch_of(sources[1:])]):
        part = slice(0, 1) if len(rows.sources.of_positions) == 1 else slice(1, 3)
        found = [
            linear_cross_entropy(hidden[part], weight, labels[part], statistics=statistics, **settings)
            for statistics in (whole, split)
        ]
        assert found[0].equal(found[1])
    number = int((labels != IGNORED_LABEL).sum())
    means, expected = split.means(number, "eval_"), losses(hidden, weight, labels)
    assert means.keys() == {f"eval_{name}" for name in ("token_accuracy", "entropy", "loss/chats", "loss/maths")}
    for name, mean in whole.means(number, "eval_").items():
        assert mean.equal(means[name])  # the same bits
    for i, name in enumerate(NAMES[:2]):
        own = expected[torch.from_numpy(sources.ravel() == i)]
        assert means[f"eval_loss/{name}"].item() == pytest.approx(own.mean().item(), rel=1e-6)


def test_outside_of_an_evaluation_the_passes_are_unchanged() -> None:
    statistics, passes = TokenStatistics(), object()
    assert statistics.watched(passes) is passes  # pyright: ignore[reportArgumentType]
    for _ in statistics.following([SimpleNamespace(sources=None)]):  # pyright: ignore[reportArgumentType]
        assert statistics.watched(passes) is passes  # pyright: ignore[reportArgumentType]
        statistics.by_source(loss=torch.ones(2))
    assert statistics.means(1) == {}


def test_divergences_of_tokens_are_divided_by_source() -> None:
    hidden, weight, labels, sources = problem()
    teacher = TeacherStates(hidden.flip(0), weight.flip(0))
    statistics = TokenStatistics()
    for _ in statistics.following([batch_of(sources)]):
        linear_distillation(hidden, weight, labels, teacher, chunk_tokens=5, statistics=statistics)
    means = statistics.means(1)
    log_s, log_t = (states @ layer.T for states, layer in ((hidden, weight), (teacher.hidden, teacher.weight)))
    divergence = F.kl_div(log_s.log_softmax(2), log_t.log_softmax(2), reduction="none", log_target=True).sum(2)
    for i, name in enumerate(NAMES[:2]):
        own = divergence.flatten()[torch.from_numpy(sources.ravel() == i)]
        assert means[f"loss/{name}"].item() == pytest.approx(own.mean().item(), rel=1e-5)


class Two(Ranks):
    """A rank whose other rank has the same values."""

    size = 2

    def sum(self, values: Tensor) -> Tensor:
        return values * 2


def test_rows_have_means_of_their_own_on_several_ranks() -> None:
    values, rows = torch.tensor([1.0, float("nan"), 4.0, 7.0]), np.array([0, 1, 0, 0], dtype=np.int32)
    statistics, position = TokenStatistics(Two()), np.full((4, 1), -1, dtype=np.int32)
    filler = BatchSources(NAMES, rows, position).without_targets()
    for batch in statistics.following([batch_of(position, rows), SimpleNamespace(sources=filler)]):  # pyright: ignore
        own = values[: len(batch.sources.of_rows)]
        statistics.add(loss=own.sum())
        statistics.by_source(loss=own)
    means = statistics.means(8)
    assert means["loss/chats"].item() == 4.0  # a value of another source that is not a number changes nothing
    assert means["loss/maths"].isnan()
    assert "loss/none" not in means


def test_right_pairs_and_completions_are_counted_by_source() -> None:
    scores, rows = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]]), np.array([0, 0, 1], dtype=np.int32)
    pairs, position = TokenStatistics(), np.full((6, 1), -1, dtype=np.int32)
    for _ in pairs.following([batch_of(position, rows)]):
        add_scores(pairs, scores)
    means = pairs.means(3)
    assert [means[f"rewards/accuracies/{name}"].item() for name in NAMES[:2]] == [0.5, 0.5]

    gained, is_desirable = torch.tensor([3.0, 1.0, 2.0, 5.0, 0.0]), torch.tensor([True, False, False, True, False])
    completions = UnpairedStatistics()
    of_rows = np.array([0, 0, 0, 1, 1], dtype=np.int32)
    for _ in completions.following([batch_of(np.full((5, 1), -1, dtype=np.int32), of_rows)]):
        completions.count(is_desirable)
        completions.add_answers(gained, gained, is_desirable, 1.0)
    means = completions.answer_means("eval_")
    assert means["eval_rewards/accuracies/chats"].item() == 1.0  # 3 against 1 and 2
    assert means["eval_rewards/accuracies/maths"].item() == 1.0
    assert "eval_rewards/accuracies" in means
