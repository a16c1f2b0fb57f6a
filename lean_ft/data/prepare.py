"""Data preparation: read and tokenize sources, split off held-out rows, mix the sources, and build batches.

Documents and packings are cached (`lean_ft.data.keys`). A chat template that writes the current date keeps the date of
the first start, so a run resumed the next day sees the same rows.

A Hugging Face dataset is identified by the content of its files in the `datasets` cache. A streamed dataset has no
files: it is read again at each start, and its documents are stored on disk for that run only.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lean_ft.data.arrangement import Arrangement, arrange
from lean_ft.data.batch import Batch
from lean_ft.data.batches import ArrangedDocuments, Batches, EvalBatches
from lean_ft.data.by_source import SourceColumn
from lean_ft.data.columns import Columns
from lean_ft.data.documents import Parts, renderer_of
from lean_ft.data.keys import (
    code_digest,
    contents_of_tokenizer,
    hash_of,
    settings_of_batches,
    settings_of_documents,
    tokenizer_digest,
)
from lean_ft.data.kinds import Kind
from lean_ft.data.largest import largest_batch
from lean_ft.data.mixing import MixedRows, SourceMix, SourceUse
from lean_ft.data.near_duplicates import decided_by, note_held_out
from lean_ft.data.objective import Objective, objective_of, own_files
from lean_ft.data.packing import PACKING_VERSION, pack_documents
from lean_ft.data.parts import kinds_of
from lean_ft.data.report import DataReport
from lean_ft.data.rows import NamedDigest
from lean_ft.data.sources import RowSources, SourceContent
from lean_ft.settings import DataConfig, Sources
from lean_ft.system.cache import FORMAT, EntryWriter, cache_folder, forget_entry, limit_size, load_entry
from lean_ft.system.contents import Content, Contents
from lean_ft.system.world import world
from lean_ft.tokenizers import Tokenizer


def prepare_batches(
    config: DataConfig, tokenizer: Tokenizer, batch_size: int, seed: int, share_prompts: bool = False
) -> tuple[Batches, EvalBatches | None]:
    """Return training batches of `config.source`, and evaluation batches of the held-out rows, if any.

    Batches have `batch_size` rows of data and the fields of the objective named by the class of `config`. Held-out rows
    come from `validation_source`, or are a `validation_fraction` of the source's rows, drawn with `seed` before
    packing. Weights and shares repeat or drop training rows, never held-out rows. Documents and packings are cached.
    With `share_prompts`, the prompt of several sequences is computed once. Raises ValueError with the place for
    unreadable files and rows, and if the settings require shared prompts and the recipe does not support them.
    """
    preparation = Preparation(config, tokenizer, batch_size, seed, share_prompts)
    preparation.check()
    return world().batches(preparation.batches, preparation.largest)


@dataclass(frozen=True)
class Prepared:
    """Documents of a source or of a part of it, memory-mapped."""

    documents: Columns
    report: DataReport
    content: SourceContent
    key: str | None
    """Key of the cache entry and, for a part, of the part; None if the entry is kept for this run only."""
    mixture: MixedRows | None = None
    """Of training rows: how often each is used; None for a single source whose rows are used once."""

    def select(self, rows: np.ndarray, report: DataReport, part: str) -> "Prepared":
        """Return the documents of `rows`, counted in `report`; `part` identifies the selection in the cache key."""
        sides = len(self.documents) // self.report.kept
        documents = self.documents.select((rows[:, None] * sides + np.arange(sides)).ravel())
        tokens, targets = int(documents.lengths.sum()), int(documents.num_targets.sum())
        report = replace(report, kept=len(rows), tokens=tokens, target_tokens=targets)
        return replace(self, documents=documents, report=report, key=self.key and f"{self.key} {part}")


class Keys(NamedTuple):
    """Keys of the cache entries of prepared documents; None for entries of this run only."""

    documents: str | None
    packing: str | None
    sharing: str | None
    """Of the numbers of shared prompt tokens."""


@dataclass(frozen=True)
class Preparation:
    """What decides the batches of a run: the steps from its sources to batches, and their keys in the cache."""

    config: DataConfig
    tokenizer: Tokenizer
    batch_size: int
    seed: int
    share_prompts: bool = False

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds_of(self.tokenizer, self.config)

    @cached_property
    def folder(self) -> Path:
        """The folder of the cache."""
        return cache_folder(self.config.cache_dir)

    @cached_property
    def mix(self) -> SourceMix:
        """Of the training sources."""
        return SourceMix.of(self.config, self.seed)

    @property
    def drawn_by(self) -> int | None:
        """The seed by which rows are drawn; None if no draw decides which rows are trained."""
        return self.seed if self.config.validation_fraction or self.mix.draws else None

    def check(self) -> None:
        """Raise ValueError for settings that the recipe or the model does not support."""
        self.objective.check(self.config, self.share_prompts)
        kinds_of(self.tokenizer, self.config)

    def largest(self) -> Batch:
        return largest_batch(self.config, self.batch_size, self.share_prompts, self.kinds)

    def batches(self) -> tuple[Batches, EvalBatches | None]:
        """Read, arrange and cache everything; return the training and the held-out batches."""
        if self.config.chat_template is not None and self.tokenizer.template_file is None:
            raise ValueError(
                "data.chat_template is set, but this recipe loads its tokenizer without it. Edit the recipe: "
                "load_tokenizer(cfg.model, cfg.data.chat_template)."
            )
        whole = self.documents(self.config.source)
        trained, held_out = self.parts(whole)
        parts = [trained] if held_out is None else [trained, held_out]
        arrangements = [self.arranged(part) for part in parts]
        used = {key for prepared in (whole, *parts) for key in self.keys(prepared) if key is not None}
        limit_size(self.folder, self.config.cache_gib * 2**30, keep=used)
        trained.report.sources = uses_of_sources(trained, arrangements[0])
        # Training and evaluation use one length of cu_seqlens, so that compiled code sees one shape.
        most = max(arrangement.most_in_a_row for arrangement in arrangements)
        first, num_in_all, layouts = 0, sum(len(part.documents) for part in parts), list[ArrangedDocuments]()
        for part, arrangement in zip(parts, arrangements, strict=True):
            columns = replace(part.documents, pad_id=self.tokenizer.pad_id, first=first, num_in_all=num_in_all)
            layouts.append(ArrangedDocuments(replace(arrangement, most_in_a_row=most), columns, self.objective))
            first += len(columns)
        batches = Batches(
            layouts[0],
            seed=self.seed,
            report=trained.report,
            fingerprint=self.fingerprint(whole),
            contents=self.contents(whole),
            shuffle=self.config.shuffle,
        )
        return batches, None if held_out is None else EvalBatches(layouts[1], held_out.report)

    def documents(self, source: Sources) -> Prepared:
        """Load the documents of `source` from the cache, or make them.

        Raises ValueError as `Parts` does, and for a file that changes while it is read.
        """
        sources = RowSources.of(self.config, source)
        content = sources.content(self.folder)
        key = self._key_of_documents(sources, content)
        read = NamedDigest()  # of rows that are not in files

        def write(writer: EntryWriter) -> None:
            parts = Parts(renderer_of(self.config, self.tokenizer, source), read if content is None else None)
            for part in parts:
                writer.append(part.stored)
            writer.about["report"] = asdict(parts.report)
            if content is not None and sources.content(self.folder) != content:
                raise ValueError(
                    f"a file of {source} changed while it was read. Start again when it is complete. Your own function "
                    "in data.format must return the same for the same row."
                )

        def load() -> tuple[Columns, DataReport]:
            arrays, about = load_entry(self.folder, key, write)
            return replace(Columns.of(arrays), kinds=self.kinds), DataReport(**about["report"])

        columns, report = load()
        if key is not None and (files := [changed for kind in self.kinds if (changed := kind.changed(columns))]):
            key = f"documents-{hash_of(key, *files)}"
            columns, report = load()
        if key is not None and report.unreadable:  # the next start looks for the file again
            forget_entry(self.folder, key)
            key = None
        columns = replace(columns, sources=SourceColumn.of(source, report.kept_by_source, len(self.config.sides)))
        return Prepared(columns, report, content or SourceContent(read.hexdigest(), read.contents()), key)

    def parts(self, whole: Prepared) -> tuple[Prepared, Prepared | None]:
        """Return the training rows of the source's documents, as often as an epoch uses them, and the held-out rows, if
        any."""
        rows, held_out, validation_source = np.arange(whole.report.kept), None, self.config.validation_source
        fraction = validation_source is None and self.config.validation_fraction
        part = hash_of(fraction, *self.mix.identity, self.drawn_by)
        if validation_source is not None:
            held_out = self.documents(validation_source)
            note_held_out(whole.report, held_out.report)
        elif fraction:
            rows, held_out_rows = _split(len(rows), fraction, self.seed)
            report = DataReport(whole.report.format, unit=whole.report.unit, rows=len(held_out_rows))
            held_out = whole.select(held_out_rows, report, f"{part} held out")
        if self.mix.is_plain and len(self.mix.names) == 1:
            is_whole = len(rows) == whole.report.kept
            return whole if is_whole else whole.select(rows, whole.report, part), held_out
        tokens, trained = tokens_of_rows(whole, self.config)
        mixture = self.mix.mixture(whole.report.kept_by_source, tokens, trained, rows)
        is_whole = self.mix.is_plain and len(rows) == whole.report.kept
        used = whole if is_whole else whole.select(rows[mixture.rows], whole.report, part)
        return replace(used, mixture=mixture), held_out

    def uses(self) -> tuple[list[SourceUse], MixedRows | None]:
        """Return what an epoch uses of each source, and the rows; nothing for a single source that is used once."""
        trained, _ = self.parts(self.documents(self.config.source))
        return uses_of_sources(trained, self.arranged(trained)), trained.mixture

    def arranged(self, prepared: Prepared) -> Arrangement:
        """Arrange documents in rows. Report the packing's efficiency, what kinds of columns count, and texts beyond the
        context.

        Packings and shared prompt lengths are cached. Raises ValueError as `check_context` does.
        """
        columns, report, keys = prepared.documents, prepared.report, self.keys(prepared)
        packed, sharing = None, dict[str, np.ndarray]()
        report.remarks = self.objective.describe(columns.per_document("row_values"))
        if self.share_prompts:
            sharing = self._cached(keys.sharing, lambda: self.objective.shared(columns, self.config, self.tokenizer))
        if self.config.packs_rows:
            packed = self._cached(
                keys.packing, lambda: pack_documents(columns.lengths, self.config, sharing.get("shared"))
            )
        arrangement = arrange(columns.lengths, self.config, self.batch_size, packed=packed, **sharing)
        for kind in columns.kinds:
            kind.describe(columns, report, len(self.config.sides))
        work = tuple(kind.work(columns)[arrangement.documents] for kind in columns.kinds)
        arrangement = replace(arrangement, work=work)
        if packed:
            report_packing(report, arrangement, columns, self.config)
        check_context(arrangement, report, self.config, self.tokenizer.context_length)
        return arrangement

    def _cached(self, key: str | None, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return load_entry(self.folder, key, lambda writer: writer.append(make()))[0]

    def _key_of_documents(self, sources: RowSources, content: SourceContent | None) -> str | None:
        files, others = own_files(self.config), [one.digest for one in decided_by(self.config)]
        if content is None or not all((*files.values(), *others)):
            return None
        own_code = [hashlib.blake2b(Path(file).read_bytes()).hexdigest() for file in files.values()]
        settings = [type(self.config.importable()).__name__, settings_of_documents(self.config)]
        # Paths in rows are relative to the folder of the rows.
        folders = sources.folders() if self.kinds else []
        digests = code_digest(), content.digest, tokenizer_digest(self.tokenizer)
        return f"documents-{hash_of(FORMAT, *digests, settings, *folders, *own_code, *others)}"

    def keys(self, prepared: Prepared) -> Keys:
        if prepared.key is None:
            return Keys(None, None, None)
        sharing = [True] if self.share_prompts else []
        packing = hash_of(prepared.key, self.config.packing, PACKING_VERSION, self.config.max_length, *sharing)
        return Keys(prepared.key, f"packing-{packing}", f"shared-{hash_of(prepared.key)}")

    def fingerprint(self, whole: Prepared) -> str:
        """Hash of all that decides the batches, but for their size; whole: the documents of `config.source`."""
        arrangement: list[int] = [True] if self.share_prompts else []
        if self.config.packing in ("bfd", "bfd_split"):
            arrangement.append(PACKING_VERSION)
        of_documents = [content.digest for content in self._contents_of_documents(whole)]
        draws = settings_of_batches(self.config), *self.mix.identity, self.drawn_by
        return hash_of(whole.content.digest, tokenizer_digest(self.tokenizer), *draws, *arrangement, *of_documents)

    def contents(self, whole: Prepared) -> Contents:
        """What `fingerprint` hashes, by name, but for the settings."""
        versions = [Content("the packing, which this version of lean_ft computes", str(PACKING_VERSION))]
        sharing = [Content("prompts, which are computed once", "")] if self.share_prompts else []
        packing = versions if self.config.packing in ("bfd", "bfd_split") else []
        of_tokenizer = contents_of_tokenizer(self.tokenizer)
        return Contents([*whole.content.parts, *of_tokenizer, *packing, *sharing, *self._contents_of_documents(whole)])

    def _contents_of_documents(self, whole: Prepared) -> list[Content]:
        """What the content of the sources' files does not decide."""
        columns = whole.documents
        contents = [
            Content(f"the sizes of {kind.unit}s in the rows", kind.fingerprint(columns)) for kind in columns.kinds
        ]
        if files := own_files(self.config):  # the code of an own objective may change, so its documents count
            contents.append(Content(f"the documents that {', '.join(files)} makes of the rows", columns.content()))
        return contents + decided_by(self.config)


