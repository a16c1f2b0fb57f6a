"""Data preparation: read and tokenize sources, split off held-out rows, apply source weights, and build batches.

Documents and packings are cached. The key of documents hashes the content of the files in order, the tokenizer's files,
the settings that affect documents, the code that reads, renders and tokenizes rows, and the versions of its libraries.
The key ignores file paths, so moved or copied data is a cache hit. A chat template that writes the current date keeps
the date of the first start, so a run resumed the next day sees the same rows.

A Hugging Face dataset is identified by the content of its files in the `datasets` cache. A streamed dataset has no
files: it is read again at each start, and its documents are stored on disk for that run only.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lean_ft.data.arrangement import Arrangement, arrange
from lean_ft.data.arrow_rows import dataset_files
from lean_ft.data.batches import ArrangedDocuments, Batches, EvalBatches
from lean_ft.data.columns import Columns
from lean_ft.data.documents import Parts, limit_images
from lean_ft.data.kinds import kinds_of
from lean_ft.data.largest import largest_batch
from lean_ft.data.objective import objective_of, settings_class
from lean_ft.data.packing import PACKING_VERSION, pack_documents
from lean_ft.data.pairs import num_prompt_tokens
from lean_ft.data.report import DataReport
from lean_ft.data.sources import files_of, list_sources, read_rows
from lean_ft.data.splits import is_sliced
from lean_ft.hub.paths import resolve_data_path
from lean_ft.settings import DataConfig, Sources
from lean_ft.system.cache import (
    FORMAT,
    EntryWriter,
    cache_folder,
    content_digest,
    forget_entry,
    limit_size,
    load_entry,
)
from lean_ft.system.user_functions import PASSED, file_digest, is_function_path, without_hashes
from lean_ft.system.world import world
from lean_ft.tokenizers import Tokenizer

IMAGE_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")  # how a model prepares images
LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pillow")
# These settings do not change the rows; sources and the chat template count by their content.
NOT_IN_FINGERPRINT = {
    *("source", "validation_source", "num_processes", "cache_dir", "cache_gib", "chat_template"),
    "shared_prompt",  # `share_prompts` counts instead
}
# Settings added later count only if they differ from the default, so that older runs can be resumed.
NOT_WHERE_DEFAULT = {"system": None, "separator": None, "chat": "auto", "shuffle": True, "chat_template_kwargs": {}}
NOT_WHERE_DEFAULT |= {"image_tokens": None}
# These settings apply after documents are made. `packing` and `max_length` count through `config.longest`.
NOT_OF_DOCUMENTS = NOT_IN_FINGERPRINT | {"validation_fraction", "packing", "max_length", "batch_tokens", "shuffle"}


@dataclass(frozen=True)
class Prepared:
    """Documents of a source or of a part of it, memory-mapped."""

    documents: Columns
    report: DataReport
    content: str
    """Hash of the source's content."""
    key: str | None
    """Key of the cache entry and, for a part, of the part; None if the entry is kept for this run only."""

    def select(self, rows: np.ndarray, report: DataReport, part: str) -> "Prepared":
        """Return the documents of `rows`, counted in `report`; `part` identifies the selection in the cache key."""
        sides = len(self.documents) // self.report.kept
        documents = self.documents.select((rows[:, None] * sides + np.arange(sides)).ravel())
        tokens, targets = int(documents.lengths.sum()), int(documents.num_targets.sum())
        report = replace(report, kept=len(rows), tokens=tokens, target_tokens=targets)
        return replace(self, documents=documents, report=report, key=self.key and f"{self.key} {part}")

    def packing_key(self, config: DataConfig, share_prompts: bool) -> str:
        sharing = [share_prompts] if share_prompts else []
        return f"packing-{hash_of(self.key, config.packing, PACKING_VERSION, config.max_length, *sharing)}"

    @property
    def sharing_key(self) -> str:
        return f"shared-{hash_of(self.key)}"


