"""Losses of rerankers compared with sentence-transformers', and the scores that `relevance` reads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import lean_ft
from lean_ft.losses.reranking import check_labels, relevance, reranking_losses
from lean_ft.settings.embedding_losses import RerankingLossConfig
from tests.losses.test_embedding import RECORDED, Lazy, in_short, with_gradient

P, S, LABELS = 7, 6, ("one right", "grades")
reference = Lazy("sentence_transformers.cross_encoder.losses")
package = Lazy("sentence_transformers.cross_encoder")

# Settings, and the loss of sentence-transformers.
CASES: dict[str, tuple[dict[str, Any], Callable[[Any], nn.Module]]] = {
    "bce": ({"name": "bce"}, lambda m: reference.BinaryCrossEntropyLoss(m)),
    "bce, weight": (
        {"name": "bce", "positive_weight": 4.0},
        lambda m: reference.BinaryCrossEntropyLoss(m, pos_weight=torch.tensor(4.0)),
    ),
    "ranknet": ({"name": "ranknet"}, lambda m: reference.RankNetLoss(m)),
    "ranknet, k": ({"name": "ranknet", "k": 2, "sigma": 2.0}, lambda m: reference.RankNetLoss(m, k=2, sigma=2.0)),
    "listnet": ({"name": "listnet"}, lambda m: reference.ListNetLoss(m)),
    "lambda": ({"name": "lambda"}, lambda m: reference.LambdaLoss(m)),
    "lambda, mu and k": (
        {"name": "lambda", "mu": 3.0, "k": 2, "sigma": 0.5, "eps": 1e-3},
        lambda m: reference.LambdaLoss(m, reference.NDCGLoss2PPScheme(mu=3.0), k=2, sigma=0.5, eps=1e-3),
    ),
    "ndcg2": ({"name": "lambda", "weighting": "ndcg2"}, lambda m: reference.LambdaLoss(m, reference.NDCGLoss2Scheme())),
    "ndcg1": ({"name": "lambda", "weighting": "ndcg1"}, lambda m: reference.LambdaLoss(m, reference.NDCGLoss1Scheme())),
    "lambdarank": (
        {"name": "lambda", "weighting": "lambdarank"},
        lambda m: reference.LambdaLoss(m, reference.LambdaRankScheme()),
    ),
}


def labels_of(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "one right":
        return torch.eye(S)[torch.randint(0, S, (P,), generator=generator)]
    return torch.randint(0, 4, (P, S), generator=generator) / 3  # grades, different numbers of pairs


@contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Run sentence-transformers in this dtype: it converts some values to float32."""
    default = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else self.to(dtype))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def of_sentence_transformers(name: str, scores: Tensor, labels: Tensor) -> Tensor:
    """Its loss of a batch."""
    make, cross_encoder = CASES[name][1], package.CrossEncoder

    class Scores(cross_encoder):
        num_labels = 1
        device = torch.device("cpu")

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def preprocess(self, pairs: list[Any], **_: Any) -> dict[str, Tensor]:
            return {"index": torch.tensor([document for _, document in pairs])}

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": scores.flatten()[features["index"]]}

    documents = torch.arange(scores.numel()).view_as(scores).tolist()
    is_listwise = not isinstance(module := make(Scores()), reference.BinaryCrossEntropyLoss)
    queries = list(range(len(scores)))
    if is_listwise:
        return module([queries, documents], list(labels.unbind()))
    flat = [document for row in documents for document in row]
    return module([[0] * len(flat), flat], labels.flatten())


def problem(labels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = torch.randn(P, S, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * scores).to(dtype).requires_grad_(), labels_of(labels).to(dtype)


def ours(name: str, scores: Tensor, labels: Tensor) -> Tensor:
    return reranking_losses(scores, labels, RerankingLossConfig(**CASES[name][0]))


def of_rows(name: str, labels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mean of sentence-transformers' losses of each row, and its gradient."""
    scores, relevant = problem(labels, dtype)
    with in_dtype(dtype):
        each = [of_sentence_transformers(name, scores[i : i + 1], relevant[i : i + 1]) for i in range(P)]
        return with_gradient(torch.stack(each).mean(), scores)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_recorded_ones_of_sentence_transformers(name: str, labels: str) -> None:
    scores, relevant = problem(labels, torch.float64)
    found = with_gradient(ours(name, scores, relevant).mean(), scores)
    assert in_short(*found) == pytest.approx(RECORDED["reranking"][f"{name}, {labels}"], rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_sentence_transformers(name: str, labels: str) -> None:
    """Its loss of a batch is our mean over rows, weighted by numbers of pairs."""
    for dtype, of_value, of_gradient in ((torch.float32, 1e-6, 1e-5), (torch.float64, 1e-12, 1e-10)):
        scores, relevant = problem(labels, dtype)
        losses, expected = ours(name, scores, relevant), of_rows(name, labels, dtype)
        means = [(losses.mean(), expected)]
        if "k" not in CASES[name][0]:
            pairs = (relevant[:, :, None] > relevant[:, None, :]).sum((1, 2))
            counts = pairs if name in ("ranknet", "lambda", "ndcg2", "lambdarank") else torch.ones(P)
            assert labels == "grades" or len({*counts.tolist()}) == 1  # a mean over rows is one over pairs
            with in_dtype(dtype):
                whole = with_gradient(of_sentence_transformers(name, scores, relevant), scores)
            means.append(((losses * counts).sum() / counts.sum(), whole))
        for mean, (wanted, wanted_gradient) in means:
            loss, gradient = with_gradient(mean, scores)
            torch.testing.assert_close(loss, wanted, rtol=of_value, atol=of_value)
            assert (gradient - wanted_gradient).norm() / wanted_gradient.norm() < of_gradient
    assert in_short(*expected) == pytest.approx(RECORDED["reranking"][f"{name}, {labels}"], rel=1e-9)


def test_losses_have_closed_forms() -> None:
    """Two passages, of which the second is right, with scores 1 and 0: one pair with a difference of -1."""
    scores, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 1.0]])
    pair = torch.tensor(1.0, dtype=torch.float64).exp().log1p() / torch.tensor(2.0).log()  # -log2 sigmoid(-1)
    right, wrong = labels.double().softmax(1).flatten().flip(0)
    expected = {
        "bce": (torch.nn.functional.softplus(scores[0, 0]) + torch.tensor(2.0).log()) / 2,
        "ranknet": pair,
        "listnet": right * torch.tensor(1.0).exp().log1p() + wrong * torch.tensor(-1.0).exp().log1p(),
        # The gain of the right one is 1, and the discounts of the two places are 1 and log2(3).
        "lambda": pair * (10 + 1) * (1 - 1 / torch.tensor(3.0, dtype=torch.float64).log2()),
    }
    for name, loss in expected.items():
        (found,) = reranking_losses(scores, labels, RerankingLossConfig(name=name))
        torch.testing.assert_close(found, loss.double())


