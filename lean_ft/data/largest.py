"""The largest batch that settings allow, for plans. It is built as every batch is, from documents that are as long as possible."""

from __future__ import annotations

import math

import numpy as np

from lean_ft.data.arrangement import arrange
from lean_ft.data.batch import Batch
from lean_ft.data.collate import collate
from lean_ft.data.columns import Columns, Document
from lean_ft.data.images import BLANK, RowImage, with_columns
from lean_ft.data.objective import objective_of
from lean_ft.images.cuts import Size
from lean_ft.images.rules import ImageRules
from lean_ft.settings import AnswerDataConfig, DataConfig

MOST_TOKENS = 1 << 24  # of a planned batch, whose arrays take about 100 bytes per token


def largest_batch(
    config: DataConfig, batch_size: int, share_prompts: bool = False, image_rules: ImageRules | None = None
) -> Batch:
    """Return the largest batch: each document has `max_length` tokens, all trained, and with `image_rules` as many images as fit.

    Pairs that share their prompt in a padded row have the longest completions, which alone are trained. Raises ValueError for a batch of more than
    `MOST_TOKENS`, whose arrays would not fit into memory.
    """
    sides, length = len(config.sides), config.max_length
    limit = config.max_completion_length if isinstance(config, AnswerDataConfig) else None
    answer = length if limit is None else min(length, limit)
    shares_padded = share_prompts and config.packing == "none"
    taken = length + answer if shares_padded else length * sides  # positions of a row of data
    number = batch_size if config.batch_tokens is None else config.batch_tokens // taken
    if number * taken > MOST_TOKENS:
        size = f"batch_size={batch_size}" if config.batch_tokens is None else f"data.batch_tokens={config.batch_tokens}"
        raise ValueError(
            f"a batch has up to {number * taken:,} tokens ({size}, data.max_length={length}), and at most {MOST_TOKENS:,} "
            "can be planned. Lower one of them."
        )
    prompt = length - answer if shares_padded else 0  # shared tokens
    documents = [full_document(length, image_rules, i) for i in range(number) for _ in range(sides)]
    for document in documents:
        document.trained[:prompt] = False
    columns = Columns.join(documents)
    shared = np.tile([0, prompt], number) if share_prompts else None
    arrangement = arrange(columns.lengths, config, number, shared)
    return collate(arrangement, columns, objective_of(config), np.arange(len(arrangement)))


def full_document(length: int, rules: ImageRules | None = None, number: int = 0) -> Document:
    """A document of `length` trained tokens: zeros, or with `rules` images that leave the fewest tokens over, the largest of such sizes.

    The images are never read. `number` tells those of different documents apart.
    """
    ids, trained = np.zeros(length, dtype=np.int32), np.ones(length, dtype=bool)
    if rules is None:
        return Document(ids, trained)
    sides = [n * rules.patch_size * rules.merge for n in range(math.isqrt(length), 0, -1)]
    layouts = [rules.layout(Size(side, side * eighths // 8)) for side in sides for eighths in range(8, 0, -1)]
    layout = max(layouts, key=lambda one: length - length % sum(one.runs))  # 0 if it does not fit
    count = length // sum(layout.runs)
    ids[: count * sum(layout.runs)] = 1
    images = [RowImage(BLANK + b"%d %d" % (number, i), layout) for i in range(count)]
    return with_columns(Document(ids, trained), images, rules, image_id=1)