def prepare_batches(
    config: DataConfig, tokenizer: Tokenizer, batch_size: int, seed: int, share_prompts: bool = False
) -> tuple[Batches, EvalBatches | None]:
    """Return training batches of `config.source`, and evaluation batches of the held-out rows, if any.

    Batches have `batch_size` rows of data and the fields of the objective named by the class of `config`. Held-out rows
    come from `validation_source`, or are a `validation_fraction` of the source's rows, drawn with `seed` before
    packing. Weights repeat or drop training rows, never held-out rows. Documents and packings are cached. With
    `share_prompts`, the prompt of a pair is computed once. Raises ValueError with the place for unreadable files and
    rows, and if the settings require shared prompts and the recipe does not support them.
    """
    objective_of(config).check(config, share_prompts)
    limit_images(tokenizer, config)
    return world().batches(
        lambda: _read_batches(config, tokenizer, batch_size, seed, share_prompts),
        lambda: largest_batch(config, batch_size, share_prompts, kinds_of(tokenizer)),
    )


def _read_batches(
    config: DataConfig, tokenizer: Tokenizer, batch_size: int, seed: int, share_prompts: bool
) -> tuple[Batches, EvalBatches | None]:
    if config.chat_template is not None and tokenizer.template_file is None:
        raise ValueError(
            "data.chat_template is set, but this recipe loads its tokenizer without it. Edit the recipe: "
            "load_tokenizer(cfg.model, cfg.data.chat_template)."
        )
    folder = cache_folder(config.cache_dir)
    whole = load_documents(config, tokenizer, config.source, folder)
    weights = [source.weight for source in list_sources(config.source)]
    weighted = any(weight != 1 for weight in weights)
    drawn_by = seed if config.validation_fraction or any(weight % 1 for weight in weights) else None
    part = hash_of(config.validation_source is None and config.validation_fraction, weights, drawn_by)

    rows, held_out = np.arange(whole.report.kept), None
    if config.validation_source is not None:
        held_out = load_documents(config, tokenizer, config.validation_source, folder)
    elif config.validation_fraction > 0:
        rows, held_out_rows = _split(len(rows), config.validation_fraction, seed)
        report = DataReport(whole.report.format, unit=whole.report.unit, rows=len(held_out_rows))
        held_out = whole.select(held_out_rows, report, f"{part} held out")
    if weighted:
        source_of = np.repeat(np.arange(len(whole.report.kept_by_source)), whole.report.kept_by_source)
        rows = rows[weigh(source_of[rows], weights, seed)]
        if not len(rows):
            raise ValueError(f"the weights in data.source ({weights}) leave no row to train on. Raise them.")
    trained = whole.select(rows, whole.report, part) if weighted or len(rows) < whole.report.kept else whole

    parts = [trained, *([held_out] if held_out else [])]
    arrangements = [arranged(one, config, batch_size, folder, share_prompts, tokenizer) for one in parts]
    used = {
        key
        for one in (whole, *parts)
        if one.key
        for key in (one.key, one.packing_key(config, share_prompts), one.sharing_key)
    }
    limit_size(folder, config.cache_gib * 2**30, keep=used)

    settings = without_hashes(config.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT))
    settings = {name: value for name, value in settings.items() if value != NOT_WHERE_DEFAULT.get(name, ...)}
    arrangement: list[int] = [share_prompts] if share_prompts else []
    if config.packing in ("bfd", "bfd_split"):
        arrangement.append(PACKING_VERSION)
    of_kinds = [kind.fingerprint(whole.documents) for kind in whole.documents.kinds]
    fingerprint = hash_of(
        whole.content, tokenizer_digest(tokenizer), settings, weights, drawn_by, *arrangement, *of_kinds
    )

    # Training and evaluation use one length of cu_seqlens, so that compiled code sees one shape.
    most = max(one.most_in_a_row for one in arrangements)
    first, num_in_all, layouts = 0, sum(len(one.documents) for one in parts), list[ArrangedDocuments]()
    for one, rows_of_it in zip(parts, arrangements, strict=True):
        columns = replace(one.documents, pad_id=tokenizer.pad_id, first=first, num_in_all=num_in_all)
        layouts.append(ArrangedDocuments(replace(rows_of_it, most_in_a_row=most), columns, objective_of(config)))
        first += len(columns)
    batches = Batches(layouts[0], seed=seed, report=trained.report, fingerprint=fingerprint, shuffle=config.shuffle)
    return batches, EvalBatches(layouts[1], held_out.report) if held_out else None


