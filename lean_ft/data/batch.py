"""The input of one forward pass: token ids, labels, positions and document boundaries.

Labels are shifted: labels[b, t] is the token that position t predicts. The first token of a document is never a label,
except in `wrapped` rows, which are one text. Padding is identified by its position, not by its token id.

Legend: B rows of a batch, T positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from lean_ft.data.rows import IGNORED

if TYPE_CHECKING:  # processes that tokenize load this file, and not torch
    import torch
    from torch import Tensor

PADDED_TO_MULTIPLE_OF = 8


@dataclass(frozen=True)
class Batch:
    """The input of one forward pass. Each objective adds its fields in a subclass."""

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, shifted; -100 where nothing is trained
    positions: Tensor  # (B, T) int64, from 0 in each document
    cu_seqlens: Tensor | None
    """int32, if packed: start of each document in the B * T flattened positions, then B * T, repeated to a fixed
    length. All batches of a run have the same length, so that compiled code sees one shape; repeats are empty
    documents. None: each row is one document, padded on the right."""
    num_targets: int
    """Number of labels that are not -100."""
    num_tokens: int
    """Number of computed positions, B * T."""
    is_token: Tensor | None = None
    """(B, T) bool: False on padding. None: no padding."""
    documents: np.ndarray | None = None
    """Document numbers in the prepared data, row after row; held-out documents follow the training documents. None if
    documents are cut or joined, or do not come from prepared data."""
    prefixes: Tensor | None = None
    """(documents, 2) int32, with shared prompts: start and end of the flattened positions that each document of
    cu_seqlens continues. The last position of a shared prompt predicts the first token of several completions; `labels`
    has the first completion's."""
    num_prefix_tokens: int = 0
    """Sum of the lengths of all prefixes."""

    labels_whole_rows: ClassVar[bool] = False
    """Whether the subclass's fields describe whole sequences. If so, ranks that shard a row's tokens all get these
    fields."""

    @property
    def asked(self) -> Tensor | None:
        """Positions that predict the first token of each chosen or desirable completion; None: every sequence's."""
        return None

    @property
    def built(self) -> Batch:
        """This batch; `UnbuiltBatch` builds it."""
        return self

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a `Decoder`'s forward pass."""
        names = ("input_ids", "positions", "cu_seqlens", "is_token", "prefixes", "num_prefix_tokens")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str) -> Self:
        """Move the batch to `device`. Copies to a GPU use pinned memory and are asynchronous."""
        import torch

        device = torch.device(device)

        def move(value: Any) -> Any:
            if isinstance(value, Batch):
                return value.to(device)
            return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)

        return replace(self, **{k: move(v) for k, v in vars(self).items() if isinstance(v, torch.Tensor | Batch)})

    def without_targets(self) -> Self:
        """Return a copy without labels, for a pass that only keeps ranks synchronized."""
        return replace(self, labels=self.labels.new_full(self.labels.shape, IGNORED), num_targets=0)


def rounded_up(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF
