"""Metrics of held-out rows compared with sentence-transformers', SciPy and scikit-learn."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lean_ft.embedding.ranking import Correlation, Ranking, RowRanking
from lean_ft.parallel import join
from lean_ft.settings import ParallelConfig
from lean_ft.system.shards import ALONE, Ranks
from tests.losses.test_embedding import RECORDED
from tests.parallel.processes import on_ranks

CPU = torch.device("cpu")


def held_out() -> tuple[Tensor, Tensor]:
    """Vectors near those of their query, and identities with equal passages and queries. Equal texts have equal
    vectors."""
    num_rows, num_texts, generator = 40, 3, torch.Generator().manual_seed(0)
    vectors = torch.randn(num_rows, num_texts, 12, generator=generator, dtype=torch.float64)
    vectors[:, 1] += 0.5 * vectors[:, 0]
    identities = torch.arange(num_rows * num_texts).view(num_rows, num_texts)
    # An own passage of two queries; a negative that is another row's own passage; a query with two own passages; one
    # row twice.
    for (row, text), (as_row, as_text) in {
        (7, 1): (3, 1),
        (9, 2): (4, 1),
        (12, 0): (11, 0),
        **{(20, text): (21, text) for text in range(num_texts)},
    }.items():
        vectors[row, text], identities[row, text] = vectors[as_row, as_text], identities[as_row, as_text]
    return vectors, identities


def of_parts(metric: Any, *values: Tensor, sizes: tuple[int, ...] = (11, 0, 22, 7)) -> dict[str, float]:
    for part in zip(*(value.split(sizes) for value in values), strict=True):
        metric.add(*part)
    return metric.metrics()


def of_sentence_transformers() -> dict[str, float]:
    """The metrics of its evaluator of retrieval, from the similarities of all different texts."""
    evaluator = pytest.importorskip(
        "sentence_transformers.sentence_transformer.evaluation"
    ).InformationRetrievalEvaluator
    vectors, ids = held_out()
    scaled = torch.nn.functional.normalize(vectors, dim=-1)
    texts = {str(int(i)): vector for i, vector in zip(ids.flatten(), scaled.flatten(0, 1), strict=True)}
    queries = [str(i) for i in dict.fromkeys(ids[:, 0].tolist())]
    passages = [str(i) for i in dict.fromkeys(ids[:, 1:].flatten().tolist())]
    relevant = {q: {str(int(row[1])) for row in ids if str(int(row[0])) == q} for q in queries}
    results = [[{"corpus_id": p, "score": float(texts[q] @ texts[p])} for p in passages] for q in queries]
    at = {"accuracy_at_k": [], "precision_recall_at_k": [1, 10], "mrr_at_k": [10], "ndcg_at_k": [10], "map_at_k": []}
    stub = SimpleNamespace(queries=queries, queries_ids=queries, relevant_docs=relevant, **at)
    stub.compute_dcg_at_k = evaluator.compute_dcg_at_k
    found = evaluator.compute_metrics(stub, results)
    names = ("ndcg@10", "mrr@10", "recall@1", "recall@10")
    return {f"eval_{name}": float(found[f"{name.partition('@')[0]}@k"][int(name.partition("@")[2])]) for name in names}


@pytest.mark.parametrize("chunk_rows", [7, 1000])
def test_retrieval_is_the_recorded_one_of_sentence_transformers(chunk_rows: int) -> None:
    found = of_parts(Ranking(chunk_rows=chunk_rows), *held_out())
    assert found == pytest.approx(RECORDED["ranking"])
    assert 0.1 < found["eval_recall@1"] < found["eval_recall@10"] < 1


@pytest.mark.long
def test_the_record_is_that_of_sentence_transformers() -> None:
    assert of_sentence_transformers() == pytest.approx(RECORDED["ranking"])


def test_the_place_of_the_only_right_passage_decides() -> None:
    """Passages at angles from the query: that of row 0 is 1st of 4, that of row 1 is 3rd."""
    angles = torch.tensor([[0.0, 0.1, 0.9], [0.0, 0.5, 0.4]], dtype=torch.float64)
    vectors = torch.stack((angles.cos(), angles.sin()), -1)
    found = of_parts(Ranking(recall_at=(1, 2, 3), cutoff=3), vectors, torch.arange(6).view(2, 3), sizes=(1, 1))
    assert found == pytest.approx(
        {
            "eval_ndcg@3": (1 + 1 / 2) / 2,
            "eval_mrr@3": (1 + 1 / 3) / 2,
            "eval_recall@1": 0.5,
            "eval_recall@2": 0.5,
            "eval_recall@3": 1.0,
        }
    )


def test_all_own_passages_of_a_query_are_right() -> None:
    """Two rows with one query: their passages are 1st and 3rd, and a negative is 2nd."""
    angles = torch.tensor([[0.0, 0.1, 0.2], [0.0, 0.3, 0.9]], dtype=torch.float64)
    vectors = torch.stack((angles.cos(), angles.sin()), -1)
    found = of_parts(Ranking(recall_at=(1, 2, 3), cutoff=3), vectors, torch.tensor([[0, 1, 2], [0, 3, 4]]), sizes=(2,))
    best = 1 + 1 / math.log2(3)
    expected = {"eval_ndcg@3": 1.5 / best, "eval_mrr@3": 1.0}
    assert found == pytest.approx(expected | {"eval_recall@1": 0.5, "eval_recall@2": 0.5, "eval_recall@3": 1.0})


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_model_that_cannot_tell_texts_apart_finds_nothing(value: float) -> None:
    vectors, ids = torch.full((20, 2, 4), value), torch.arange(40).view(20, 2)
    assert set(of_parts(Ranking(), vectors, ids, sizes=(20,)).values()) == {0.0}
    scores, labels = torch.full((20, 12), value), torch.eye(12)[torch.arange(20) % 12]
    assert set(of_parts(RowRanking(), scores, labels, sizes=(20,)).values()) == {0.0}
    assert of_parts(Correlation(), vectors, torch.arange(20.0)[:, None], sizes=(20,)) == {"eval_spearman": None}


def test_without_rows_there_is_no_metric() -> None:
    assert Ranking().metrics() == Correlation().metrics() == RowRanking().metrics() == {}
    equal = of_parts(RowRanking(), torch.randn(3, 2), torch.ones(3, 2), sizes=(3,))
    assert equal == {}


def test_spearman_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    vectors = held_out()[0][:, :2].contiguous()
    vectors[5] = vectors[6]  # equal cosines
    scores = (torch.arange(40.0) % 6 / 5)[:, None]
    cosines = torch.nn.functional.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1)
    expected = stats.spearmanr(cosines, scores.flatten()).statistic
    assert of_parts(Correlation(), vectors, scores) == pytest.approx({"eval_spearman": expected}, abs=1e-12)


def test_the_order_within_rows_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 4, (40, 14), generator=generator).double()
    scores = torch.randn(40, 14, generator=generator) + 0.3 * labels
    mrr, first = 0.0, 0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        order = sorted(range(14), key=lambda i: -row[i])
        place = next(i for i, at in enumerate(order) if label[at] == max(label))
        first, mrr = first + (place == 0), mrr + (place < 10) / (place + 1)
    found = of_parts(RowRanking(), scores, labels)
    expected = {
        "eval_accuracy@1": first / 40,
        "eval_mrr@10": mrr / 40,
        "eval_ndcg@10": metrics.ndcg_score(labels.numpy(), scores.numpy(), k=10),
    }
    assert found == pytest.approx(expected)


def all_metrics(ranks: Ranks) -> list[dict[str, float]]:
    """Each rank adds its rows: 13 at a time, of which a rank may have none."""
    vectors, ids = held_out()
    scores = (torch.arange(40.0) % 6 / 5)[:, None]
    ranking, correlation, order = Ranking(ranks, chunk_rows=7), Correlation(ranks), RowRanking(ranks)
    size, place = ranks.size // ranks.num_sharing, ranks.rank // ranks.num_sharing
    for first in range(0, 40 + 13 * size, 13 * size):
        rows = slice(first + 13 * place, first + 13 * (place + 1))
        ranking.add(vectors[rows], ids[rows])
        correlation.add(vectors[rows, :2], scores[rows])
        order.add(vectors[rows, 0], vectors[rows, 1])
    return [metric.metrics() for metric in (ranking, correlation, order)]


def on_each_rank(context: int) -> list[dict[str, float]]:
    return all_metrics(join(ParallelConfig(context=context), CPU))


@pytest.mark.long
@pytest.mark.parametrize(("size", "context"), [(2, 1), (4, 2)])
def test_several_ranks_have_the_metrics_of_one(size: int, context: int) -> None:
    alone = all_metrics(ALONE)
    for found in on_ranks(size, on_each_rank, context):
        for metrics, expected in zip(found, alone, strict=True):
            assert metrics == pytest.approx(expected, abs=1e-12)
