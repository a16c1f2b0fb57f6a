"""Supervised fine-tuning data: files in, batches out."""

from dataclasses import replace

import numpy as np

from lean_ft.data.batches import Batches, EvalBatches, Rows, longest_batch
from lean_ft.data.cache import cache_folder, limit_size
from lean_ft.data.documents import count
from lean_ft.data.layout import Layout
from lean_ft.data.prepared import hash_of, load_documents, tokenizer_digest
from lean_ft.data.report import DataReport
from lean_ft.data.sources import list_sources
from lean_ft.data.weights import weigh
from lean_ft.settings import SFTDataConfig
from lean_ft.shapes_only import stage
from lean_ft.tokenizers import Tokenizer

# Where rows come from counts by its content, and how they are prepared and kept changes nothing in them.
NOT_IN_FINGERPRINT = {"source", "validation_source", "num_processes", "cache_dir", "cache_gib"}


def sft_batches(
    config: SFTDataConfig, tokenizer: Tokenizer, batch_size: int, seed: int
) -> tuple[Batches, EvalBatches | None]:
    """Training batches of `config.source`, and evaluation batches of what is held out, if anything is.

    Held-out rows come from `validation_source`, or are `validation_fraction` of the source's rows, drawn by
    `seed` before packing. Weights repeat or thin out what is trained on, never what is held out. Documents and
    packings are kept in the cache for the next start. Raises ValueError for unreadable files and rows, with their place.
    """
    if (watcher := stage()) is not None:
        return watcher.batches(lambda: longest_batch(config, batch_size)), None
    folder = cache_folder(config.cache_dir)
    layout = Layout(config, batch_size, tokenizer.pad_id, folder)
    prepared = load_documents(config, tokenizer, config.source, folder)
    documents, report = prepared.documents, prepared.report
    source_of = np.repeat(np.arange(len(report.kept_by_source)), report.kept_by_source)
    weights = [source.weight for source in list_sources(config.source)]
    drawn_by = seed if config.validation_fraction or any(weight % 1 for weight in weights) else None
    part = hash_of(config.validation_source is None and config.validation_fraction, weights, drawn_by)

    held_out: tuple[Rows, DataReport] | None = None
    if config.validation_source is not None:
        validation = load_documents(config, tokenizer, config.validation_source, folder)
        held_out = layout.rows(validation.documents, validation.report, validation.key), validation.report
    elif config.validation_fraction > 0:
        trained_on, held_out_indices = _split(len(documents), config.validation_fraction, seed)
        held_out_documents = documents.select(held_out_indices)
        held_out_report = DataReport(report.format, rows=len(held_out_documents))
        count(held_out_report, held_out_documents)
        held_out = layout.rows(held_out_documents, held_out_report, prepared.key, f"{part} held out"), held_out_report
        documents, source_of = documents.select(trained_on), source_of[trained_on]
        count(report, documents)
    if any(weight != 1 for weight in weights):
        documents = documents.select(weigh(source_of, weights, seed))
        if not len(documents):
            raise ValueError(f"the weights in data.source ({weights}) leave no row to train on. Raise them.")
        count(report, documents)
    rows = layout.rows(documents, report, prepared.key, part)
    limit_size(folder, config.cache_gib * 2**30, keep=layout.used)

    # Compiled code sees one length of cu_seqlens, so evaluation has as many boundaries as training.
    most = max(rows.most_in_a_row, held_out[0].most_in_a_row if held_out else 0)
    settings = config.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    batches = Batches(
        replace(rows, most_in_a_row=most),
        seed=seed,
        report=report,
        fingerprint=hash_of(prepared.content, tokenizer_digest(tokenizer), settings, weights, drawn_by),
    )
    return batches, None if held_out is None else EvalBatches(replace(held_out[0], most_in_a_row=most), held_out[1])


def _split(num_documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of what is trained on and of what is held out, each in order."""
    num_held_out = max(1, round(num_documents * fraction))
    if num_held_out >= num_documents:
        raise ValueError(
            f"data.validation_fraction={fraction} of {num_documents} rows leaves nothing to train on. Lower "
            "it, or name a data.validation_source."
        )
    shuffled = np.random.default_rng(seed).permutation(num_documents)
    return np.sort(shuffled[num_held_out:]), np.sort(shuffled[:num_held_out])
