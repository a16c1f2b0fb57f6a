"""What a forward pass is given: a batch of tensors, and what it tells beside them for each objective.

Labels are already shifted: labels[b, t] is what position t has to predict, so a loss compares position by
position, and no document's first token is ever a label (but in `wrapped` rows, which are one text). Padding carries
no label because of where it is; its id plays no part.

Legend: B rows of a batch, T positions of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lean_ft.data.rows import IGNORED
from lean_ft.settings import DataConfig, PreferenceDataConfig

PADDED_TO_MULTIPLE_OF = 8


@dataclass(frozen=True)
class Batch:
    """One forward pass of input."""

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, already shifted; -100 where nothing is trained
    positions: Tensor  # (B, T) int64, from 0 in every document
    cu_seqlens: Tensor | None
    """When packed, int32: where documents begin in the B * T flattened positions, then B * T, once or more often. It is
    as long for every batch of a run, so that compiled code sees one shape; the repeats are documents of no tokens.
    None: every row is one document, padded on the right."""
    num_targets: int
    """Labels that are not -100."""
    num_tokens: int
    """B * T: all positions that are computed."""
    is_token: Tensor | None = None
    """(B, T) bool: False on padding. None: nothing is padding."""
    documents: np.ndarray | None = None
    """Which documents of the prepared data it holds, row after row, those held out behind those trained on. None: some are
    cut or joined, or it is not of prepared data."""

    @property
    def built(self) -> "Batch":
        """Itself; of one that is built when it is asked for, that batch."""
        return self

    @property
    def inputs(self) -> dict[str, Any]:
        """What a `Decoder`'s forward pass takes of it."""
        return {name: getattr(self, name) for name in ("input_ids", "positions", "cu_seqlens", "is_token")}

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`; copies to a GPU from pinned memory, without waiting for them."""
        device = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return replace(self, **{name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)})

    def without_targets(self) -> "Batch":
        """The same positions with nothing to learn: for a pass that is made because other ranks make one."""
        return replace(self, labels=torch.full_like(self.labels, IGNORED), num_targets=0)


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """A batch of P pairs of answers, which tells their labels apart: N in all, of pair after pair, the chosen ones first."""

    index: Tensor  # (N,) int64: which of the B * T flattened positions predicts the label
    label: Tensor  # (N,) int64
    answer_tokens: Tensor  # (P, 2) int64: labels of the chosen and the rejected answer
    pairs: Tensor  # (P,) int64: which pairs of the prepared data they are, those held out behind those trained on
    last: Tensor  # (2 P,) int64: which flattened position each sequence ends with
    margins: Tensor  # (P,) float32: by how much the chosen answer is better, where the rows tell it; 0 elsewhere
    prefixes: Tensor | None = None
    """(documents, 2) int32, where prompts are shared: the flattened positions, from and to, that each document of cu_seqlens
    goes on from. What is shared predicts a first token of each answer, of which `labels` has the chosen one's alone."""
    num_prefix_tokens: int = 0
    """Of all prefixes together."""

    @property
    def inputs(self) -> dict[str, Any]:
        return super().inputs | {"prefixes": self.prefixes, "num_prefix_tokens": self.num_prefix_tokens}

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    def without_targets(self) -> "PairBatch":
        names = ("index", "label", "answer_tokens", "pairs", "last", "margins")
        nothing = {name: getattr(self, name)[:0] for name in names}
        return replace(self, labels=torch.full_like(self.labels, IGNORED), num_targets=0, **nothing)


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(Batch):
    """A batch of B answers that the model sampled, one a row behind its prompt; A are the tokens of the longest."""

    index: Tensor  # (N,) int64: which of the B * T flattened positions predicts a token of an answer
    label: Tensor  # (N,) int64
    place: Tensor  # (N,) int64: where that token stands in the B * A flattened tokens of answers
    counts: Tensor  # (B, A) bool: the tokens that are learned from
    sampled: Tensor  # (B, A) float32: log-probabilities as they were drawn; 0 behind an answer
    old: Tensor | None  # (B, A) float32: the trainer's own, before the first update; None: those of now
    advantages: Tensor  # (B, A) float32
    answers: range
    """Which of the round's answers they are."""
    num_answers: int
    """Those with a token that is learned from; `num_targets` counts the tokens."""
    values: Tensor | None = None  # (B, A) float32: what was expected before each token, where the loss is of that
    returns: Tensor | None = None  # (B, A) float32: and what should have been

    def without_targets(self) -> "PolicyBatch":
        nothing = {"counts": torch.zeros_like(self.counts), "num_answers": 0}
        return replace(self, labels=torch.full_like(self.labels, IGNORED), num_targets=0, **nothing)

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        pad_id: int,
        first: int,
        counts: Sequence[Sequence[bool]],
        sampled: Sequence[Sequence[float]],
        advantages: Sequence[Sequence[float]],
        old: Sequence[Sequence[float]] | None = None,
        values: Sequence[Sequence[float]] | None = None,
        returns: Sequence[Sequence[float]] | None = None,
    ) -> "PolicyBatch":
        """The batch of answers that are numbered from `first` on, each list of one token or more."""
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        width, longest = int(rounded_up(np.array([len(row) for row in rows])).max()), max(map(len, answers))
        targets, index, label, place = list[list[int]](), list[int](), list[int](), list[int]()
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            # The last token of the prompt predicts the answer's first.
            targets.append([*[IGNORED] * (len(prompt) - 1), *answer])
            index += range(i * width + len(prompt) - 1, i * width + len(rows[i]) - 1)
            label += answer
            place += range(i * longest, i * longest + len(answer))

        # A tensor of all rows at once: operations row by row are what a rehearsal on shapes would wait for.
        def grid(values: Sequence[Sequence[Any]], dtype: torch.dtype, size: int = longest, rest: int = 0) -> Tensor:
            return torch.tensor([[*row, *[rest] * (size - len(row))] for row in values], dtype=dtype)

        counted, input_ids = grid(counts, torch.bool), grid(rows, torch.int64, width, pad_id)
        return cls(
            input_ids=input_ids,
            labels=grid(targets, torch.int64, width, IGNORED),
            positions=torch.arange(width).expand(len(rows), -1).contiguous(),
            cu_seqlens=None,
            num_targets=int(counted.sum()),
            num_tokens=input_ids.numel(),
            is_token=grid([[True] * len(row) for row in rows], torch.bool, width),
            index=torch.tensor(index),
            label=torch.tensor(label),
            place=torch.tensor(place),
            counts=counted,
            sampled=grid(sampled, torch.float32),
            old=None if old is None else grid(old, torch.float32),
            advantages=grid(advantages, torch.float32),
            values=None if values is None else grid(values, torch.float32),
            returns=None if returns is None else grid(returns, torch.float32),
            answers=range(first, first + len(rows)),
            num_answers=int(counted.any(1).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class UnpairedBatch(PairBatch):
    """A batch of P answers, each by itself: a pair of one side, so that `answer_tokens` is (P, 1)."""

    is_desirable: Tensor  # (P,) bool
    mismatched: "UnpairedBatch | None" = None
    """Each prompt with the answer of the sequence before it, the first with the last's; None here. Their `pairs` are numbers
    of their own, behind those of all answers, in every epoch others."""

    def to(self, device: torch.device | str) -> "UnpairedBatch":
        mismatched = None if self.mismatched is None else self.mismatched.to(device)
        return replace(super().to(device), mismatched=mismatched)  # pyright: ignore[reportReturnType]

    def without_targets(self) -> "UnpairedBatch":
        return replace(super().without_targets(), is_desirable=self.is_desirable[:0])  # pyright: ignore[reportReturnType]


def longest_batch(config: DataConfig, batch_size: int, share_prompts: bool = False) -> Batch:
    """The batch that takes most, without contents: every row `max_length` tokens, and every token a target.

    Where prompts are shared, each row is of a pair: a sequence of `max_length` and as long an answer as there may be.
    """
    sides, answer = len(config.sides), config.max_length
    if share_prompts and isinstance(config, PreferenceDataConfig) and config.max_completion_length is not None:
        answer = min(answer, config.max_completion_length)
    shares_padded = share_prompts and not config.packs_rows
    taken = config.max_length + answer if shares_padded else config.max_length * sides  # by what a row of data became
    number = batch_size if config.batch_tokens is None else config.batch_tokens // taken
    num_tokens, num_documents = number * taken, number * (3 if share_prompts else sides)
    num_targets = number * 2 * answer if shares_padded else num_tokens
    shape = (number, taken) if share_prompts else (number * sides, config.max_length)
    batch = Batch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        positions=torch.zeros(shape, dtype=torch.int64),
        cu_seqlens=torch.zeros(num_documents + 1, dtype=torch.int32)
        if share_prompts or config.packing != "none"
        else None,
        num_targets=num_targets,
        num_tokens=num_tokens,
    )
    if sides == 1 and config.tells != "label":
        return batch
    pairs = PairBatch(
        **vars(batch),
        index=torch.zeros(num_targets, dtype=torch.int64),
        label=torch.zeros(num_targets, dtype=torch.int64),
        answer_tokens=torch.zeros(number, sides, dtype=torch.int64),
        pairs=torch.zeros(number, dtype=torch.int64),
        last=torch.zeros(number * sides, dtype=torch.int64),
        margins=torch.zeros(number),
        prefixes=torch.zeros(num_documents, 2, dtype=torch.int32) if share_prompts else None,
    )
    if sides == 2:
        return pairs
    unpaired = UnpairedBatch(**vars(pairs), is_desirable=torch.zeros(number, dtype=torch.bool))
    return replace(unpaired, mismatched=unpaired)


def rounded_up(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // PADDED_TO_MULTIPLE_OF) * PADDED_TO_MULTIPLE_OF
