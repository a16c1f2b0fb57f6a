"""Reconstruct the texts of a batch of pairs, with or without shared prompts."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from lean_ft.data import PairBatch

Text = tuple[list[int], list[int]]
"""Ids, and the label that each id predicts; -100 without a label."""


def texts_of(batch: PairBatch) -> Iterator[tuple[int, Text, Text]]:
    """Yield each pair's number and its chosen and rejected texts, without padding."""
    assert batch.is_token is not None
    width = batch.input_ids.shape[1]
    bounds = range(0, batch.num_tokens + 1, width) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    prefixes = [(0, 0)] * (len(bounds) - 1) if batch.prefixes is None else batch.prefixes.tolist()
    ids, is_token = batch.input_ids.flatten(), batch.is_token.flatten()
    answers = zip(*(x.split(batch.answer_tokens.flatten().tolist()) for x in (batch.index, batch.label)), strict=True)
    found: list[Text] = []
    for (start, end), prefix in zip(pairwise(bounds), prefixes, strict=True):
        if start == end or not is_token[start]:
            continue
        own = torch.arange(start, end)
        places = torch.cat((torch.arange(*prefix), own[is_token[own]]))
        labels = torch.full((len(places),), -100)
        for position, label in zip(*next(answers), strict=True):
            labels[places == position] = label
        assert torch.equal(batch.positions.flatten()[places], torch.arange(len(places)))
        found.append((ids[places].tolist(), labels.tolist()))
    assert next(answers, None) is None
    return zip(batch.pairs.tolist(), found[::2], found[1::2], strict=True)