def test_rows_without_pairs_have_a_loss_of_zero_and_finite_gradients() -> None:
    scores = torch.randn(3, 4, requires_grad=True)
    for name in ("ranknet", "lambda"):
        losses = reranking_losses(scores, torch.ones(3, 4), RerankingLossConfig(name=name))
        assert losses.tolist() == [0, 0, 0]
        assert torch.autograd.grad(losses.sum(), scores)[0].isfinite().all()


def test_a_loss_may_be_a_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def errors(scores, labels):\n    return (scores - labels).square().sum(1)")
    scores, labels = problem("grades", torch.float32)
    losses = reranking_losses(scores, labels, RerankingLossConfig(name=f"{tmp_path}/mine.py:errors"))
    torch.testing.assert_close(losses, (scores - labels).square().sum(1))


def test_labels_that_a_loss_cannot_learn_from_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bce expects labels from 0 \(wrong\) to 1 \(right\), .* from -2 to 3"):
        check_labels(RerankingLossConfig(), torch.tensor([[0.0, 3.0], [-2.0, 1.0]]))
    with pytest.raises(ValueError, match=r"all passages of a row have the same label, 0 in the first row"):
        check_labels(RerankingLossConfig(name="lambda"), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    check_labels(RerankingLossConfig(name="lambda"), torch.tensor([[0.0, 0.0], [-1.0, 3.0]]))
    check_labels(RerankingLossConfig(), torch.zeros(2, 1))


SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gemma2", {"final_logit_softcapping": 0.5, "head_dim": 12, "num_key_value_heads": 1}), ("phi", {})],
    ids=["soft cap", "bias of the output layer"],
)
def test_yes_no_scores_and_gradients_are_those_of_transformers_logits(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Two texts in one packed row, each read at its last token."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **settings))
    if family == "phi":
        torch.nn.init.normal_(theirs.lm_head.bias)
    theirs.save_pretrained(tmp_path)
    model, texts = lean_ft.load_model(tmp_path), (torch.randint(3, 101, (1, 7)), torch.randint(3, 101, (1, 4)))
    inputs = {"input_ids": torch.cat(texts, 1), "cu_seqlens": torch.tensor([0, 7, 11], dtype=torch.int32)}
    batch: Any = SimpleNamespace(inputs=inputs, last=torch.tensor([6, 10]))
    scores = relevance(model, batch, (7, 2))
    logits = torch.stack([theirs(text).logits[0, -1] for text in texts])
    torch.testing.assert_close(scores, logits[:, 7] - logits[:, 2], rtol=1e-5, atol=1e-5)
    scores.sum().backward()
    (logits[:, 7] - logits[:, 2]).sum().backward()
    found, expected = dict(model.named_parameters()), dict(theirs.named_parameters())
    names = found.keys() & expected.keys()  # Phi's have other names in layers
    assert "model.embed_tokens.weight" in names
    for name in names:
        torch.testing.assert_close(found[name].grad, expected[name].grad, rtol=1e-4, atol=1e-5)


def test_a_layer_with_one_output_gives_the_score_at_the_last_token() -> None:
    hidden, last = torch.randn(2, 5, 4), torch.tensor([1, 4, 8])  # (B, T, D), (M,)
    model: Any = lambda *_, **__: (hidden, None)  # noqa: E731
    model.output_weight = torch.randn(1, 4)
    scores = relevance(model, cast(Any, SimpleNamespace(inputs={}, last=last)), None)
    torch.testing.assert_close(scores, hidden.flatten(0, 1)[last] @ model.output_weight[0])
