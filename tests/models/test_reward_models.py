"""Families with a reward model, and parity of reward models with transformers."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as OF_SCORES

from lean_ft import load_model
from lean_ft.models import REWARD_LABELS, save_model
from lean_ft.models.config_json import SCORE_ARCHITECTURES
from lean_ft.models.families import ENCODERS, FAMILIES
from tests.models.family_cases import FIRST_CASES, NUM_TOKENS


def test_the_families_with_a_reward_model_are_those_of_transformers() -> None:
    """But for encoders, whose score layers have more layers before them."""
    theirs = OF_SCORES.keys() - ENCODERS.keys()
    assert {family: OF_SCORES[family] for family in FAMILIES if family in theirs} == SCORE_ARCHITECTURES


@pytest.mark.first(4)
@pytest.mark.parametrize("family", SCORE_ARCHITECTURES)
@torch.no_grad()
def test_transformers_opens_a_new_reward_model_with_the_same_scores(family, checkpoint, tmp_path) -> None:
    """Soft caps and divisors of logits do not apply to scores, and tied embeddings are untied."""
    folder, _ = checkpoint(FIRST_CASES[family])
    model = load_model(folder, scores=REWARD_LABELS)
    assert not model.output_weight.any()
    model.output_weight.normal_(generator=torch.Generator().manual_seed(0))
    save_model(model, tmp_path / "reward")
    ids = torch.randint(3, 101, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    expected = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32)(ids).logits
    again = load_model(tmp_path / "reward", scores=REWARD_LABELS)
    for one in (model, again):
        torch.testing.assert_close(one(ids)[:, -1], expected, rtol=1e-4, atol=1e-4)
