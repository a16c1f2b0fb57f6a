"""The input of one forward pass: token ids, labels, positions and document boundaries.

Labels are shifted: labels[b, t] is the token that position t predicts, so a loss compares position by position. A
document's first token is never a label, except in `wrapped` rows, which are one text. Padding has no label because of
its place; its id does not matter.

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
    """int32, if packed: where documents begin in the B * T flattened positions, then B * T once or more often. It has the
    same length in all batches of a run, so that compiled code sees one shape; repeats are documents without tokens.
    None: each row is one document, padded on the right."""
    num_targets: int
    """Number of labels that are not -100."""
    num_tokens: int
    """B * T: all computed positions."""
    is_token: Tensor | None = None
    """(B, T) bool: False on padding. None: no padding."""
    documents: np.ndarray | None = None
    """The numbers of its documents in the prepared data, row after row; held-out documents follow the training ones. None
    if documents are cut or joined, or do not come from prepared data."""
    prefixes: Tensor | None = None
    """(documents, 2) int32, with shared prompts: start and end of the flattened positions that each document of cu_seqlens
    continues. The last position of a shared prompt predicts the first token of several completions; `labels` has the
    first completion's."""
    num_prefix_tokens: int = 0
    """Sum of the lengths of all prefixes."""

    labels_whole_rows: ClassVar[bool] = False
    """Whether the subclass's fields describe whole sequences. Ranks that share a row's tokens then all get these fields."""

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
        """The batch on `device`. Copies to a GPU start from pinned memory and are not waited for."""
        import torch

        device = torch.device(device)

        def move(value: Any) -> Any:
            if isinstance(value, Batch):
                return value.to(device)
            return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)

        return replace(self, **{k: move(v) for k, v in vars(self).items() if isinstance(v, torch.Tensor | Batch)})

    def without_targets(self) -> Self:
        """The same positions without labels, for a pass that only keeps ranks in step."""
        return replace(self, labels=self.labels.new_full(self.labels.shape, IGNORED), num_targets=0)


def rounded_up(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF
