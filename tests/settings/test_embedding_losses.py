"""Settings of the losses of embeddings and rerankers, and rows that a loss cannot learn from."""

import re
from typing import Any

import pytest

from lean_ft.settings.embedding_losses import (
    EMBEDDING_LOSSES,
    RERANKING_LOSSES,
    EmbeddingLossConfig,
    RerankingLossConfig,
    check_passages,
    check_rows,
)

BOTH = ["query_to_doc", "doc_to_query"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": 1.0}, "margin=1 has no effect with the loss infonce. Remove it, or set loss.name=triplet."),
        ({"name": "triplet", "mask_duplicates": False}, "mask_duplicates=false has no effect with the loss triplet"),
        ({"name": "cosent", "directions": BOTH}, "directions=[query_to_doc, doc_to_query] has no effect with the loss"),
        ({"directions": ["doc_to_query"]}, "directions=[doc_to_query]: expected query_to_doc"),
        ({"directions": []}, "directions=[]: expected query_to_doc"),
        ({"directions": [*BOTH, "doc_to_query"]}, "and others once at most"),
        ({"partition_mode": "per_direction"}, "partition_mode=per_direction has no effect with 1 direction"),
        (
            {"partition_mode": "per_direction", "directions": [*BOTH, "doc_to_doc"]},
            "a softmax of doc_to_doc has no right answer. Set partition_mode=joint",
        ),
        ({"hardness_strength": 2.0}, "hardness_strength=2 has no effect without hardness_mode"),
        ({"matryoshka": [8, 8]}, "matryoshka=[8, 8] has a size twice"),
        ({"matryoshka": [8, 4], "matryoshka_weights": [1.0]}, "has 1 factors for the 2 sizes of matryoshka=[8, 4]"),
        ({"matryoshka_weights": [1.0]}, "matryoshka_weights=[1] has no effect without matryoshka"),
        ({"name": "kl", "teacher_temperature": 0.0}, "greater than 0"),
    ],
)
def test_a_setting_without_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EmbeddingLossConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 3}, "k=3 has no effect with the loss bce. Remove it, or set loss.name=ranknet or loss.name=lambda."),
        ({"name": "lambda", "weighting": "ndcg2", "mu": 2.0}, "mu=2 has no effect with weighting=ndcg2"),
        ({"yes_no": ("yes", "yes")}, "yes_no=[yes, yes] names one word twice"),
    ],
)
def test_a_setting_of_a_reranker_without_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RerankingLossConfig(**settings)


def test_null_is_the_default_of_the_loss() -> None:
    for config, losses in ((EmbeddingLossConfig, EMBEDDING_LOSSES), (RerankingLossConfig, RERANKING_LOSSES)):
        for name, own in losses.items():
            assert config.model_validate({"name": name}).of_loss == own
    assert EmbeddingLossConfig(name="kl", temperature=2.0).of_loss["temperature"] == 2.0
    assert EmbeddingLossConfig(hardness_mode="hard_negatives").of_loss["hardness_strength"] == 5.0
    description = EmbeddingLossConfig.model_fields["temperature"].description
    assert description == "For infonce, cosent and kl: divides similarities. null is 0.05, and 1 for kl."


@pytest.mark.parametrize(
    ("settings", "has_scores", "num_passages", "message"),
    [
        ({}, True, 1, "infonce takes the second text of each row as right, but the rows have two texts and a `score`"),
        ({"name": "cosent"}, False, 1, "cosent learns scores, and the rows have none. Give each row a `score`"),
        ({"name": "kl"}, False, 3, "Give each row a teacher's `scores` of its passages, or set loss.name=infonce."),
        (
            {"name": "margin_mse"},
            True,
            1,
            "compares the passages of a row, and the rows have 1. Add a field `negative`",
        ),
        ({"name": "triplet"}, False, 1, "or set loss.name=infonce, which takes other rows' passages."),
        ({"hardness_mode": "hard_negatives"}, False, 1, "hardness_mode=hard_negatives has no effect: the rows have no"),
        ({}, False, 1, "a step has 1 row without negatives"),
        ({"name": "cosent"}, True, 1, "a step has 1 row without negatives"),
        ({}, False, 2, ""),
        ({}, True, 2, ""),  # InfoNCE reads the places of passages, and no teacher's scores
        ({"name": "triplet"}, False, 2, ""),
        ({"name": "kl"}, True, 2, ""),
    ],
)
def test_rows_that_lack_what_a_loss_compares_are_refused(
    settings: dict[str, Any], has_scores: bool, num_passages: int, message: str
) -> None:
    cfg = EmbeddingLossConfig(**settings)
    if not message:
        check_rows(cfg, has_scores, num_passages, rows_per_step=1)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rows(cfg, has_scores, num_passages, rows_per_step=1)
    if "1 row" in message:
        check_rows(cfg, has_scores, num_passages, rows_per_step=2)


def test_a_loss_of_pairs_of_passages_needs_two() -> None:
    with pytest.raises(ValueError, match=r"loss.name=lambda compares the passages of a row, and the rows have 1"):
        check_passages(RerankingLossConfig(name="lambda"), 1)
    check_passages(RerankingLossConfig(name="lambda"), 2)
    check_passages(RerankingLossConfig(), 1)
