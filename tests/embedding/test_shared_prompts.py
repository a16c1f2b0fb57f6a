"""Texts after one prompt, which is computed once, give the vectors, scores and gradients of whole texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lean_ft.data import prepare_batches
from lean_ft.data.batch import rounded_up
from lean_ft.data.embedding import EmbeddingBatch, EmbeddingDataConfig, with_negatives
from lean_ft.data.reranking import RerankingDataConfig
from lean_ft.embedding.vectors import Pooling, text_vectors
from lean_ft.losses.reranking import relevance
from lean_ft.models import REWARD_LABELS, Decoder, load_model
from lean_ft.settings import ModelConfig, RecipeConfig
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training import shares_prompts

QUERY_PROMPT = "Instruct: Find the note that answers the question.\nQuery: "
PASSAGE_PROMPT = "Note: "
WORDS = [*"abcdefghijklmnopqrstuvw"]
PREPARED = {"seed": 0, "batch_size": 4}


class Config(RecipeConfig):
    model: ModelConfig
    data: EmbeddingDataConfig


@pytest.fixture
def data(tmp_path: Path) -> EmbeddingDataConfig:
    file = tmp_path / "rows.jsonl"
    text = lambda i, number: " ".join(WORDS[i : i + number]) + "."  # noqa: E731
    rows = [{"query": text(i, 2 + i), "positive": text(i, 5), "negative": text(9 - i, 1 + i)} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return with_negatives(
        EmbeddingDataConfig(source=str(file), query_prompt=QUERY_PROMPT, passage_prompt=PASSAGE_PROMPT, max_length=64)
    )


def whole_and_shared(data: EmbeddingDataConfig) -> list[EmbeddingBatch]:
    found = []
    for shares in (False, True):
        batches, _ = prepare_batches(data, load_tokenizer("tiny"), **PREPARED, share_prompts=shares)
        [batch] = batches.take(1)
        found.append(batch.built)
    return found


def with_gradients(model: Decoder, outputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    weight = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
    return outputs, list(torch.autograd.grad((outputs * weight).sum(), [*model.parameters()], allow_unused=True))


def assert_equal(model: Decoder, whole: Tensor, shared: Tensor) -> None:
    is_wide = whole.dtype == torch.float64
    (outputs, gradients), (expected, of_expected) = with_gradients(model, shared), with_gradients(model, whole)
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-12 if is_wide else 1e-6)
    for found, other in zip(gradients, of_expected, strict=True):
        if other is not None:
            assert (found - other).abs().max() <= (1e-12 if is_wide else 1e-5) * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_and_gradients_equal_those_of_whole_texts(
    data: EmbeddingDataConfig, pooling: Pooling, dtype: torch.dtype
):
    model = load_model("tiny", dtype=torch.float32).to(dtype)
    assert model.config.num_kv_heads < model.config.num_heads
    whole, shared = (text_vectors(model, batch, pooling) for batch in whole_and_shared(data))
    assert_equal(model, whole, shared)


def test_a_prompt_takes_its_positions_once_and_nothing_else_is_added(data: EmbeddingDataConfig):
    tokenizer = load_tokenizer("tiny")
    whole, shared = whole_and_shared(data)
    prompts = [len(tokenizer.encode(prompt)) for prompt in (QUERY_PROMPT, PASSAGE_PROMPT)]
    num_texts, computed_once = int(whole.lengths.sum()), 3 * prompts[0] + 7 * prompts[1]
    assert torch.equal(whole.lengths, shared.lengths)
    assert whole.num_tokens == rounded_up(num_texts)
    assert shared.num_tokens == rounded_up(num_texts - computed_once)
    assert int(shared.num_shared.sum()) == len(shared.shared) == computed_once
    assert int(shared.inputs["is_token"].sum()) == num_texts - computed_once


def test_scores_and_gradients_equal_those_of_whole_texts(data: EmbeddingDataConfig):
    given = data.model_dump(include={"source", "max_length", "negatives", "scored"})
    whole, shared = whole_and_shared(RerankingDataConfig(**given, template="Does it fit?\n{query}\nNote: {passage}"))
    assert shared.num_tokens < whole.num_tokens
    model = load_model("tiny", dtype=torch.float32, scores=REWARD_LABELS)
    assert_equal(model, *(relevance(model, batch, None) for batch in (whole, shared)))


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({}, ""),
        ({"packing": "none"}, "data.packing=none has no row of all texts"),
        ({"query_prompt": None, "passage_prompt": None}, "there are none"),
    ],
)
def test_a_prompt_is_computed_once_where_rows_have_one(
    data: EmbeddingDataConfig, changes: dict[str, Any], why_not: str
):
    data = data.model_copy(update=changes)
    cfg = Config(model=ModelConfig(path="tiny"), data=data, output_dir="unused")
    assert shares_prompts(cfg, data) == (not why_not)
    if why_not:
        with pytest.raises(ValueError, match=f"shared_prompt=true, but {why_not}"):
            shares_prompts(cfg, data.model_copy(update={"shared_prompt": True}))