# Training rows --------------------------------------------------------------------------------------------------------


def _split(num_rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted indices of training rows and of held-out rows."""
    num_held_out = max(1, round(num_rows * fraction))
    if num_held_out >= num_rows:
        raise ValueError(
            f"data.validation_fraction={fraction} of {num_rows} rows leaves no row to train on. Lower "
            "it, or set data.validation_source."
        )
    shuffled = np.random.default_rng(seed).permutation(num_rows)
    return np.sort(shuffled[num_held_out:]), np.sort(shuffled[:num_held_out])


def tokens_of_rows(prepared: Prepared, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each row of data, and those with a label, each (N,) int64.

    Where documents are joined, the first token of a document has a label too, unless a packed row begins with it.
    """
    columns, number = prepared.documents, prepared.report.kept
    trained = columns.num_targets.astype(np.int64)
    if config.packing == "wrapped":
        trained += columns.values["trained"][columns.starts]
    return columns.lengths.reshape(number, -1).sum(axis=1), trained.reshape(number, -1).sum(axis=1)


def uses_of_sources(prepared: Prepared, arrangement: Arrangement) -> list[SourceUse]:
    """Return what an epoch of these rows uses of each source."""
    if prepared.mixture is None:
        return []
    if not arrangement.joined:
        return prepared.mixture.uses()
    trained = prepared.mixture.trained[prepared.mixture.rows]
    documents, starts = row_starts(arrangement, prepared.documents)
    np.subtract.at(trained, documents, prepared.documents.values["trained"][starts])
    return prepared.mixture.uses(trained)


# Arrangement in rows --------------------------------------------------------------------------------------------------


def check_context(arrangement: Arrangement, report: DataReport, config: DataConfig, context_length: int | None) -> None:
    """Count texts longer than the model's context in `report`. Raises ValueError if there are any under
    `overflow=raise`."""
    lengths = arrangement.lengths
    if arrangement.joined:
        lengths = np.add.reduceat(lengths, arrangement.offsets[:-1])
    if context_length is None or not (number := int((lengths > context_length).sum())):
        return
    report.beyond_context, report.context_length = number, context_length
    if config.overflow == "raise":
        raise ValueError(
            f"{number:,} {'sequences are' if number > 1 else 'sequence is'} longer than the model's context of "
            f"{context_length:,} tokens (max_position_embeddings in its config.json), the longest {lengths.max():,}. "
            f"Set data.max_length={context_length} to see which rows, and data.overflow=truncate or data.overflow=drop "
            "to train anyway."
        )


def report_packing(report: DataReport, arrangement: Arrangement, columns: Columns, config: DataConfig) -> None:
    """Add packed rows, packing efficiency and the corrected number of trained tokens to `report`."""
    report.packing, report.packed_rows = config.packing, len(arrangement)
    computed_once = 0 if arrangement.shared is None else int(arrangement.shared.sum())
    report.packing_efficiency = (report.tokens - computed_once) / (len(arrangement) * arrangement.row_tokens)
    if arrangement.joined:
        # The previous document predicts a document's first token; nothing predicts a row's first token.
        trained, (_, starts) = columns.values["trained"], row_starts(arrangement, columns)
        report.target_tokens += int(trained[columns.starts].sum()) - int(trained[starts].sum())


def row_starts(arrangement: Arrangement, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return the document that each row begins with, and its first token in the per-token columns, (R,) each."""
    begins = arrangement.offsets[:-1]
    documents = arrangement.documents[begins]
    return documents, columns.starts[documents] + arrangement.firsts[begins]
