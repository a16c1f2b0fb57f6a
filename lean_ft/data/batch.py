"""The input of one forward pass: token ids, labels, positions and document boundaries.

Labels are shifted: labels[b, t] is the token that position t predicts. The first token of a document is never a label,
except in `wrapped` rows, which are one text. Padding is identified by its position, not by its token id.

Legend: B rows of a batch, T positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from lean_ft.data.columns import Document
from lean_ft.data.rows import IGNORED

if TYPE_CHECKING:  # processes that tokenize load this file, and not torch
    import torch
    from torch import Tensor

    from lean_ft.data.by_source import BatchSources

PADDED_TO_MULTIPLE_OF = 8
OF_LAYOUT = ("positions", "cu_seqlens", "is_token", "prefixes", "num_prefix_tokens")
"""Arguments of the forward pass that say where texts are in the rows."""


def _argument(name: str) -> Any:
    return property(lambda self: self.inputs.get(name))


@dataclass(frozen=True)
class Batch:
    """The input of one forward pass. Each objective adds its fields in a subclass."""

    inputs: dict[str, Any]
    """Arguments of the forward pass by name: those of `Decoder.forward`, and (B, T) values of further columns.
    `positions` count from 0 in each document. All batches of a run have `cu_seqlens` of one length, so that compiled
    code sees one shape; repeats of B * T at its end are empty documents. Without `cu_seqlens`, each row is one
    document, padded on the right. The last position of a shared prompt (`prefixes`) predicts the first token of several
    completions; `labels` has the first completion's."""
    labels: Tensor  # (B, T) int64, shifted; -100 where nothing is trained
    num_targets: int
    """Number of labels that are not -100."""
    num_tokens: int
    """Number of computed positions, B * T."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """What kinds of columns count in the batch, by the metric's name."""
    texts: Sequence[Document] | None = None
    """The texts, row after row, if a kind of columns adds to them, such as references to files; else None."""
    documents: np.ndarray | None = None
    """Document numbers in the prepared data, row after row; held-out documents follow the training documents. None if
    documents are cut or joined, or do not come from prepared data."""
    sources: BatchSources | None = None
    """Where rows and labels come from, if the batch is held out and its rows have several sources."""

    # Single arguments, for code that reads a batch.
    input_ids = _argument("input_ids")
    positions = _argument("positions")
    cu_seqlens = _argument("cu_seqlens")
    is_token = _argument("is_token")
    prefixes = _argument("prefixes")
    num_prefix_tokens = _argument("num_prefix_tokens")

    labels_whole_rows: ClassVar[bool] = False
    """Whether the subclass's fields describe whole sequences. If so, ranks that shard a row's tokens all get these
    fields."""
    compares_steps: ClassVar[bool] = False
    """Whether the loss compares the rows of all micro-batches of a step, of all ranks."""

    @property
    def asked(self) -> Tensor | None:
        """Positions that predict the first token of each chosen or desirable completion; None: every sequence's."""
        return None

    @property
    def for_teacher(self) -> Batch:
        """The batch that a teacher reads, with the same targets in the same order."""
        return self

    @property
    def built(self) -> Batch:
        """This batch; `UnbuiltBatch` builds it."""
        return self

    def to(self, device: torch.device | str) -> Self:
        """Move the batch to `device`. Copies to a GPU use pinned memory and are asynchronous."""
        import torch

        device = torch.device(device)
        is_cuda = device.type == "cuda"
        return self.mapped(lambda t: t.pin_memory().to(device, non_blocking=True) if is_cuda else t.to(device))

    def mapped(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with `move` applied to each of its tensors."""
        import torch

        def moved(value: Any) -> Any:
            if isinstance(value, Batch):
                return value.mapped(move)
            if isinstance(value, dict):
                return {name: moved(one) for name, one in value.items()}
            if isinstance(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
                return type(value)(*map(moved, value))
            return move(value) if isinstance(value, torch.Tensor) else value

        return replace(self, **{name: moved(value) for name, value in vars(self).items()})

    def encode_once(self, model: Any) -> None:
        """Encode the inputs once for all passes of `model` and of the same model without its adapter, as far as their
        encoders are not trained: the first pass keeps their output in this batch."""
        encoders = {n: one.encoded_once for n, one in self.inputs.items() if hasattr(one, "encoded_once")}
        self.inputs.update({name: encoded(model) for name, encoded in encoders.items()})

    def part_of_rows(self, place: int, number: int) -> Self:
        """Return part `place` of `number` equal parts of each row, for ranks that share rows.

        Positions and bounds of documents stay those of the whole row, and with `labels_whole_rows` also the labels.
        Raises ValueError if the rows do not divide.
        """
        num_rows, num_tokens = self.labels.shape
        if num_tokens % number:
            raise ValueError(
                f"rows of {num_tokens} tokens do not divide evenly over {number} processes (parallel.context x "
                "tensor). Set data.packing=bfd with a data.max_length that they divide."
            )
        width = num_tokens // number

        def own(values: Tensor) -> Tensor:
            return values[:, place * width : (place + 1) * width].contiguous()

        shape = self.labels.shape
        per_token = [name for name, value in self.inputs.items() if getattr(value, "shape", ())[:2] == shape]
        inputs = {**self.inputs, **{name: own(self.inputs[name]) for name in per_token if name != "positions"}}
        if self.labels_whole_rows:
            parts = {n: one.part_of_rows(place, number) for n, one in vars(self).items() if isinstance(one, Batch)}
            return replace(self, inputs=inputs, **parts)
        sources = None
        if self.sources is not None:
            sources = self.sources.part_of_positions(lambda numbers: numbers[:, place * width : (place + 1) * width])
        return replace(self, inputs=inputs, labels=own(self.labels), num_tokens=num_rows * width, sources=sources)

    def questions(self) -> Iterator[tuple[Document, list[int]]]:
        """Yield the prompt and the ids of the right completion of every sequence that has a trained stretch."""
        boundaries = range(0, self.num_tokens + 1, self.labels.shape[1])
        if self.cu_seqlens is not None:
            boundaries = self.cu_seqlens.tolist()
        ids, labels = self.input_ids.flatten().tolist(), self.labels.flatten().tolist()
        asked = None if self.asked is None else set(self.asked.tolist())
        is_token, texts = self.inputs["is_token"].flatten().tolist(), iter(self.texts or ())
        for start, end in pairwise(boundaries):
            text = next(texts, None) if start < end and is_token[start] else None  # else padding
            if asked is not None and asked.isdisjoint(range(start, end)):
                continue
            trained = [i for i in range(start, end) if labels[i] != IGNORED]
            if trained:
                last = first = trained[-1]
                while first > start and labels[first - 1] != IGNORED:
                    first -= 1
                prompt = Document.of(ids[start : first + 1]) if text is None else text[: first + 1 - start]
                yield prompt, labels[first : last + 1]  # labels are shifted

    def without_targets(self) -> Self:
        """Return a copy without labels, for a pass that only keeps ranks synchronized. Its tokens do not count in
        metrics."""
        no_token = {} if self.is_token is None else {"is_token": self.is_token.new_zeros(self.is_token.shape)}
        labels = self.labels.new_full(self.labels.shape, IGNORED)
        sources = None if self.sources is None else self.sources.without_targets()
        return replace(self, inputs=self.inputs | no_token, labels=labels, num_targets=0, sources=sources)


def rounded_up(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF
