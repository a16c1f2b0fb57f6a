"""Metrics of entities, compared with a loop over each text; seqeval 1.2.2 (strict, IOB2) gives the same numbers."""

import random

import pytest
import torch

from lean_ft.losses.classification import Predictions, classification_losses
from lean_ft.losses.entities import are_bio

NAMES = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


def entities(labels: list[str]) -> set[tuple[int, int, str]]:
    found, i = set[tuple[int, int, str]](), 0
    while i < len(labels):
        end = i + 1
        if labels[i].startswith("B-"):
            while end < len(labels) and labels[end] == f"I-{labels[i][2:]}":
                end += 1
            found.add((i, end, labels[i][2:]))
        i = end
    return found


def test_entities_are_those_of_a_loop_over_texts() -> None:
    generator = random.Random(0)
    for _ in range(30):
        counted, right, actual, predicted = Predictions(5, torch.device("cpu"), tags=NAMES), 0, 0, 0
        num_labels = 0
        for _ in range(2):  # batches
            texts = [[generator.choice(NAMES) for _ in range(generator.randint(1, 8))] for _ in range(3)]
            guesses = [[one if generator.random() < 0.7 else generator.choice(NAMES) for one in text] for text in texts]
            for text, guess in zip(texts, guesses, strict=True):
                actual, predicted = actual + len(entities(text)), predicted + len(entities(guess))
                right += len(entities(text) & entities(guess))
            text_of = torch.tensor([i for i, text in enumerate(texts) for _ in text])
            scores, targets = (torch.tensor([NAMES.index(one) for t in some for one in t]) for some in (guesses, texts))
            counted.add(torch.eye(5)[scores], targets, text_of)
            num_labels += len(targets)
        metrics, _ = counted.metrics(num_labels)
        assert metrics["eval_entity_precision"] == pytest.approx(right / predicted if predicted else 0.0)
        assert metrics["eval_entity_recall"] == pytest.approx(right / actual if actual else 0.0)
        assert metrics["eval_entity_f1"] == pytest.approx(2 * right / (actual + predicted) if right else 0.0)


def test_only_o_b_and_i_are_labels_of_entities() -> None:
    assert (
        are_bio(NAMES) and not are_bio(["O", "I-X"]) and not are_bio(["false", "true"]) and not are_bio(["B-X", "S-X"])
    )


def test_a_probability_is_the_mean_of_both_labels_losses() -> None:
    scores = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)
    first, second = (classification_losses(scores, torch.full((3,), i), weights) for i in (0, 1))
    found = classification_losses(scores, torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64), weights)
    torch.testing.assert_close(found, torch.stack([first[0], 0.75 * first[1] + 0.25 * second[1], second[2]]))
