"""Texts to embed: a query, the passage that answers it, and wrong passages; or two texts with a `score`.

Column names are those of sentence-transformers' data sets. A row becomes one document per text: the prompt and the
text, between the tokens that the tokenizer's own post-processor adds. A text is cut to `max_length`, and those tokens
are kept, as in sentence-transformers.

Legend: P rows of data in a batch, S texts of a row, M = P * S texts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, NonNegativeInt

from lean_ft.data.batch import Batch
from lean_ft.data.chats import check_text, parse_if_json
from lean_ft.data.columns import Document
from lean_ft.data.formats import NUM_ROWS_TO_DETECT, Fields, RowFormat, RowReader, formats_of, reading
from lean_ft.data.objective import Objective, objective_of
from lean_ft.data.report import DataReport
from lean_ft.data.rows import Row, kind
from lean_ft.data.sources import RowSources
from lean_ft.settings import DataConfig
from lean_ft.system.units import counted
from lean_ft.tokenizers import Passage, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from lean_ft.data.batches import Batches
    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

PASSAGES = "passages"  # a list of passages with `labels`, for rerankers
MOST_NEGATIVES = 64  # columns `negative_1` and so on
NEGATIVES = ("negatives", "negative", *(f"negative_{i}" for i in range(1, MOST_NEGATIVES + 1)))
# Names of sentence-transformers' data sets: the two texts of a row.
PAIRS = (
    ("query", "positive"),
    ("anchor", "positive"),
    ("query", "passage"),
    ("question", "answer"),
    ("query", "answer"),
)
SIMILAR = (("sentence1", "sentence2"), ("text1", "text2"))
SCORED = tuple((*texts, score) for texts in SIMILAR for score in ("score", "label"))
KNOWN = {
    **{
        f"{a}_{b}_{score}": Fields(
            (a, b, score),
            text=a,
            becomes="two texts and how similar they are, for `embed` and `rerank`; also `text1`, `text2` and `label`",
            is_alias=(a, b, score) != SCORED[0],
        )
        for a, b, score in SCORED
    },
    **{
        f"{a}_{b}": Fields(
            (a, b),
            (*NEGATIVES, "scores"),
            text=a,
            becomes="a query, its passage, and wrong passages if there are some, for `embed` and `rerank`; also "
            "`anchor` and `positive`, `query` and `passage` or `answer`, `question` and `answer`",
            is_alias=(a, b) != PAIRS[0],
        )
        for a, b in PAIRS
    },
}


ConfigT = TypeVar("ConfigT", bound="EmbeddingDataConfig")


def with_negatives(config: ConfigT) -> ConfigT:
    """Return the settings with the number of `negatives` and whether rows are `scored`: the configured values, or those
    of the first rows.

    Raises ValueError with the place of a row that cannot be read, and if sources have rows of several kinds.
    """
    if config.negatives != "auto" and config.scored != "auto":
        return config
    sources = RowSources.of(config)
    rows = sources.first_rows(NUM_ROWS_TO_DETECT)
    formats = formats_of(sources, rows, objective_of(config).reader.known)
    _check_one_kind(formats, rows)
    counts, scores, places = list[int](), list[bool](), list[str]()
    for row in rows:
        try:
            with reading(row):
                fields = formats[row.source].fields_of(row)
                counts.append(num_negatives_of(fields))
                places.append(row.place)
                scores.append(_is_scored(formats[row.source]) or not fields.keys().isdisjoint(("scores", "labels")))
        except ValueError:
            if config.on_bad_row == "raise":
                raise
    if config.negatives == "auto" and any(counts) and not all(counts):
        if config.on_bad_row == "raise":
            raise ValueError(
                f"{places[counts.index(0)]}: the row has no wrong passage, and {places[counts.index(max(counts))]} has "
                f"{max(counts)}. Set data.negatives=0 to read none, or add passages to the row."
            )
        counts = [count for count in counts if count]
    found = {"negatives": min(counts, default=0), "scored": all(scores)}
    return config.model_copy(update={name: found[name] for name in found if getattr(config, name) == "auto"})


def _is_scored(format: RowFormat) -> bool:
    return format.fields.required[:2] in SIMILAR


def _check_one_kind(formats: Mapping[int, RowFormat], rows: Sequence[Row]) -> None:
    """Raise ValueError if some sources are pairs of texts with a score, and others queries with passages."""
    by_kind = {_is_scored(format): next(row.place for row in rows if row.source == i) for i, format in formats.items()}
    if len(by_kind) > 1:
        raise ValueError(
            f"{by_kind[True]} has two texts with a score, and {by_kind[False]} a query with its passage. Train on one "
            "kind at a time: remove a source from data.source."
        )


def negatives_of(fields: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the wrong passages of a row: those of the list `negatives`, then those of the columns.

    Raises ValueError if `negatives` is not a list.
    """
    listed = parse_if_json(fields["negatives"], "negatives") if "negatives" in fields else []
    if not isinstance(listed, list):
        raise ValueError(f"`negatives` is {kind(listed)}; expected a list of texts.")
    yield from listed
    yield from (fields[name] for name in NEGATIVES[1:] if name in fields)


