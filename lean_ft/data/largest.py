"""The largest batch that settings allow, for plans: documents that are as long as possible, collated like every
batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lean_ft.data.arrangement import arrange
from lean_ft.data.batch import Batch
from lean_ft.data.collate import collate
from lean_ft.data.columns import Columns, Document
from lean_ft.data.kinds import Kind
from lean_ft.data.objective import objective_of
from lean_ft.settings import AnswerDataConfig, DataConfig

MOST_TOKENS = 1 << 24  # of a planned batch, whose arrays take about 100 bytes per token


def largest_batch(
    config: DataConfig, batch_size: int, share_prompts: bool = False, kinds: Sequence[Kind] = ()
) -> Batch:
    """Return the largest batch: each document has `max_length` tokens, all trained, and is full of what each of `kinds`
    adds.

    Pairs that share their prompt have the longest completions, which alone are trained. Where rows are packed, they are
    full with or without a shared prompt. Raises ValueError for a batch of more than `MOST_TOKENS`, whose arrays would
    not fit into memory.
    """
    sides, length = len(config.sides), config.max_length
    limit = config.max_completion_length if isinstance(config, AnswerDataConfig) else None
    answer = length if limit is None else min(length, limit)
    shares = share_prompts and not config.packs_rows
    taken = length * (sides - 1) + (answer if shares else length)  # positions of a row of data
    number = batch_size if config.batch_tokens is None else config.batch_tokens // taken
    if number * taken > MOST_TOKENS:
        size = f"batch_size={batch_size}" if config.batch_tokens is None else f"data.batch_tokens={config.batch_tokens}"
        raise ValueError(
            f"a batch has up to {number * taken:,} tokens ({size}, data.max_length={length}), and at most "
            f"{MOST_TOKENS:,} can be planned. Lower one of them."
        )
    prompt = length - answer if shares else 0  # shared tokens
    objective = objective_of(config)
    documents = [objective.full(full_document(length, kinds, i)) for i in range(number) for _ in range(sides)]
    for document in documents:
        document.trained[:prompt] = False
    columns = Columns.join(documents)
    shared = np.tile([*[0] * (sides - 1), prompt], number) if share_prompts else None
    arrangement = arrange(columns.lengths, config, number, shared)
    return collate(arrangement, columns, objective, np.arange(len(arrangement)))


def full_document(length: int, kinds: Sequence[Kind] = (), number: int = 0) -> Document:
    """A document of `length` trained tokens, full of what each of `kinds` adds. `number` tells different documents
    apart."""
    document = Document(np.zeros(length, dtype=np.int32), np.ones(length, dtype=bool))
    for kind in kinds:
        document = kind.fill(document, number)
    return document
