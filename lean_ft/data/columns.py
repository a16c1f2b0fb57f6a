"""Documents as named columns: token ids, the mask of trained tokens, and whatever else a reader adds.

A column has one value per token, or any number of values per document. Truncation, packing and shared prompts move the
values of a token together, and the model gets each per-token column as an argument of its forward pass, except for the
columns that only a loss reads. So a new column touches the reader that adds it and the module that reads it. Columns
that need more have a kind (`lean_ft.data.kinds`).

Legend: N documents, S tokens of all documents, T tokens of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lean_ft.data.by_source import SourceColumn
    from lean_ft.data.kinds import Kind

OF_LOSS = ("trained", "num_targets", "row_values")  # columns that the model does not read
LENGTHS = ".lengths"  # suffix of the stored array with the lengths of a column


@dataclass(frozen=True)
class Document:
    """A tokenized sequence, or a part of one."""

    ids: np.ndarray  # (T,) int32
    trained: np.ndarray  # (T,) bool: the token is a label
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further columns, (T,) or (T, numbers) each."""
    per_document: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Columns with any number of values, such as a label, or references to files. Truncation keeps them whole."""
    kinds: tuple[Kind, ...] = ()
    """The kinds of its columns that have one."""

    @classmethod
    def of(cls, ids: Sequence[int]) -> Document:
        """A text without labels."""
        return cls(np.array(ids, dtype=np.int32), np.zeros(len(ids), dtype=bool))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, span: slice) -> Document:
        """The tokens of `span`."""
        per_token = {name: values[span] for name, values in self.per_token.items()}
        return replace(self, ids=self.ids[span], trained=self.trained[span], per_token=per_token)

    def then(self, other: Document) -> Document:
        """Append the tokens of `other`, whose per-document columns are kept, except where a kind says otherwise."""
        for kind in self.kinds:
            other = kind.behind(self, other)
        per_token = {n: np.concatenate([values, other.per_token[n]]) for n, values in self.per_token.items()}
        ids, trained = (np.concatenate([getattr(part, n) for part in (self, other)]) for n in ("ids", "trained"))
        return Document(ids, trained, per_token, other.per_document, self.kinds)

    def continued(self, ids: Sequence[int], trained: Sequence[bool] | None = None) -> Document:
        """Append tokens of text."""
        columns = {
            name: np.zeros((len(ids), *values.shape[1:]), values.dtype) for name, values in self.per_token.items()
        }
        mask = np.zeros(len(ids), dtype=bool) if trained is None else np.array(trained, dtype=bool)
        return self.then(Document(np.array(ids, dtype=np.int32), mask, columns, self.per_document))

    @property
    def identity(self) -> bytes:
        """What the model reads of the document."""
        others = {**self.per_token, **self.per_document}
        return identity(self.ids, {name: values for name, values in others.items() if name not in OF_LOSS})


def identity(ids: Iterable[int] | np.ndarray, others: Mapping[str, np.ndarray] | None = None) -> bytes:
    """What the model reads of a text: its ids as 32-bit integers, then a digest of each further column.

    Equal texts have equal identities. Caches, random numbers and shared prompts compare texts by it.
    """
    found = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype="<i4").tobytes()
    for name, values in sorted((others or {}).items()):
        digest = hashlib.blake2b(f"{name} {values.dtype.str} ".encode(), digest_size=8)
        digest.update(np.ascontiguousarray(values).data)
        found += digest.digest()
    return found


@dataclass(frozen=True)
class Columns:
    """N documents. Ids and the mask take 5 bytes per token, in memory or memory-mapped."""

    values: Mapping[str, np.ndarray]
    """Values of all stored documents, by column: (S,) if there is one per token."""
    offsets: Mapping[str, np.ndarray]
    """First value of each stored document, then the number of values, by column. Columns that are not in it have one
    value per token, at the offsets of `ids`."""
    rows: np.ndarray  # (N,) int64: the stored documents that these are
    pad_id: int = 0
    """The id on padding. Other columns are 0 there."""
    kinds: tuple[Kind, ...] = ()
    """The kinds of columns that have one."""
    sources: SourceColumn | None = None
    """The sources of the stored documents, if they have several names."""
    first: int | None = None
    """Number of the first document in the prepared data: held-out documents follow the training documents. None for
    documents that are not prepared data."""
    num_in_all: int = 0
    """Number of documents of the prepared data, training and held-out."""

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Columns:
        """Build from the arrays of `stored`."""
        lengths = {name.removesuffix(LENGTHS): array for name, array in arrays.items() if name.endswith(LENGTHS)}
        offsets = {name: np.append(0, np.cumsum(array)) for name, array in lengths.items()}
        values = {name: array for name, array in arrays.items() if not name.endswith(LENGTHS)}
        return cls(values, offsets, np.arange(len(lengths["ids"])))

    @classmethod
    def join(cls, documents: Sequence[Document], pad_id: int = 0) -> Columns:
        """Concatenate single documents (copies), which have the same columns."""
        arrays = {
            "ids": np.concatenate([one.ids for one in documents] or [np.empty(0)]).astype(np.int32, copy=False),
            "trained": np.concatenate([one.trained for one in documents] or [np.empty(0, dtype=bool)]),
            "ids" + LENGTHS: np.array([len(one) for one in documents], dtype=np.int64),
            # Nothing predicts the first token, so it is not counted.
            "num_targets": np.array([one.trained[1:].sum() for one in documents], dtype=np.int64),
            "num_targets" + LENGTHS: np.ones(len(documents), dtype=np.int64),
        }
        for name in documents[0].per_token if documents else ():
            arrays[name] = np.concatenate([one.per_token[name] for one in documents])
        for name in documents[0].per_document if documents else ():
            some = [one.per_document[name].ravel() for one in documents]
            arrays[name] = np.concatenate(some)
            arrays[name + LENGTHS] = np.array([len(values) for values in some], dtype=np.int64)
        return replace(cls.of(arrays), pad_id=pad_id, kinds=documents[0].kinds if documents else ())

    @property
    def stored(self) -> dict[str, np.ndarray]:
        """The values and lengths of all columns, for the cache on disk."""
        lengths = {name + LENGTHS: np.diff(offsets) for name, offsets in self.offsets.items()}
        return {**self.values, **lengths}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Document:
        """Document i, with views of its values."""
        row = int(self.rows[i])

        def own(name: str) -> np.ndarray:
            first, end = self.offsets.get(name, self.offsets["ids"])[row : row + 2]
            return self.values[name][first:end]

        per_token = {name: own(name) for name in self.per_token if name not in ("ids", "trained")}
        per_document = {name: own(name) for name in self.offsets if name != "ids"}
        return Document(own("ids"), own("trained"), per_token, per_document, self.kinds)

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: np.ndarray) -> Columns:
        """Return the documents `indices`, which share the values."""
        return replace(self, rows=self.rows[indices])

    @property
    def per_token(self) -> list[str]:
        """Names of the columns with one value per token."""
        return [name for name in self.values if name == "ids" or name not in self.offsets]

    @cached_property
    def starts(self) -> np.ndarray:
        """(N,) first token of each document in the per-token values."""
        return self.offsets["ids"][self.rows]

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) tokens of each document."""
        return self.offsets["ids"][self.rows + 1] - self.starts

    @property
    def num_targets(self) -> np.ndarray:
        """(N,) labels of each document."""
        return self.per_document("num_targets")[:, 0]

    def per_document(self, name: str, documents: np.ndarray | None = None) -> np.ndarray:
        """The values of a column that has V values in each document, (N, V), or of some documents; (N, 1) zeros without
        such a column."""
        rows = self.rows if documents is None else self.rows[documents]
        if name not in self.values or not len(self.offsets[name]) > 1:
            return np.zeros((len(rows), 1), dtype=np.float32)
        return self.values[name].reshape(len(self.offsets[name]) - 1, -1)[rows]

    def digests(self) -> np.ndarray:
        """(N,) uint64: what the model reads of each document, and its targets."""
        found = []
        for document in self:
            digest = hashlib.blake2b(document.identity, digest_size=8)
            digest.update(np.ascontiguousarray(document.trained[1:]).data)
            found.append(digest.digest())
        return np.frombuffer(b"".join(found), dtype=np.uint64)

    def content(self) -> str:
        """Hash of the documents, independent of the rows that hold them."""
        digest = hashlib.blake2b(self.lengths.tobytes(), digest_size=16)
        for document in self:
            digest.update(document.identity)
            digest.update(np.ascontiguousarray(document.trained).data)
        return digest.hexdigest()
