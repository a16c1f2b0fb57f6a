"""Batches of sampled completions, for policy losses.

A document is a prompt and its completion. Its mask has the tokens that the policy sampled; other tokens of a
completion, such as a tool's result, are read and not trained.

Legend: G completions, A tokens of the longest, N sampled tokens, K tokens of the texts.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lean_ft.data.batch import Batch
from lean_ft.data.collate import Placed
from lean_ft.data.columns import OF_LOSS, Columns
from lean_ft.data.objective import Objective

TOKEN_VALUES = ("counts", "sampled", "old", "advantages", "values", "returns")  # columns, as in `PolicyBatch`


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(Batch):
    """A batch of G sampled completions; A is the length of the longest completion in tokens.

    Each row holds a prompt and its completion. With shared prompts, the batch is one row: each prompt once, followed by
    its completions (`prefixes`).
    """

    index: Tensor  # (N,) int64: flattened position (0 to B * T - 1) that predicts a sampled token
    label: Tensor  # (N,) int64
    place: Tensor  # (N,) int64: flattened position (0 to G * A - 1) of the token in (G, A)
    counts: Tensor  # (G, A) bool: trained tokens
    sampled: Tensor  # (G, A) float32: log-probabilities at sampling; 0 after the end of a completion
    old: Tensor | None  # (G, A) float32: log-probabilities of the policy before the update; None: current ones
    advantages: Tensor  # (G, A) float32
    answers: range
    """Indices of the completions in the rollout."""
    num_answers: int
    """Number of completions with a trained token; `num_targets` counts the tokens."""
    values: Tensor | None = None  # (G, A) float32: value model's prediction before each token, if the loss needs it
    returns: Tensor | None = None  # (G, A) float32: target of the prediction

    labels_whole_rows: ClassVar[bool] = True

    def without_targets(self) -> "PolicyBatch":
        return replace(super().without_targets(), counts=torch.zeros_like(self.counts), num_answers=0)


class SampledCompletions(Objective):
    """Completions with the per-token columns `TOKEN_VALUES`, and the number of tokens of their `prompt`."""

    batch_type = PolicyBatch
    unit = "completions"
    of_loss = (*OF_LOSS, *TOKEN_VALUES, "prompt")

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        prompts = columns.per_document("prompt", placed.documents)[:, 0]
        shape = len(prompts), int((columns.lengths[placed.documents] - prompts).max())
        place = placed.token - prompts[placed.text]  # (K,) in the completion
        inside = place >= 0
        place += placed.text * shape[1]

        def grid(name: str) -> np.ndarray | None:  # (G, A)
            if name not in columns.values:
                return None
            values = placed.of_tokens(name)
            filled = np.zeros(shape[0] * shape[1], dtype=values.dtype)
            filled[place[inside]] = values[inside]
            return filled.reshape(shape)

        fields = {name: grid(name) for name in TOKEN_VALUES}
        counts = columns.values["counts"]
        return fields | {
            "index": placed.index,
            "label": placed.label,
            "place": place[np.flatnonzero(placed.is_target) + 1],
            "answers": range(shape[0]),
            "num_targets": int(counts.sum()),
            "num_answers": int(np.add.reduceat(counts, columns.starts, dtype=np.int64).astype(bool).sum()),
        }