sft_batches = preference_batches = unpaired_batches = prepare_batches  # names for recipes: the kind of data


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


def weigh(source_of: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """Return sorted row indices, repeated according to the weight of each row's source.

    source_of: (N,) source index of each row. Weight 2 uses every row twice; 0.5 uses a random half; 1.5 uses every row
    once and a random half twice. `seed` determines the draw. A source with n rows contributes exactly `round(weight *
    n)` rows.
    """
    counts = np.zeros(len(source_of), dtype=np.int64)
    for source, weight in enumerate(weights):
        rows = np.flatnonzero(source_of == source)
        whole = int(weight)
        counts[rows] = whole
        num_more = round(weight * len(rows)) - whole * len(rows)
        drawn = np.random.default_rng([seed, source]).permutation(len(rows))[:num_more]
        counts[rows[drawn]] += 1
    return np.repeat(np.arange(len(source_of)), counts)


# Arrangement in rows --------------------------------------------------------------------------------------------------


def arranged(
    prepared: Prepared,
    config: DataConfig,
    batch_size: int,
    folder: Path,
    share_prompts: bool,
    tokenizer: Tokenizer,
) -> Arrangement:
    """Arrange the prepared documents in rows. Report the packing's efficiency, what kinds of columns count, and texts beyond
    the context.

    Packings and shared prompt lengths are cached. Raises ValueError as `check_context` does.
    """
    columns, packed, shared = prepared.documents, None, None
    prepared.report.remarks = objective_of(config).describe(columns.per_document("row_values"))
    if share_prompts:
        key = prepared.sharing_key if prepared.key else None
        found, _ = load_entry(folder, key, lambda writer: writer.append({"shared": shared_prompts(columns)}))
        shared = found["shared"]
    if config.packs_rows:
        key = prepared.packing_key(config, share_prompts) if prepared.key else None
        packed, _ = load_entry(
            folder, key, lambda writer: writer.append(pack_documents(columns.lengths, config, shared))
        )
    arrangement = arrange(columns.lengths, config, batch_size, shared, packed)
    for kind in columns.kinds:
        kind.describe(columns, prepared.report, len(config.sides))
    work = tuple(kind.work(columns)[arrangement.documents] for kind in columns.kinds)
    arrangement = replace(arrangement, work=work)
    if packed:
        report_packing(prepared.report, arrangement, columns, config)
    check_context(arrangement, prepared.report, config, tokenizer.context_length)
    return arrangement


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
            f"{context_length:,} tokens (max_position_embeddings in its config.json), the longest {lengths.max():,}. Set "
            f"data.max_length={context_length} to see which rows, and data.overflow=truncate or data.overflow=drop to train anyway."
        )


def shared_prompts(columns: Columns) -> np.ndarray:
    """Return, for N documents of pairs, how many prompt tokens each shares with the document before it, (N,): the
    prompt length for a rejected answer, 0 for a chosen answer."""
    shared = np.zeros(len(columns), dtype=np.int64)
    for i in range(0, len(columns), 2):
        shared[i + 1] = num_prompt_tokens([columns[i], columns[i + 1]])
    return shared


def report_packing(report: DataReport, arrangement: Arrangement, columns: Columns, config: DataConfig) -> None:
    """Add packed rows, packing efficiency and the corrected number of trained tokens to `report`."""
    report.packing, report.packed_rows = config.packing, len(arrangement)
    computed_once = 0 if arrangement.shared is None else int(arrangement.shared.sum())
    report.packing_efficiency = (report.tokens - computed_once) / (len(arrangement) * arrangement.row_tokens)
    if arrangement.joined:
        # The previous document predicts a document's first token; nothing predicts a row's first token.
        trained, begins = columns.values["trained"], arrangement.offsets[:-1]
        row_starts = columns.starts[arrangement.documents[begins]] + arrangement.firsts[begins]
        report.target_tokens += int(trained[columns.starts].sum()) - int(trained[row_starts].sum())


# Documents ------------------------------------------------------------------------------------------------------------


