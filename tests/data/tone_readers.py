"""Readers that add columns: `tone`, a number per token that names the token's row, side, place and id; `pair`, the tone
and the id; and `marks`.

Worker processes import this file, so it does not import torch.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from lean_ft.data.pairs import PairReader
from lean_ft.data.sft import SFTReader
from lean_ft.data.unpaired import UnpairedReader

IDS, PLACES = 1024, 256  # more than any id, and than any token's place


class AddsTone:
    def with_columns(self, row: Any, documents: Any) -> Any:
        number = int(row.place.rpartition(" ")[2])
        found = []
        for side, document in enumerate(documents):
            places = (2 * number + side) * PLACES + np.arange(len(document))
            tone = (places * IDS + document.ids + 1).astype(np.int32)
            marks = {"marks": np.arange(number % 4) + number}
            found.append(
                replace(
                    document, per_token={"tone": tone, "pair": np.stack([tone, document.ids], 1)}, per_document=marks
                )
            )
        return found


class ToneSFTReader(AddsTone, SFTReader):
    pass


class TonePairReader(AddsTone, PairReader):
    pass


class ToneUnpairedReader(AddsTone, UnpairedReader):
    pass


READERS = {"sft": ToneSFTReader, "pairs": TonePairReader, "unpaired": ToneUnpairedReader}
