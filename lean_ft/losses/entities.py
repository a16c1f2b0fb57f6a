"""Precision, recall and F1 of named entities. Shapes: P labels of a batch, C labels.

An entity is a token with B-TYPE and the tokens with I-TYPE that follow in the same text. A predicted entity is right if
an entity of the same type has the same first and last token; I-TYPE behind anything else is in no entity. That is
seqeval's `mode="strict"` with the scheme IOB2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_ft.system.shards import ALONE, Ranks


class Entities:
    """Counts of true, predicted and rightly predicted entities."""

    def __init__(self, names: Sequence[str], device: torch.device, ranks: Ranks = ALONE) -> None:
        """names: (C,) labels, of which `are_bio` holds."""
        types = sorted({name[2:] for name in names if name != "O"})
        self._begins = torch.tensor([name.startswith("B-") for name in names], device=device)  # (C,)
        self._type = torch.tensor([-1 if n == "O" else types.index(n[2:]) for n in names], device=device)  # (C,)
        self._ranks, self._counts = ranks, torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, predicted: Tensor, actual: Tensor, text_of: Tensor) -> None:
        """Add the labels of whole texts, (P,) int64 each; text_of: the text of each label, in order."""
        begins, ends = zip(*(self._bounds(labels, text_of) for labels in (actual, predicted)), strict=True)
        is_right = begins[0] & begins[1] & (ends[0] == ends[1]) & (self._type[actual] == self._type[predicted])
        self._counts += torch.stack([begins[0].sum(), begins[1].sum(), is_right.sum()])

    def _bounds(self, labels: Tensor, text_of: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each label begins an entity, (P,) bool, and the first label behind its entity, (P,) int64."""
        begins, types, places = (
            self._begins[labels],
            self._type[labels],
            torch.arange(len(labels), device=labels.device),
        )
        goes_on = torch.zeros_like(begins)
        goes_on[1:] = ~begins[1:] & (types[1:] >= 0) & (types[1:] == types[:-1]) & (text_of[1:] == text_of[:-1])
        next_end = torch.where(goes_on, len(labels), places).flip(0).cummin(0).values.flip(0)
        return begins, torch.cat([next_end[1:], next_end.new_full((min(1, len(labels)),), len(labels))])

    def metrics(self) -> dict[str, float]:
        """Return `eval_entity_precision`, `eval_entity_recall` and `eval_entity_f1`, 0 where there is nothing to divide
        by. Call it on every rank."""
        actual, predicted, right = (self._ranks.sum(self._counts.clone()) / self._ranks.num_sharing).tolist()
        return {
            "eval_entity_precision": right / max(1.0, predicted),
            "eval_entity_recall": right / max(1.0, actual),
            "eval_entity_f1": 2 * right / max(1.0, actual + predicted),
        }


def are_bio(names: Sequence[str]) -> bool:
    """Whether labels are O, B-TYPE and I-TYPE."""
    return any(name.startswith("B-") for name in names) and all(
        name == "O" or name[:2] in ("B-", "I-") for name in names
    )