def load_documents(config: DataConfig, tokenizer: Tokenizer, source: Sources, folder: Path) -> Prepared:
    """Load the documents of `source` from the cache in `folder`, or make them.

    Raises ValueError as `Parts` does, and for a file that changes while it is read.
    """
    content, key, digest = source_content(config, source, folder), None, None
    kinds = kinds_of(tokenizer)
    if content is None:
        digest = hashlib.blake2b(digest_size=16)
    else:
        settings = config.model_dump(mode="json", exclude=NOT_OF_DOCUMENTS) | {"longest": config.longest}
        objective = [settings_class(config).__name__, without_hashes(settings)]
        # Paths in rows, such as those of images, are relative to the folder of the rows.
        folders = _folders_of(config, source) if kinds else []
        key = f"documents-{hash_of(FORMAT, code_digest(), content, tokenizer_digest(tokenizer), objective, *folders)}"

    def write(writer: EntryWriter) -> None:
        parts = Parts(config, tokenizer, source, digest)
        for part in parts:
            writer.append(part.stored)
        writer.about["report"] = asdict(parts.report)
        if content is not None and source_content(config, source, folder) != content:
            raise ValueError(
                f"a file of {source} changed while it was read. Start again when it is complete. Your own function in "
                "data.format must return the same for the same row."
            )

    arrays, about = load_entry(folder, key, write)
    columns = replace(Columns.of(arrays), kinds=kinds)
    if key is not None and (files := [changed for kind in kinds if (changed := kind.changed(columns))]):
        key = f"documents-{hash_of(key, *files)}"
        arrays, about = load_entry(folder, key, write)
        columns = replace(Columns.of(arrays), kinds=kinds)
    report = DataReport(**about["report"])
    if key is not None and report.bad_images:  # the next start looks for the image again
        forget_entry(folder, key)
        key = None
    if content is None:
        assert digest is not None
        content = digest.hexdigest()
    return Prepared(columns, report, content, key)


def _folders_of(config: DataConfig, source: Sources) -> list[str]:
    files = [file for one in list_sources(source, config) for file in files_of(one) or ()]
    return [str(folder) for folder in dict.fromkeys(file.parent.resolve() for file in files)]


def source_content(config: DataConfig, source: Sources, folder: Path) -> str | None:
    """Hash of the content of the files of `source`, in order; None if a part of the source is not stored in files.

    The hash includes file suffixes, which determine how CSV is read, and the results of a function from Python. Raises
    ValueError if a file does not exist.
    """
    parts: list[Any] = []
    for one in list_sources(source, config):
        files, part = files_of(one), one.split if is_sliced(one.split or "") else None
        if files is None and not config.streaming:
            assert one.split is not None
            files = dataset_files(str(resolve_data_path(one.path)), subset=one.subset, split=one.split)
            part = [one.subset, one.split]  # `train` and `train[:10%]` have the same files
        if not files:
            return None
        contents = [(file.suffixes, content_digest(file, folder / "files")) for file in files]
        form: Any = one.format
        if one.format in PASSED:
            digest = hashlib.blake2b(digest_size=16)
            for _ in read_rows([one], digest, config):
                pass
            form = digest.hexdigest()
        elif is_function_path(one.format):
            form = [one.format, file_digest(one.format)]
        parts.append([form, one.columns, part, *contents])
    return hash_of(parts)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    files = [*tokenizer.files, *filter(None, [tokenizer.template_file])]
    own: list[Any] = [tokenizer.chat_template_kwargs] if tokenizer.chat_template_kwargs else []
    if tokenizer.image_rules is not None:
        files += [file for name in IMAGE_FILES if (file := tokenizer.folder / name).is_file()]
    return hash_of(*(hashlib.blake2b(file.read_bytes()).hexdigest() for file in files), *own)


@cache
def code_digest() -> str:
    """Hash of the code that turns rows into documents, and of its libraries' versions."""
    package = Path(__file__).parents[1]
    files = [file for part in ("data", "images", "tokenizers") for file in sorted((package / part).glob("*.py"))]
    files.append(package / "system" / "cache.py")
    return hash_of(*(file.read_text(encoding="utf-8") for file in files), *map(version, LIBRARIES))


def hash_of(*values: Any) -> str:
    """Hash of JSON values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
