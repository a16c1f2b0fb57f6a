"""Embeddings and rerankers: vectors of texts, their two passes of training, the files that say how vectors and scores
are made, and metrics of held-out rows."""

from lean_ft.embedding.evaluation import evaluation_of
from lean_ft.embedding.gradient_cache import StepVectors
from lean_ft.embedding.ranking import RowRanking
from lean_ft.embedding.setup import (
    check_relevance,
    check_vectors,
    completed_data,
    embedding_folder,
    ids_of_words,
    keep_scores,
    rows_per_step,
)
from lean_ft.embedding.vectors import text_vectors

__all__ = [
    "RowRanking",
    "StepVectors",
    "check_relevance",
    "check_vectors",
    "completed_data",
    "embedding_folder",
    "evaluation_of",
    "ids_of_words",
    "keep_scores",
    "rows_per_step",
    "text_vectors",
]
