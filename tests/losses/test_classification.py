"""The classification loss compared with transformers', and metrics compared with tables computed by hand."""

from types import SimpleNamespace

import pytest
import torch
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from lean_ft.losses.classification import Predictions, classification_losses

CPU = torch.device("cpu")


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_the_loss_and_its_gradient_are_those_of_transformers(problem: str) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 2, 1, 1, 0, 2])
    if problem.startswith("multi"):
        targets = (torch.rand(6, 3, generator=generator) > 0.5).double()
    expected = ForSequenceClassificationLoss(targets, scores, SimpleNamespace(problem_type=problem, num_labels=3))
    loss = classification_losses(scores, targets).mean()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(torch.autograd.grad(loss, scores), torch.autograd.grad(expected, scores), strict=True):
        torch.testing.assert_close(one, other)


def test_class_weights_multiply_the_losses_of_their_labels() -> None:
    scores, targets = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1])
    plain = classification_losses(scores, targets)
    weighted = classification_losses(scores, targets, torch.tensor([1.0, 5.0, 0.5]))
    torch.testing.assert_close(weighted, plain * torch.tensor([1.0, 5.0, 0.5, 5.0]))


def test_accuracy_macro_f1_and_the_confusion_matrix_are_those_of_a_table() -> None:
    """Labels 0, 0, 0, 1, 1, 2 with predictions 0, 0, 1, 1, 0, 1; label 3 does not occur.

    F1 of 0: 2 hits, 3 texts, 3 predictions: 4 / 6. F1 of 1: 1 hit, 2 texts, 3 predictions: 2 / 5. F1 of 2: no hit:
    0."""
    targets, predicted = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 0, 1])
    predictions = Predictions(4, CPU)
    for part in (slice(0, 4), slice(4, 6), slice(6, 6)):  # one batch is empty
        predictions.add(torch.nn.functional.one_hot(predicted, 4)[part].float(), targets[part])
    metrics, confusion = predictions.metrics(6)
    assert metrics["eval_accuracy"] == pytest.approx(3 / 6)
    assert metrics["eval_macro_f1"] == pytest.approx((4 / 6 + 2 / 5 + 0) / 3)
    assert confusion == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_of_several_labels_each_counts_and_a_text_is_right_with_all_of_them() -> None:
    """Label 0: 1 hit, 2 texts, 1 prediction: 2 / 3. Label 1: 1 hit, 1 text, 2 predictions: 2 / 3."""
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    predictions = Predictions(2, CPU)
    predictions.add(torch.tensor([[2.0, -1.0], [-1.0, 3.0], [-2.0, 0.5]]), targets)
    metrics, confusion = predictions.metrics(3)
    assert metrics == {"eval_accuracy": pytest.approx(1 / 3), "eval_macro_f1": pytest.approx(2 / 3)}
    # By label: [[neither, predicted alone], [actual alone, both]], as scikit-learn's multilabel_confusion_matrix.
    assert confusion == [[[1, 0], [1, 1]], [[1, 1], [0, 1]]]