def num_negatives_of(fields: Mapping[str, Any]) -> int:
    """Return the number of wrong passages of a row, or of all passages but one if it has a list of them."""
    if PASSAGES in fields:
        return len(listed(fields, PASSAGES)) - 1
    return len(list(negatives_of(fields)))


def listed(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list in a field. Raises ValueError if it is missing, is no list, or is empty."""
    values = parse_if_json(fields[name], name) if name in fields else None
    if not isinstance(values, list) or not values:
        raise ValueError(f"`{name}` is {kind(values)}; expected a list with an item for each passage.")
    return values


@dataclass(frozen=True)
class EmbeddingReader(RowReader):
    """Converts a row to its texts."""

    config: EmbeddingDataConfig
    known: ClassVar[dict[str, Fields]] = KNOWN
    expected: ClassVar[str] = (
        "compares texts; expected the fields `query` and `positive`, and optionally `negative`, `negative_1` and so on "
        "or a list of `negatives`; or `sentence1`, `sentence2` and `score`. If the columns have other names, set "
        "data.columns."
    )

    @classmethod
    def of(cls, sources: RowSources, first_rows: Sequence[Row], tokenizer: Tokenizer) -> Self:
        reader = super().of(sources, first_rows, tokenizer)
        _check_one_kind(reader.formats, first_rows)
        if tokenizer.media:
            raise ValueError(
                f"the model reads {' and '.join(one.unit for one in tokenizer.media)}s, and this recipe compares texts "
                "alone. Set model.images=none."
            )
        if isinstance(reader.config, EmbeddingDataConfig) and "auto" in (reader.config.negatives, reader.config.scored):
            return replace(reader, config=with_negatives(reader.config))
        return reader

    def unread(self, row: Row) -> list[str]:
        names = super().unread(row)
        with reading(row):
            further = num_negatives_of(self.fields_of(row)) - self.num_negatives
        first = f" after the first {self.num_negatives}" if self.num_negatives else ""
        return names + [f"wrong passages{first}"] * (further > 0)

    @property
    def unused(self) -> tuple[str, ...]:
        return () if self.config.scored else ("scores",)

    @property
    def num_negatives(self) -> int:
        return 0 if self.config.negatives == "auto" else self.config.negatives

    def passages(self, row: Row) -> list[Passage | Document]:
        query, *passages = self.texts(row)
        prompts = [self.config.query_prompt, *[self.config.passage_prompt] * len(passages)]
        texts = [(prompt or "") + text for prompt, text in zip(prompts, (query, *passages), strict=True)]
        return [Passage(text, [(0, len(text))]) for text in texts]

    def texts(self, row: Row) -> list[str]:
        """Return the query, its passage and the wrong passages. Raises ValueError with the row's place."""
        with reading(row):
            form, fields = self.formats[row.source].fields, self.fields_of(row)
            names = form.required[:2]
            texts = [check_text(fields[name], f"the field `{name}`") for name in names]
            wrong = list(negatives_of(fields))
            if len(wrong) < self.num_negatives:
                raise ValueError(
                    f"the row has {counted(len(wrong), 'wrong passages')}, and data.negatives={self.num_negatives}. "
                    f"Set data.negatives={len(wrong)} to read as many of every row, or add passages to the row."
                )
            wrong = wrong[: self.num_negatives]
            texts += [check_text(text, f"wrong passage {i}") for i, text in enumerate(wrong, start=1)]
            for i, text in enumerate(texts):
                if not text.strip():
                    name = f"`{names[i]}`" if i < 2 else f"wrong passage {i - 1}"
                    raise ValueError(f"{name} is empty. Remove the row, or add a text.")
            if texts[1] in texts[2:]:
                raise ValueError(
                    f"wrong passage {texts[2:].index(texts[1]) + 1} equals `{names[1]}`. Remove that passage, or the "
                    "row."
                )
            return texts

    def values(self, row: Row) -> list[Any]:
        """Return the score of each text of the row: of its second text, or of each passage; 0 for the query and without
        scores. Raises ValueError with the row's place."""
        num_passages = self.num_negatives + 1
        with reading(row):
            fields = self.fields_of(row)
            if not self.config.scored:
                return [0.0] * (1 + num_passages)
            if _is_scored(self.formats[row.source]):
                name = self.formats[row.source].fields.required[2]
                return [0.0, number_of(fields[name], f"`{name}`")]
            if "scores" not in fields:
                raise ValueError(
                    "no field `scores` with a number for each passage, the right one first. Set data.scored=false to "
                    "train without scores."
                )
            scores = listed(fields, "scores")
            if len(scores) < num_passages:
                raise ValueError(
                    f"`scores` has {len(scores)} numbers; expected one for each of {num_passages} passages."
                )
            numbers = [number_of(score, f"score {i}") for i, score in enumerate(scores[:num_passages], start=1)]
            return [0.0, *numbers]

    def fit(self, documents: list[Document], place: str, report: DataReport) -> list[Document]:
        before, after = self.tokenizer.around
        around, fitted = len(before) + len(after), list[Document]()
        for document in documents:
            ids = document.ids
            if len(ids) + around > self.config.max_length:
                if not report.truncates(len(ids) + around, self.config, place):
                    return []
                report.count_lost(len(ids) + around - self.config.max_length)
            ids = self.tokenizer.fitted(ids, self.config.max_length, self.config.truncation_side)
            fitted.append(replace(document, ids=ids, trained=np.ones(len(ids), dtype=bool)))
        return fitted


def number_of(value: object, name: str) -> float:
    """Return a finite number, also of a string, as CSV files have them. Raises ValueError with its `name`."""
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {kind(value)} ({value!r:.40}); expected a number.")
    return number


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EmbeddingBatch(Batch):
    """A batch of P rows of S texts, row after row."""

    last: Tensor  # (M,) int64: flattened position of each text's last token
    lengths: Tensor  # (M,) int64: tokens of each text
    num_shared: Tensor  # (M,) int64: tokens at the start of each text that are those of an earlier text
    shared: Tensor  # (S,) int64: flattened positions of these tokens, text after text
    scores: Tensor  # (P, S - 1) float32: of the passages of each row; 0 without scores
    identities: Tensor  # (P, S) int64: equal numbers for equal texts
    num_rows: int

    labels_whole_rows: ClassVar[bool] = True
    compares_steps: ClassVar[bool] = True

    @property
    def continued(self) -> tuple[Tensor, Tensor] | None:
        return (self.num_shared, self.shared) if len(self.shared) else None

    def without_targets(self) -> EmbeddingBatch:
        names = ("last", "lengths", "num_shared", "shared", "scores", "identities")
        nothing = {name: getattr(self, name)[:0] for name in names}
        return replace(super().without_targets(), num_rows=0, **nothing)


class Embedding(Objective):
    reader = EmbeddingReader
    batch_type = EmbeddingBatch
    unit = "rows"
    judged = "queries"
    sequences = "texts"
    scored_by = None
    recipe = "embed"
    shown_metrics: ClassVar[Mapping[str, str]] = {
        "eval_recall@1": "{:.1%} of queries find their passage first",
        "eval_recall@10": "{:.1%} among 10",
        "eval_ndcg@10": "nDCG@10 {:.3f}",
        "eval_mrr@10": "MRR@10 {:.3f}",
        "eval_spearman": "Spearman {:.3f}",
    }
    marks = (*(names for names in PAIRS), *SCORED)

    def words_to_try(self, config: EmbeddingDataConfig, run: Path) -> list[str]:
        """A search of the passages of the held-out rows, or else of the training rows, for the query of a row."""
        sources = RowSources.of(config, config.validation_source)
        file, passage, query = sources.sources[0].path, "FIELD", "QUESTION"
        # The run has ended well, whatever became of its rows meanwhile.
        with suppress(ValueError, OSError, StopIteration):
            rows = [row for row in sources.first_rows(NUM_ROWS_TO_DETECT) if row.source == 0]
            format = formats_of(sources, rows, self.reader.known)[0]
            fields = [format.columns.get(name, name) for name in format.fields.required[:2]]
            row = next(row for row in rows if row.problem is None and row.fields.keys() >= {*fields})
            query, passage = str(row.fields[fields[0]]), fields[1]
        return ["embed", str(run), str(file), "--field", passage, "--search", query]

    def completed(self, config: EmbeddingDataConfig) -> EmbeddingDataConfig:
        return with_negatives(config)

    def fitted(self, config: DataConfig, batches: Batches) -> dict[str, Any]:
        return super().fitted(config, batches) | {name: getattr(config, name) for name in ("negatives", "scored")}

    def shared(self, columns: Columns, config: DataConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        """All queries of a batch share the tokens of their prompt, and all passages those of theirs."""
        assert isinstance(config, EmbeddingDataConfig)
        is_passage = (np.arange(len(columns)) % len(config.sides) > 0).astype(np.int64)
        before, prompts = tokenizer.around[0], list[np.ndarray]()
        for prompt in (config.query_prompt, config.passage_prompt):
            prompts.append(np.append(before, tokenizer.encoding(prompt).ids) if prompt else np.empty(0, dtype=np.int32))
        shared = [num_equal(prompts[group], columns[i].ids) for i, group in enumerate(is_passage)]
        return {"shared": np.array(shared, dtype=np.int64), "groups": is_passage}

    def why_not_shared(self, config: DataConfig) -> str:
        assert isinstance(config, EmbeddingDataConfig)
        if config.packing != "padding_free":
            return f"data.packing={config.packing} has no row of all texts"
        return "" if config.query_prompt or config.passage_prompt else "there are none"

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        documents = placed.documents
        scores = columns.per_document("row_values", documents)[:, 0].reshape(-1, placed.sides)
        identities = [_number_of_text(columns[int(one)]) for one in documents]
        return {
            "num_rows": len(scores),
            "scores": np.ascontiguousarray(scores[:, 1:]),
            "lengths": columns.lengths[documents].astype(np.int64),
            "identities": np.array(identities, dtype=np.int64).reshape(-1, placed.sides),
        }

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        return {
            "last": placed.last,
            "num_shared": placed.num_shared,
            "shared": placed.place[~placed.is_own],
        }


def num_equal(prompt: np.ndarray, ids: np.ndarray) -> int:
    """Return how many tokens a text shares with a prompt. The last token is the text's own: its vector may be there."""
    most = min(len(prompt), len(ids) - 1)
    differing = np.flatnonzero(prompt[:most] != ids[:most])
    return int(differing[0]) if len(differing) else most


def _number_of_text(document: Document) -> int:
    digest = hashlib.blake2b(document.identity, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


OBJECTIVE = Embedding()


class EmbeddingDataConfig(DataConfig):
    """Queries with the passage that answers each, and optionally wrong passages; or pairs of texts with a score."""

    objective: ClassVar[str | Objective] = OBJECTIVE
    reads_chats: ClassVar[bool] = False

    max_length: Annotated[int, Field(ge=2)] = 512
    """Maximum length of a text in tokens, with its prompt and the tokens that the tokenizer adds."""
    packing: Literal["none", "bfd", "padding_free"] = "padding_free"  # pyright: ignore[reportIncompatibleVariableOverride]
    """`padding_free` makes each batch one row without padding. `bfd` fills rows of max_length with whole texts. `none`
    pads each batch to its longest text."""
    negatives: Literal["auto"] | NonNegativeInt = "auto"
    """Wrong passages of each row: the columns `negative`, `negative_1` and so on, or the list `negatives`. `auto`: as
    many as each of the first rows has. Rows with fewer raise an error; further ones are not read, and the report says
    so."""
    scored: Literal["auto"] | bool = "auto"
    """Whether rows have a `score` of two texts, or `scores` with a number for each passage, for the losses that learn
    from scores. `auto`: whether the first rows have."""
    query_prompt: str | None = None
    """Text before each query (the first text of a row). It is saved with the model. null: as the model's folder says,
    else none."""
    passage_prompt: str | None = None
    """Text before each passage. It is saved with the model. null: as the model's folder says, else none."""
    shared_prompt: Literal["auto"] | bool = "auto"
    """Compute the prompt of queries, and that of passages, once for all texts of a micro-batch, which follow it in one
    row and do not see each other; for a reranker, what the texts of a row begin with. It needs `packing=padding_free`.
    `auto` does so if there is a prompt, except if tokens see later ones, and with a recurrent state, attention within
    chunks, a router loss, or rotary scaling that depends on the text length within max_length."""

    @property
    def sides(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        number = 0 if self.negatives == "auto" else self.negatives
        return "query", "positive", *(f"negative {i}" for i in range(1, number + 1))

    @property
    def longest(self) -> int | None:
        return self.max_length

    def without_contents(self) -> EmbeddingDataConfig:
        """A plan reads no rows: it counts one wrong passage of each, and scores that every loss accepts."""
        found = {"negatives": 1, "scored": self.negatives != 0}
        return self.model_copy(update={name: value for name, value in found.items() if getattr(self, name) == "auto"})
