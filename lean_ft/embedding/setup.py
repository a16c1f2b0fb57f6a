"""What a recipe of vectors or scores takes from the model's folder, and saves with the model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lean_ft.data import Batches
from lean_ft.data.embedding import EmbeddingDataConfig, with_negatives
from lean_ft.data.reranking import RerankingDataConfig
from lean_ft.embedding.folder import ScoresOf, VectorsOf
from lean_ft.losses.embedding import check_matryoshka, check_scores
from lean_ft.losses.reranking import check_labels
from lean_ft.models import Decoder
from lean_ft.settings import RecipeConfig
from lean_ft.settings.embedding import PoolingConfig
from lean_ft.settings.embedding_losses import EmbeddingLossConfig, RerankingLossConfig
from lean_ft.system.foreign_values import JSON
from lean_ft.tokenizers import Tokenizer

DataT = TypeVar("DataT", bound=EmbeddingDataConfig)


def completed_data(data: DataT, tokenizer: Tokenizer) -> DataT:
    """Return the settings with the number of negatives of the rows, and the prompts of the model's folder if none are
    given."""
    stored = VectorsOf.read(tokenizer.folder) or VectorsOf()
    prompts = {"query_prompt": stored.query_prompt, "passage_prompt": stored.passage_prompt}
    found = {name: prompt for name, prompt in prompts.items() if getattr(data, name) is None}
    return with_negatives(data).model_copy(update=found)


def rows_per_step(cfg: RecipeConfig, data: EmbeddingDataConfig) -> int | None:
    """Return the rows of a step on all ranks; None if that depends on the lengths of texts."""
    if data.packs_rows or data.batch_tokens is not None:
        return None
    return cfg.batch_size * cfg.gradient_accumulation_steps


def embedding_folder(model: Decoder, cfg: PoolingConfig, data: EmbeddingDataConfig, tokenizer: Tokenizer) -> VectorsOf:
    """Return how vectors are made, and keep the files that say so with the model: every folder that is saved has them.

    Raises ValueError for `pooling=cls` of a causal model, whose first token sees no other; and for a mixture of experts
    with a router loss, which these recipes do not add.
    """
    _check_router_loss(model)
    stored = VectorsOf.read(tokenizer.folder) or VectorsOf("mean" if model.config.bidirectional else "last")
    pooling = stored.pooling if cfg.pooling == "auto" else cfg.pooling
    if pooling == "cls" and not model.config.bidirectional:
        raise ValueError(
            "vectors.pooling=cls reads the first token, which sees no other token in a causal model, so all texts "
            "would have one vector. Set vectors.pooling=last or vectors.pooling=mean."
        )
    found = replace(
        stored,
        pooling=pooling,
        normalize=stored.normalize if cfg.normalize == "auto" else cfg.normalize,
        query_prompt=data.query_prompt or "",
        passage_prompt=data.passage_prompt or "",
        max_length=data.max_length,
    )
    _keep(model, found.files(model.config.hidden_size))
    return found


def check_vectors(cfg: EmbeddingLossConfig, folder: VectorsOf, model: Decoder, batches: object) -> None:
    """Raise ValueError if the model's vectors are too short for the loss, or the scores of all rows leave it nothing to
    learn.

    batches: the training batches; those of a plan have no scores.
    """
    check_matryoshka(cfg, folder.dense[-1].out_features if folder.dense else model.config.hidden_size)
    if (values := _values_of_rows(batches)) is not None:
        check_scores(cfg, values[:, 1:])


def check_relevance(cfg: RerankingLossConfig, batches: object) -> None:
    """Raise ValueError if labels of the rows are out of the range of the loss, or leave it nothing to learn.

    batches: the training batches; those of a plan have no labels.
    """
    if (labels := _values_of_rows(batches)) is not None:
        check_labels(cfg, labels)


def _values_of_rows(batches: object) -> Tensor | None:
    """The score or label of each text of all rows, (rows, texts)."""
    if not isinstance(batches, Batches):
        return None
    layout = batches.layout
    return torch.from_numpy(layout.columns.per_document("row_values")[:, 0]).view(-1, layout.arrangement.sides)


def keep_scores(model: Decoder, data: RerankingDataConfig, yes_no: tuple[int, int] | None) -> None:
    """Keep the files that say how scores are made with the model: every folder that is saved has them.

    Raises ValueError as `embedding_folder` does for a mixture with a router loss.
    """
    _check_router_loss(model)
    _keep(model, ScoresOf(data.template, yes_no, data.max_length).files())


def ids_of_words(words: tuple[str, str] | None, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the ids of the words `loss.yes_no`. Raises ValueError for a word of several tokens."""
    if words is None:
        return None
    ids = [tokenizer.id_of_word(word) for word in words]
    if word := next((word for word, found in zip(words, ids, strict=True) if found is None), None):
        raise ValueError(
            f"loss.yes_no: {word!r} is {len(tokenizer.encode(word))} tokens of this model; "
            "expected words of one token each, as they follow the template, such as [yes, no]."
        )
    yes, no = ids
    assert yes is not None and no is not None
    return yes, no


def _check_router_loss(model: Decoder) -> None:
    if coefficient := model.router_aux_loss_coef:
        raise ValueError(
            f"model.router_aux_loss_coef is {coefficient:g}, in the settings or as router_aux_loss_coef in the model's "
            "config.json, and this recipe adds no router loss. Set model.router_aux_loss_coef=0."
        )


def _keep(model: Decoder, files: Mapping[str, JSON]) -> None:
    model.source.beside = dict(files)
