"""Losses of embeddings compared with sentence-transformers', their memory, and what is left out of InfoNCE.

make_sentence_transformers_values.py records its results, since importing it takes 10 s.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lean_ft.losses import embedding
from lean_ft.losses.embedding import check_matryoshka, check_scores, embedding_loss, infonce
from lean_ft.settings.embedding_losses import EMBEDDING_LOSSES, EmbeddingLossConfig
from tests.losses.test_linear_cross_entropy import PeakMemory

RECORDED = json.loads(Path(__file__).with_name("sentence_transformers_values.json").read_text())
ROWS, WIDTH = 11, 16
ALL = ["query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc"]


class Lazy:
    """A module that is imported when it is used: sentence-transformers takes 10 s."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self.name), attribute)


reference = Lazy("sentence_transformers.sentence_transformer.losses")
util = Lazy("sentence_transformers.util")


class Columns(nn.Module):
    """Stands for a SentenceTransformer whose features are the vectors."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self) -> int:
        return WIDTH


def rows(negatives: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors that need gradients, scores with ties, and different texts."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(ROWS, 2 + negatives, WIDTH, generator=generator, dtype=torch.float64)
    vectors[:, 1:] += 0.3 * vectors[:, :1]
    scores = torch.randint(0, 6, (ROWS, 1 + negatives), generator=generator) / 5
    identities = torch.arange(ROWS * (2 + negatives)).view(ROWS, -1)
    return vectors.to(dtype).requires_grad_(), scores, identities


def with_gradient(loss: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, vectors, retain_graph=True)[0]


Make = Callable[[nn.Module], nn.Module]
Case = tuple[dict[str, Any], int, Make]


def mnrl(negatives: int, ours: dict[str, Any] | None = None, scale: float = 20.0, **theirs: Any) -> Case:
    """InfoNCE with arguments of sentence-transformers, and settings that have other names."""
    same = {"directions", "partition_mode", "hardness_mode", "hardness_strength"}
    settings = {name: value for name, value in theirs.items() if name in same}
    theirs = theirs | ({"directions": tuple(theirs["directions"])} if "directions" in theirs else {})
    make: Make = lambda model: reference.MultipleNegativesRankingLoss(model, scale=scale, **theirs)  # noqa: E731
    return {**settings, **(ours or {})}, negatives, make


def matryoshka(case: Case) -> Case:
    settings, negatives, make = case
    sizes, weights = [16, 8, 3], [1.0, 0.5, 0.25]
    return (
        {**settings, "matryoshka": sizes, "matryoshka_weights": weights},
        negatives,
        lambda model: reference.MatryoshkaLoss(model, make(model), sizes, weights),
    )


MODES = ("in_batch_negatives", "hard_negatives", "all_negatives")
BOTH = ["query_to_doc", "doc_to_query"]
CASES: dict[str, Case] = {
    "pairs": mnrl(0),
    "hard negatives": mnrl(3, {"temperature": 0.02}, scale=50.0),
    **{f"joint, {negatives}": mnrl(negatives, directions=ALL) for negatives in (0, 1, 3)},
    **{f"{one}, joint": mnrl(1, directions=["query_to_doc", one]) for one in ALL[1:]},
    **{f"each, {n}": mnrl(n, directions=BOTH, partition_mode="per_direction") for n in (0, 1, 3)},
    **{f"{mode}, {n}": mnrl(n, hardness_mode=mode, hardness_strength=4.0) for mode in MODES for n in (1, 3)},
    "in_batch_negatives, 0": mnrl(0, hardness_mode="in_batch_negatives", hardness_strength=9.0),
    "hardness, joint": mnrl(3, directions=ALL, hardness_mode="all_negatives", hardness_strength=4.0),
    "hardness, each": mnrl(
        1, directions=BOTH, partition_mode="per_direction", hardness_mode="hard_negatives", hardness_strength=5.0
    ),
    "hardness, default": mnrl(1, {"hardness_strength": None}, hardness_mode="hard_negatives", hardness_strength=5.0),
    "cosent": ({"name": "cosent"}, 0, lambda m: reference.CoSENTLoss(m)),
    "cosent, temperature": ({"name": "cosent", "temperature": 0.1}, 0, lambda m: reference.CoSENTLoss(m, scale=10.0)),
    "triplet": ({"name": "triplet"}, 1, lambda m: reference.TripletLoss(m)),
    "triplet, cosine": (
        {"name": "triplet", "distance": "cosine", "margin": 0.3},
        1,
        lambda m: reference.TripletLoss(m, reference.TripletDistanceMetric.COSINE, 0.3),
    ),
    "triplet, manhattan": (
        {"name": "triplet", "distance": "manhattan", "margin": 1.0},
        1,
        lambda m: reference.TripletLoss(m, reference.TripletDistanceMetric.MANHATTAN, 1.0),
    ),
    "margin_mse": ({"name": "margin_mse"}, 1, lambda m: reference.MarginMSELoss(m)),
    "margin_mse, cosine": (
        {"name": "margin_mse", "similarity": "cosine"},
        3,
        lambda m: reference.MarginMSELoss(m, util.pairwise_cos_sim),
    ),
    "kl": ({"name": "kl"}, 3, lambda m: reference.DistillKLDivLoss(m)),
    "kl, temperatures": (
        {"name": "kl", "temperature": 0.5, "teacher_temperature": 0.2, "similarity": "cosine"},
        1,
        lambda m: reference.DistillKLDivLoss(
            m, util.pairwise_cos_sim, student_temperature=0.5, teacher_temperature=0.2
        ),
    ),
}
CASES |= {
    f"matryoshka of {name}": matryoshka(CASES[name]) for name in ("hard negatives", "joint, 1", "cosent", "triplet")
}
CASES["matryoshka of kl"] = matryoshka(CASES["kl"])


def of_sentence_transformers(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss of a case and its gradient."""
    _, negatives, make = CASES[name]
    vectors, scores, _ = rows(negatives, dtype)
    labels = (scores if negatives else scores[:, 0]).to(dtype)
    return with_gradient(make(Columns())([{"vectors": column} for column in vectors.unbind(1)], labels), vectors)


