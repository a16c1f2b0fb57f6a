"""Supervised fine-tuning data: files in, batches out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lean_ft.data.batches import Batches, EvalBatches, Rows
from lean_ft.data.cache import cache_folder, limit_size
from lean_ft.data.documents import Documents, count
from lean_ft.data.packing import pack, split, wrap
from lean_ft.data.prepared import hash_of, load_arrays, load_documents, tokenizer_digest
from lean_ft.data.report import DataReport
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer

# Where rows come from counts by its content, and how they are prepared and kept changes nothing in them.
NOT_IN_FINGERPRINT = {"source", "validation_source", "num_processes", "cache_dir", "cache_gib"}


def sft_batches(
    config: SFTDataConfig, tokenizer: Tokenizer, batch_size: int, seed: int
) -> tuple[Batches, EvalBatches | None]:
    """Training batches of `config.source`, and evaluation batches of what is held out, if anything is.

    Held-out rows come from `validation_source`, or are `validation_fraction` of the source's rows, drawn by
    `seed` before packing. Documents and packings are kept in the cache for the next start. Raises ValueError for
    unreadable files and rows, with their place.
    """
    folder = cache_folder(config.cache_dir)
    layout = _Layout(config, batch_size, tokenizer.pad_id, folder)
    prepared = load_documents(config, tokenizer, config.source, folder)
    documents, report, part = prepared.documents, prepared.report, "all"
    held_out: tuple[Rows, DataReport] | None = None
    if config.validation_source is not None:
        validation = load_documents(config, tokenizer, config.validation_source, folder)
        held_out = layout.rows(validation.documents, validation.report, validation.key, "all"), validation.report
    elif config.validation_fraction > 0:
        documents, held_out_documents = _split(documents, config.validation_fraction, seed)
        part = f"but {config.validation_fraction} by seed {seed}"
        held_out_report = DataReport(report.format, rows=len(held_out_documents))
        count(report, documents)
        count(held_out_report, held_out_documents)
        rows = layout.rows(held_out_documents, held_out_report, prepared.key, f"all {part}, the rest")
        held_out = rows, held_out_report
    rows = layout.rows(documents, report, prepared.key, part)
    limit_size(folder, config.cache_gib * 2**30, keep=layout.used)

    # Compiled code sees one length of cu_seqlens, so evaluation has as many boundaries as training.
    most = max(rows.most_in_a_row, held_out[0].most_in_a_row if held_out else 0)
    settings = config.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    drawn_by = seed if config.validation_fraction else None
    batches = Batches(
        replace(rows, most_in_a_row=most),
        seed=seed,
        report=report,
        fingerprint=hash_of(prepared.content, tokenizer_digest(tokenizer), settings, drawn_by),
    )
    return batches, None if held_out is None else EvalBatches(replace(held_out[0], most_in_a_row=most), held_out[1])


def _split(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    num_held_out = max(1, round(len(documents) * fraction))
    if num_held_out >= len(documents):
        raise ValueError(
            f"data.validation_fraction={fraction} of {len(documents)} rows leaves nothing to train on. Lower "
            "it, or name a data.validation_source."
        )
    shuffled = np.random.default_rng(seed).permutation(len(documents))
    return documents.select(np.sort(shuffled[num_held_out:])), documents.select(np.sort(shuffled[:num_held_out]))


class _Layout:
    """Lays documents out in rows, as the settings say."""

    def __init__(self, config: SFTDataConfig, batch_size: int, pad_id: int, folder: Path):
        self._config, self._folder = config, folder
        self._common: dict[str, Any] = {"max_length": config.max_length, "batch_size": batch_size, "pad_id": pad_id}
        self.used: set[str] = set()
        """Keys of the entries in the cache that rows were made of."""

    def rows(self, documents: Documents, report: DataReport, key: str | None, part: str) -> Rows:
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
        order = np.arange(len(pieces.lengths))
    else:
        pieces = split(documents.lengths, config.max_length)
        order, offsets = pack(pieces.lengths, config.max_length)
    starts = documents.starts[pieces.documents] + pieces.firsts
    return {
        "order": order,
        "offsets": offsets,
        "starts": starts,
        "lengths": pieces.lengths,
        "goes_on": pieces.goes_on,
    }
