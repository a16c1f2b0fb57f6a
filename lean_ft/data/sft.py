"""Supervised fine-tuning data: files in, batches out."""

import hashlib

import numpy as np

from lean_ft.data.batches import Batches, EvalBatches, Rows
from lean_ft.data.documents import Documents, count, prepare_documents
from lean_ft.data.packing import pack
from lean_ft.data.report import DataReport
from lean_ft.data.sources import list_sources
from lean_ft.data.weights import weigh
from lean_ft.settings import SFTDataConfig
from lean_ft.tokenizers import Tokenizer


def sft_batches(
    config: SFTDataConfig, tokenizer: Tokenizer, batch_size: int, seed: int
) -> tuple[Batches, EvalBatches | None]:
    """Training batches of `config.source`, and evaluation batches of what is held out, if anything is.

    Held-out rows come from `validation_source`, or are `validation_fraction` of the source's rows, drawn by
    `seed` before packing. Weights repeat or thin out what is trained on, never what is held out. Raises ValueError
    for unreadable files and rows, with their place.
    """
    digest = hashlib.blake2b(digest_size=16)
    documents, report = prepare_documents(config, tokenizer, config.source, digest)
    source_of = np.repeat(np.arange(len(report.kept_by_source)), report.kept_by_source)
    held_out: tuple[Documents, DataReport] | None = None
    if config.validation_source is not None:
        held_out = prepare_documents(config, tokenizer, config.validation_source)
    elif config.validation_fraction > 0:
        trained_on, held_out_indices = _split(len(documents), config.validation_fraction, seed)
        validation = documents.select(held_out_indices)
        held_out = validation, DataReport(report.format, rows=len(validation))
        count(held_out[1], validation)
        documents, source_of = documents.select(trained_on), source_of[trained_on]
        count(report, documents)
    weights = [source.weight for source in list_sources(config.source)]
    if any(weight != 1 for weight in weights):
        documents = documents.select(weigh(source_of, weights, seed))
        if not len(documents):
            raise ValueError(f"the weights in data.source ({weights}) leave no row to train on. Raise them.")
        count(report, documents)

    for file in tokenizer.files:
        digest.update(file.read_bytes())
    settings = config.model_dump_json(exclude={"source", "validation_source"})
    draws = config.validation_fraction or any(weight % 1 for weight in weights)
    digest.update(f"{settings} weights {weights} seed {seed if draws else None}".encode())
    batches = Batches(
        _rows(documents, config, batch_size, tokenizer.pad_id, report),
        seed=seed,
        report=report,
        fingerprint=digest.hexdigest(),
    )
    if held_out is None:
        return batches, None
    validation, validation_report = held_out
    rows = _rows(validation, config, batch_size, tokenizer.pad_id, validation_report)
    return batches, EvalBatches(rows, validation_report)


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


def _rows(documents: Documents, config: SFTDataConfig, batch_size: int, pad_id: int, report: DataReport) -> Rows:
    packed = config.packing == "bfd"
    if packed:
        order, offsets = pack(documents.lengths, config.max_length)
        report.packed_rows = len(offsets) - 1
        report.packing_efficiency = report.tokens / (report.packed_rows * config.max_length)
    else:
        order, offsets = np.arange(len(documents)), np.arange(len(documents) + 1)
    return Rows(documents, order, offsets, packed, config.max_length, batch_size, pad_id)