def ours(name: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """The same, for InfoNCE in several chunks and in one."""
    settings, negatives, _ = CASES[name]
    vectors, scores, identities = rows(negatives, dtype)
    for chunk_rows in (4, ROWS) if settings.get("name", "infonce") == "infonce" else (None,):
        cfg = EmbeddingLossConfig(**settings, chunk_rows=chunk_rows)
        found = embedding_loss(vectors, scores, identities, cfg, normalizes=False)
        assert found.num_masked == 0
        yield with_gradient(found.loss, vectors)


def in_short(loss: Tensor, gradient: Tensor) -> list[float]:
    """Numbers that a file keeps of a loss and its gradient: the norm and a weighted sum."""
    weights = torch.arange(1, 1 + gradient.numel(), dtype=torch.float64).sqrt().view_as(gradient)
    return [loss.item(), gradient.norm().item(), (gradient * weights).sum().item()]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_recorded_ones_of_sentence_transformers(name: str) -> None:
    for loss, gradient in ours(name, torch.float64):
        assert in_short(loss, gradient) == pytest.approx(RECORDED["embedding"][name], rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_sentence_transformers(name: str) -> None:
    for dtype, of_value, of_gradient in ((torch.float32, 1e-6, 1e-5), (torch.float64, 1e-12, 1e-10)):
        expected, expected_gradient = of_sentence_transformers(name, dtype)
        for loss, gradient in ours(name, dtype):
            torch.testing.assert_close(loss, expected, rtol=of_value, atol=of_value)
            assert (gradient - expected_gradient).norm() / expected_gradient.norm() < of_gradient
    assert in_short(expected, expected_gradient) == pytest.approx(RECORDED["embedding"][name], rel=1e-9)


@pytest.mark.long
def test_vectors_that_a_model_scales_are_compared_as_it_returns_them() -> None:
    """sentence-transformers' losses get the outputs of a model, whose last module may scale them."""
    vectors, scores, identities = rows(1, torch.float64)
    columns = [{"vectors": column} for column in nn.functional.normalize(vectors, dim=-1).unbind(1)]
    for name, loss_class in (("triplet", "TripletLoss"), ("margin_mse", "MarginMSELoss")):
        make = getattr(reference, loss_class)
        loss, _ = embedding_loss(vectors, scores, identities, EmbeddingLossConfig(name=name))
        torch.testing.assert_close(loss, make(Columns())(columns, scores.double()))


@pytest.mark.long
def test_the_triplet_loss_of_several_negatives_is_the_mean_of_their_losses() -> None:
    vectors, scores, identities = rows(3, torch.float64)
    loss, _ = embedding_loss(vectors, scores, identities, EmbeddingLossConfig(name="triplet"), normalizes=False)
    columns = vectors.unbind(1)
    theirs = [
        reference.TripletLoss(Columns())([{"vectors": one} for one in (*columns[:2], negative)], scores)
        for negative in columns[2:]
    ]
    torch.testing.assert_close(loss, torch.stack(theirs).mean())


@pytest.mark.parametrize("directions", [ALL[:1], ALL], ids=len)
def test_duplicates_of_the_own_passage_are_no_negatives(directions: list[Any]) -> None:
    """A loop over rows and texts. Rows 0 and 2 have the same own passage, which row 5 has as a negative; rows 1 and 3
    have the same query, and row 4 its own passage as a negative too."""
    vectors, scores, identities = rows(1, torch.float64)
    identities[2, 1] = identities[5, 2] = identities[0, 1]
    identities[3, 0] = identities[1, 0]
    identities[4, 2] = identities[4, 1]
    cosines = nn.functional.normalize(vectors, dim=-1).flatten(0, 1)
    cosines = (cosines @ cosines.T).view(ROWS, 3, ROWS, 3) / 0.05
    losses, masked = list[Tensor](), 0
    for i in range(ROWS):
        logits = [cosines[i, 0, i, 1]]
        for j in range(ROWS):
            own, same_passage = identities[i, 1], bool(identities[j, 1] == identities[i, 1])
            for text in (1, 2):
                if (j, text) == (i, 1):
                    continue
                if identities[j, text] == own:
                    masked += 1
                    continue
                logits.append(cosines[i, 0, j, text])
                if "doc_to_doc" in directions and j != i:
                    logits.append(cosines[i, 1, j, text])
            if "doc_to_query" in directions and (j == i or not same_passage):
                logits.append(cosines[i, 1, j, 0])
            if "query_to_query" in directions and not same_passage and identities[j, 0] != identities[i, 0]:
                logits.append(cosines[i, 0, j, 0])
        losses.append(torch.stack(logits).logsumexp(0) - logits[0])
    assert masked == 2 + 2 + 1
    expected, expected_gradient = with_gradient(torch.stack(losses).mean(), vectors)
    cfg = EmbeddingLossConfig(directions=directions, chunk_rows=4)
    found = embedding_loss(vectors, scores, identities, cfg)
    loss, gradient = with_gradient(found.loss, vectors)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert found.num_masked == masked
    unmasked = embedding_loss(
        vectors, scores, identities, EmbeddingLossConfig(directions=directions, mask_duplicates=False)
    )
    torch.testing.assert_close(unmasked.loss, infonce(vectors, directions=directions))
    assert unmasked.num_masked == 0
    assert unmasked.loss > found.loss


@pytest.mark.parametrize("directions", [ALL[:1], ALL], ids=len)
def test_similarities_exist_for_a_chunk_of_queries(directions: list[Any]) -> None:
    """Peak memory is that of a chunk and some copies of the vectors; gradients alone wait for backward."""
    number, chunk_rows, width = 512, 16, 4
    vectors, identities = torch.randn(number, 2, width, requires_grad=True), torch.arange(2 * number).view(-1, 2)
    cfg = EmbeddingLossConfig(directions=directions, chunk_rows=chunk_rows)
    with PeakMemory() as memory:
        found = embedding_loss(vectors, torch.zeros(number, 1), identities, cfg)
        held_bytes = memory.alive_bytes
        found.loss.backward()
    bound = (2 + len(directions)) * chunk_rows * number * 4 + 8 * vectors.nbytes
    assert held_bytes < 3 * vectors.nbytes
    assert memory.peak_bytes < bound < number * number * 4 / 2


def test_no_gradient_is_computed_where_none_is_needed() -> None:
    vectors, scores, identities = rows(1, torch.float64)
    with torch.no_grad():
        loss, _ = embedding_loss(vectors, scores, identities, EmbeddingLossConfig())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, embedding_loss(vectors, scores, identities, EmbeddingLossConfig()).loss.detach())


def test_nothing_is_learned_from_one_row_alone() -> None:
    vectors, scores, identities = rows(0, torch.float64)
    for name, settings in {"infonce": {"directions": ALL}, "cosent": {}}.items():
        cfg = EmbeddingLossConfig(name=name, **settings)
        loss, gradient = with_gradient(embedding_loss(vectors[:1], scores[:1], identities[:1], cfg).loss, vectors)
        assert loss.isfinite()
        assert gradient.abs().max() < 1e-12


def test_what_a_model_or_its_scores_lack_is_named() -> None:
    cfg = EmbeddingLossConfig(matryoshka=[16, 32])
    vectors, scores, identities = rows(0, torch.float32)
    with pytest.raises(ValueError, match=r"has the size 32, and the vectors of this model have 16 features"):
        embedding_loss(vectors, scores, identities, cfg)
    check_matryoshka(cfg, 32)
    with pytest.raises(ValueError, match=r"loss.name=cosent learns the differences of scores, and all 11 scores are 0"):
        check_scores(EmbeddingLossConfig(name="cosent"), torch.zeros(11, 1))
    check_scores(EmbeddingLossConfig(name="cosent"), scores)
    check_scores(EmbeddingLossConfig(), torch.zeros(11, 1))


def test_a_loss_may_be_a_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def worst(vectors, scores):\n    return (vectors[:, 0] - scores).square().max()")
    vectors, scores, identities = rows(0, torch.float64)
    cfg = EmbeddingLossConfig(name=f"{tmp_path}/mine.py:worst", matryoshka=[8, 4])
    scaled = [nn.functional.normalize(vectors[..., :size], dim=-1)[:, 0] for size in (8, 4)]
    expected = sum((one - scores).square().max().item() for one in scaled)
    assert embedding_loss(vectors, scores, identities, cfg).loss.item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="margin=1 has no effect"):
        EmbeddingLossConfig(name=f"{tmp_path}/mine.py:worst", margin=1.0)


def test_defaults_of_functions_are_those_of_the_settings() -> None:
    for name, own in EMBEDDING_LOSSES.items():
        parameters = inspect.signature(getattr(embedding, name)).parameters
        defaults = {one.name: one.default for one in parameters.values() if one.kind is one.KEYWORD_ONLY}
        expected = {key: value for key, value in own.items() if key in defaults}
        assert {key: defaults[key] for key in expected} == expected
        assert set(own) - set(defaults) <= {"hardness_mode", "hardness_strength", "mask_duplicates"}
