"""Documents to the rows of batches, by `data.packing`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lean_ft.data.batches import Rows
from lean_ft.data.documents import Documents
from lean_ft.data.packing import pack, split, wrap
from lean_ft.data.prepared import hash_of, load_arrays
from lean_ft.data.report import DataReport
from lean_ft.settings import SFTDataConfig


class Layout:
    """Lays documents out in rows, as the settings say."""

    def __init__(self, config: SFTDataConfig, batch_size: int, pad_id: int, folder: Path):
        self._config, self._folder = config, folder
        self._common: dict[str, Any] = {"max_length": config.max_length, "batch_size": batch_size, "pad_id": pad_id}
        self.used: set[str] = set()
        """Keys of the entries in the cache that rows were made of."""

    def rows(self, documents: Documents, report: DataReport, key: str | None, part: str = "all") -> Rows:
        """The rows of `documents`, which are the `part` of the entry `key`; tells `report` how full they are."""
        config = self._config
        arrays = {"starts": documents.starts, "lengths": documents.lengths}
        if config.packing in ("none", "padding_free"):
            packed = False
            arrays |= {"order": np.arange(len(documents)), "offsets": np.arange(len(documents) + 1)}
        else:
            packed = True
            packing_key = f"packing-{hash_of(key, part, config.packing, config.max_length)}" if key else None
            self.used |= {packing_key} if packing_key else set()
            arrays |= load_arrays(self._folder, packing_key, lambda: _packed(documents, config))
        self.used |= {key} if key else set()
        rows = Rows(
            documents.tokens,
            documents.trained,
            **arrays,
            layout="packed" if packed else "padded" if config.packing == "none" else "flat",
            joined=config.packing == "wrapped",
            batch_tokens=config.batch_tokens,
            **self._common,
        )
        if not packed:
            return rows
        report.packing, report.packed_rows = config.packing, len(rows)
        report.packing_efficiency = report.tokens / (len(rows) * config.max_length)
        if rows.joined:
            # A document's first token is predicted by what stands before it, and a row's first token by nothing.
            starts, row_starts = documents.starts, rows.starts[rows.order[rows.offsets[:-1]]]
            report.target_tokens += int(documents.trained[starts].sum()) - int(documents.trained[row_starts].sum())
            return replace(rows, most_in_a_row=2)
        tokens_in_rows = np.add.reduceat(rows.lengths[rows.order], rows.offsets[:-1])
        return replace(rows, most_in_a_row=int((np.diff(rows.offsets) + (tokens_in_rows < config.max_length)).max()))


def _packed(documents: Documents, config: SFTDataConfig) -> dict[str, np.ndarray]:
    """The packing's `order` and `offsets`, and the pieces that it made, if it cut documents."""
    if config.packing == "bfd":
        order, offsets = pack(documents.lengths, config.max_length)
        return {"order": order, "offsets": offsets}
    if config.packing == "wrapped":
        pieces, offsets = wrap(documents.lengths, config.max_length)
        cut = {"order": np.arange(len(pieces.lengths)), "offsets": offsets}
    else:
        pieces = split(documents.lengths, config.max_length)
        order, offsets = pack(pieces.lengths, config.max_length)
        cut = {"order": order, "offsets": offsets, "goes_on": pieces.goes_on}
    return cut | {"starts": documents.starts[pieces.documents] + pieces.firsts, "lengths": pieces.lengths}
