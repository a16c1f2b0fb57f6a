"""A query with passages to judge: one document per passage, from the rows of `lean_ft.data.embedding`, or from rows
with a list of `passages` and their `labels`.

A document is `data.template` with the query and the passage in it, and nothing else. A document that is too long loses
the end of its passage. The text after the passage stays, since the score is read at its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import AfterValidator, model_validator

from lean_ft.data.chats import check_text
from lean_ft.data.columns import Document
from lean_ft.data.embedding import (
    KNOWN,
    PASSAGES,
    Embedding,
    EmbeddingBatch,
    EmbeddingDataConfig,
    EmbeddingReader,
    listed,
    num_equal,
    number_of,
)
from lean_ft.data.formats import Fields, reading
from lean_ft.data.objective import Objective
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row
from lean_ft.settings import DataConfig
from lean_ft.tokenizers import Passage, Tokenizer
from lean_ft.tokenizers.pair_templates import PASSAGE, QUERY, cut, filled

if TYPE_CHECKING:
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns


@dataclass(frozen=True)
class RerankingReader(EmbeddingReader):
    """Converts a row to one text per passage, which holds the query too."""

    config: RerankingDataConfig
    known: ClassVar[dict[str, Fields]] = {
        "passages": Fields(
            ("query", PASSAGES, "labels"),
            text="query",
            becomes="a query and a list of passages with their labels, for `rerank`",
        ),
        **KNOWN,
    }

    def texts(self, row: Row) -> list[str]:
        if PASSAGES not in self.formats[row.source].fields.required:
            return super().texts(row)
        with reading(row):
            fields = self.fields_of(row)
            passages, _ = self._listed(row)
            texts = [check_text(fields["query"], "the field `query`")]
            texts += [check_text(text, f"a text in `{PASSAGES}`") for text in passages]
            if not all(text.strip() for text in texts):
                raise ValueError(f"`query` or a text in `{PASSAGES}` is empty. Remove the row, or add a text.")
            return texts

    def _listed(self, row: Row) -> tuple[list[Any], list[float]]:
        """Return the passages of a row with a list of them, and their labels: those with the highest labels, if
        there are more than `data.negatives` + 1."""
        fields, number = self.fields_of(row), self.num_negatives + 1
        passages = listed(fields, PASSAGES)
        labels = [number_of(label, f"label {i}") for i, label in enumerate(listed(fields, "labels"), start=1)]
        if len(labels) != len(passages):
            raise ValueError(f"the row has {len(passages)} `passages` and {len(labels)} `labels`; expected as many.")
        if len(passages) < number:
            raise ValueError(
                f"the row has {len(passages)} passages, and the first rows have {number} or more. Set "
                f"data.negatives={len(passages) - 1} to read as many of every row, or add passages to the row."
            )
        order = sorted(range(len(labels)), key=lambda i: -labels[i])[:number]
        return [passages[i] for i in order], [labels[i] for i in order]

    def passages(self, row: Row) -> list[Passage | Document]:
        query, *passages = self.texts(row)
        return [filled(self.config.template, query, text) for text in passages]

    def values(self, row: Row) -> list[Any]:
        """Return the label of each passage: its score, or without scores 1 for the right passage and 0 for others."""
        if PASSAGES in self.formats[row.source].fields.required:
            with reading(row):
                return self._listed(row)[1]
        scores = super().values(row)[1:]
        return scores if self.config.scored else [1.0] + [0.0] * (len(scores) - 1)

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        fitted, limit = list[Document](), self.config.max_length
        for document in documents:
            ids = document.ids
            if len(ids) > limit:
                if len(ids) - limit >= document.trained.sum():
                    report.drop("the template and the query leave no room in max_length for the passage")
                    return []
                if not report.truncates(len(ids), self.config, place):
                    return []
                report.count_lost(len(ids) - limit)
                ids = ids[cut(document.trained, limit)]
            fitted.append(replace(document, ids=ids, trained=np.ones(len(ids), dtype=bool)))
        return fitted


@dataclass(frozen=True, kw_only=True)
class RerankingBatch(EmbeddingBatch):
    """A batch of P rows of S texts, row after row. `scores` is (P, S), and S counts passages alone."""

    compares_steps: ClassVar[bool] = False


class Reranking(Embedding):
    reader = RerankingReader
    batch_type = RerankingBatch
    recipe = "rerank"
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "eval_accuracy@1": "{:.1%} of rows have the right passage first",
        "eval_mrr@10": "MRR@10 {:.3f}",
        "eval_ndcg@10": "nDCG@10 {:.3f}",
    }
    marks = (("query", PASSAGES, "labels"),)

    def shared(self, columns: Columns, config: DataConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        """All texts of a row share the template's tokens with the query, up to the first of a passage."""
        row, sides = np.arange(len(columns)) // len(config.sides), len(config.sides)
        shared = [num_equal(columns[i // sides * sides].ids, columns[i].ids) for i in range(len(columns))]
        return {"shared": np.array(shared, dtype=np.int64), "groups": row}

    def why_not_shared(self, config: DataConfig) -> str:
        if config.packing != "padding_free":
            return f"data.packing={config.packing} has no row of all texts"
        return "" if len(config.sides) > 1 else "a query has one passage"

    def words_to_try(self, config: EmbeddingDataConfig, run: Path) -> list[str]:
        return ["serve", str(run)]  # which answers /v1/rerank

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        """As for embeddings, with the label of each passage: `scores` is (P, S), and S counts passages alone."""
        labels = columns.per_document("row_values", placed.documents)[:, 0].reshape(-1, placed.sides)
        return super().row_fields(columns, placed) | {"scores": np.ascontiguousarray(labels)}


OBJECTIVE = Reranking()


def _has_both(template: str) -> str:
    if QUERY not in template or template.count(PASSAGE) != 1:
        raise ValueError(f"the template {template!r:.200} needs {QUERY}, and {PASSAGE} once.")
    return template


class RerankingDataConfig(EmbeddingDataConfig):
    """Queries with passages to judge, each query and passage in one text."""

    objective: ClassVar[str | Objective] = OBJECTIVE

    template: Annotated[str, AfterValidator(_has_both)] = "{query}\n{passage}"
    """The text that the model reads and scores at its last token, with {query} and {passage}. It has all tokens that
    the model reads: control tokens, also one that begins texts, are spelled out, as in the prompt of
    Qwen3-Reranker."""

    @model_validator(mode="after")
    def _template_has_all(self) -> Self:
        for name in ("query_prompt", "passage_prompt"):
            if (prompt := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}={prompt!r:.80} is for vectors, and a reranker reads data.template alone. Write it in "
                    "data.template."
                )
        if self.truncation_side == "left":
            raise ValueError(
                "truncation_side=left is not possible: this recipe cuts the end of the passage, so that the query "
                "and the template stay whole. Remove it."
            )
        return self

    @property
    def sides(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().sides[1:]
