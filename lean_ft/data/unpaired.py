"""Single completions labeled as desirable or undesirable. A preference pair counts as two completions.

A loss may compare them with mismatched completions: each prompt of a batch, followed by the completion of the previous
sequence.

Legend: P completions of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lean_ft.data.columns import Document
from lean_ft.data.formats import OF_PROMPTS, Fields, reading
from lean_ft.data.pairs import PairBatch, PairReader, PreferencePairs
from lean_ft.data.rows import Row, kind
from lean_ft.tokenizers import Passage

if TYPE_CHECKING:
    from torch import Tensor

    from lean_ft.data.collate import Placed
    from lean_ft.data.columns import Columns

LABELS: dict[Any, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class UnpairedReader(PairReader):
    """Converts a labeled completion to one text, and a preference pair to two texts."""

    known: ClassVar[dict[str, Fields]] = {
        "unpaired": Fields(
            ("prompt", "completion", "label"),
            OF_PROMPTS,
            prompts=(("prompt",),),
            completion="completion",
            becomes="a good (true, 1) or bad (false, 0) completion, for `kto`",
        ),
        **PairReader.known,
    }
    expected: ClassVar[str] = (
        "trains on completions labeled desirable or undesirable; expected the fields `prompt`, `completion` and "
        "`label`, or `chosen` and `rejected`. If the columns have other names, set data.columns."
    )

    def passages(self, row: Row) -> list[Passage | Document]:
        form = self.formats[row.source].fields
        if form.is_pair:
            return super().passages(row)
        with reading(row):
            fields = self.fields_of(row)
            sides = dict.fromkeys(("chosen", "rejected"), fields[form.completion])
            answer, _ = self._passages(form.prompt_of(fields), fields | sides)
            if not answer.trained:
                raise ValueError("`completion` has no assistant message to train on.")
            return [answer]

    def names(self, row: Row) -> list[str]:
        return ["desirable" if value else "undesirable" for value in self.values(row)]

    def values(self, row: Row) -> list[float]:
        """Return 1 for each desirable and 0 for each undesirable completion."""
        with reading(row):
            fields = self.fields_of(row)
            if self.formats[row.source].fields.is_pair:
                return [1.0, 0.0]
            label = fields["label"]
            label = label.strip().lower() if isinstance(label, str) else label
            if not isinstance(label, bool | int | float | str) or label not in LABELS:
                raise ValueError(
                    f"`label` is {kind(label)} ({fields['label']!r:.40}); expected true (1) for a desirable or false "
                    "(0) for an undesirable completion."
                )
            return [float(LABELS[label])]


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnpairedBatch(PairBatch):
    """A batch of P completions. Each is a pair with one side, so `answer_tokens` is (P, 1)."""

    is_desirable: Tensor  # (P,) bool
    mismatched: UnpairedBatch | None = None
    """Each prompt with the completion of the previous sequence (the first prompt with the last completion). None in the
    mismatched batch itself. Its `pairs` follow the numbers of all completions, and differ in each epoch."""

    @property
    def asked(self) -> Tensor:
        return super().asked[self.is_desirable]

    def without_targets(self) -> UnpairedBatch:
        return replace(super().without_targets(), is_desirable=self.is_desirable[:0])  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Unpaired(PreferencePairs):
    """Single completions, with mismatched ones."""

    adds_mismatched: bool = True

    reader = UnpairedReader
    batch_type = UnpairedBatch
    unit = "answers"
    judged = "pairs"
    recipe = "kto"
    marks = (("prompt", "completion", "label"),)
    worse = ("undesirable",)
    shares_prompts = False

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        fields = super().row_fields(columns, placed)
        return fields | {"is_desirable": fields["margins"] > 0}

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        fields = super().token_fields(columns, placed, epoch)
        return fields | {"mismatched": self._mismatched(columns, placed, epoch)}

    def describe(self, values: np.ndarray) -> list[str]:
        good, bad = int(values.sum()), int(len(values) - values.sum())
        one_class = (
            f"WARNING: no answer is {'undesirable' if good else 'desirable'}, so nothing tells good and bad apart"
        )
        return [f"{good:,} desirable and {bad:,} undesirable", *([] if good and bad else [one_class])]

    def num_numbers(self, columns: Columns, num_epochs: int) -> int:
        """Number of values that `pairs` can take in `num_epochs`, with mismatched completions; columns: of training."""
        return _first_mismatched(columns) + num_epochs * len(columns)

    def _mismatched(self, columns: Columns, placed: Placed, epoch: int) -> UnpairedBatch | None:
        """Combine each document's prompt with the previous document's completion; one row if documents are packed."""
        if not self.adds_mismatched:
            return None
        from lean_ft.data.collate import batch_of  # loads torch

        arrangement, own = placed.arrangement, [columns[i] for i in placed.documents]
        begins = [int(one.trained.argmax()) for one in own]  # of completions
        mixed = []
        for i, one in enumerate(own):
            completion = own[i - 1][begins[i - 1] :]
            mixed.append(one[: begins[i]].then(completion[: arrangement.row_tokens - begins[i]]))
        batch = batch_of(
            mixed,
            Unpaired(adds_mismatched=False),
            kind="padded" if arrangement.kind == "padded" else "flat",
            row_tokens=arrangement.row_tokens,
            pad_id=columns.pad_id,
            batch_size=arrangement.batch_size * arrangement.most_in_a_row,
        )
        assert isinstance(batch, UnpairedBatch)
        numbers = _first_mismatched(columns) + epoch * len(columns) + placed.documents
        return replace(batch, pairs=batch.pairs.new_tensor(numbers))


def _first_mismatched(columns: Columns) -> int:
    """Return the first number of the columns' mismatched completions. They are numbered after all rows: held-out ones
    first, then training ones epoch by epoch."""
    return 2 * columns.num_in_all - (columns.first or 0) - len(columns)


OBJECTIVE = Unpaired()
