"""Files of rows in, batches out: documents made once, held-out rows taken from them, weighed, and laid out in rows.

Documents and packings are kept in the cache. What decides documents is in their key: the content of the files in order,
the tokenizer's files, the settings that a document depends on, the code that reads, renders and tokenises, and the
versions of the libraries that it uses. Where the files lie is not, so moved or copied data is found again. A template
that writes today's date keeps the day of the first start, so that a run which goes on tomorrow sees the same rows.

A Hugging Face dataset's content is told by the files that the `datasets` library keeps of it. One that is streamed has
none: it is read anew at each start, and its documents lie on the disk for that run alone.
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

from lean_ft.data.arrow_rows import dataset_files
from lean_ft.data.batches import Batches, EvalBatches, Layout, longest_batch
from lean_ft.data.cache import FORMAT, EntryWriter, cache_folder, content_digest, limit_size, load_entry
from lean_ft.data.documents import ARRAYS, Documents, Parts
from lean_ft.data.objective import objective_of, settings_class
from lean_ft.data.packing import pack_documents
from lean_ft.data.pairs import Pair
from lean_ft.data.report import DataReport
from lean_ft.data.sources import files_of, list_sources
from lean_ft.data.splits import is_sliced
from lean_ft.hub.paths import resolve_data_path
from lean_ft.settings import DataConfig, Sources
from lean_ft.system.shapes_only import stage
from lean_ft.system.user_functions import file_digest, is_function_path
from lean_ft.tokenizers import Tokenizer

LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2")
# How rows are prepared and kept changes nothing in them, and where they come from counts by its content.
NOT_IN_FINGERPRINT = {
    *("source", "validation_source", "num_processes", "cache_dir", "cache_gib", "chat_template"),
    "shared_prompt",  # what is made of it counts
}
# Newer settings count only where they are not the default, so that runs from before them can be resumed.
NOT_WHERE_DEFAULT = {"system": None, "separator": None, "chat": "auto", "shuffle": True}
# What is done with documents changes nothing in them either; `packing` and `max_length` count as the length they allow.
NOT_OF_DOCUMENTS = NOT_IN_FINGERPRINT | {"validation_fraction", "packing", "max_length", "batch_tokens", "shuffle"}


@dataclass(frozen=True)
class Prepared:
    """The documents of a source, or some of them, mapped from disk."""

    documents: Documents
    report: DataReport
    content: str
    """Hash of everything that was read."""
    key: str | None
    """Of the entry in the cache, and of the part that this is; None where it is kept for this run alone."""

    def select(self, rows: np.ndarray, report: DataReport, part: str) -> "Prepared":
        """All documents that the rows of data `rows` became, counted in `report`; `part` tells them from other parts."""
        sides = len(self.documents) // self.report.kept
        documents = self.documents.select((rows[:, None] * sides + np.arange(sides)).ravel())
        tokens, targets = int(documents.lengths.sum()), int(documents.num_targets.sum())
        report = replace(report, kept=len(rows), tokens=tokens, target_tokens=targets)
        return replace(self, documents=documents, report=report, key=self.key and f"{self.key} {part}")

    def packing_key(self, config: DataConfig, share_prompts: bool) -> str:
        sharing = [share_prompts] if share_prompts else []
        return f"packing-{hash_of(self.key, config.packing, config.max_length, *sharing)}"

    @property
    def sharing_key(self) -> str:
        return f"shared-{hash_of(self.key)}"


def prepare_batches(
    config: DataConfig, tokenizer: Tokenizer, batch_size: int, seed: int, share_prompts: bool = False
) -> tuple[Batches, EvalBatches | None]:
    """Training batches of `config.source`, and evaluation batches of the held-out rows, if there are any.

    Batches have `batch_size` rows of data and are those of the objective that the class of `config` names. Held-out rows
    come from `validation_source`, or are `validation_fraction` of the source's rows, drawn by `seed` before packing.
    Weights repeat or thin out training rows, never held-out rows. Documents and packings are cached for the next start.
    With `share_prompts`, the prompt of a pair is computed once. Raises ValueError for unreadable files and rows, with
    their place, and for settings that ask for shared prompts in a recipe that has none.
    """
    objective_of(config).check(config, share_prompts)
    if (watcher := stage()) is not None:
        return watcher.batches(lambda: longest_batch(config, batch_size, share_prompts)), None
    if config.chat_template is not None and tokenizer.template_file is None:
        raise ValueError(
            "data.chat_template is set, and this recipe loads its tokenizer without it. In the recipe: "
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

    rows_as = (config, batch_size, tokenizer.pad_id, folder, share_prompts)
    layout = lay_out(trained, *rows_as)
    held_out_layout = lay_out(held_out, *rows_as) if held_out else None
    for one, rows_of_it in ((trained, layout), (held_out, held_out_layout)):
        if one is not None and rows_of_it is not None:
            check_context(rows_of_it, one.report, config, tokenizer.context_length)
    used = {
        key
        for one in (whole, trained, held_out)
        if one and one.key
        for key in (one.key, one.packing_key(config, share_prompts), one.sharing_key)
    }
    limit_size(folder, config.cache_gib * 2**30, keep=used)

    # Compiled code sees one length of cu_seqlens, so evaluation has as many boundaries as training.
    most = max(layout.most_in_a_row, held_out_layout.most_in_a_row if held_out_layout else 0)
    settings = config.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    settings = {name: value for name, value in settings.items() if value != NOT_WHERE_DEFAULT.get(name, ...)}
    sharing = [share_prompts] if share_prompts else []
    fingerprint = hash_of(whole.content, tokenizer_digest(tokenizer), settings, weights, drawn_by, *sharing)
    layout = replace(layout, most_in_a_row=most)
    num_trained, num_held_out = (len(one.documents) // len(config.sides) if one else 0 for one in (trained, held_out))
    layout = replace(layout, num_rows_in_all=num_trained + num_held_out)
    batches = Batches(layout, seed=seed, report=trained.report, fingerprint=fingerprint, shuffle=config.shuffle)
    if held_out is None or held_out_layout is None:
        return batches, None
    held_out_layout = replace(
        held_out_layout, most_in_a_row=most, first_row=num_trained, num_rows_in_all=layout.num_rows_in_all
    )
    return batches, EvalBatches(held_out_layout, held_out.report)


sft_batches = preference_batches = unpaired_batches = prepare_batches  # in a recipe, the name says what the data are


# What is trained on ---------------------------------------------------------------------------------------------------------


def _split(num_rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of what is trained on and of what is held out, each in order."""
    num_held_out = max(1, round(num_rows * fraction))
    if num_held_out >= num_rows:
        raise ValueError(
            f"data.validation_fraction={fraction} of {num_rows} rows leaves nothing to train on. Lower "
            "it, or name a data.validation_source."
        )
    shuffled = np.random.default_rng(seed).permutation(num_rows)
    return np.sort(shuffled[num_held_out:]), np.sort(shuffled[:num_held_out])


def weigh(source_of: np.ndarray, weights: Sequence[float], seed: int) -> np.ndarray:
    """Indices of rows, in order, each as often as its source's weight says.

    source_of: (N,) which source a row is from. A weight of 2 takes each of a source's rows twice, 0.5 a half
    of them, 1.5 all of them once and a half of them once more; halves are drawn by `seed` and `round(weight * n)` is met
    exactly.
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


# Rows of batches ------------------------------------------------------------------------------------------------------------


def lay_out(
    prepared: Prepared, config: DataConfig, batch_size: int, pad_id: int, folder: Path, share_prompts: bool
) -> Layout:
    """The rows of what was prepared, with their packing and what pairs share from the cache if it is there; tells its report
    how full they are."""
    documents, packed, shared = prepared.documents, dict[str, np.ndarray](), None
    if share_prompts:
        key = prepared.sharing_key if prepared.key else None
        found, _ = load_entry(folder, key, lambda writer: writer.append({"shared": shared_prompts(documents)}))
        shared = found["shared"]
    if config.packs_rows:
        key = prepared.packing_key(config, share_prompts) if prepared.key else None
        packed, _ = load_entry(folder, key, lambda writer: writer.append(pack_documents(documents, config, shared)))
    layout = layout_of(documents, packed, config, batch_size, pad_id, shared)
    if packed:
        tell_packing(prepared.report, layout, documents, config)
    return layout


def check_context(layout: Layout, report: DataReport, config: DataConfig, context_length: int | None) -> None:
    """Tells `report` how many texts are longer than the model was made for. Raises ValueError under `overflow=raise`."""
    lengths = layout.lengths[layout.order]
    if layout.joined:
        lengths = np.add.reduceat(lengths, layout.offsets[:-1])
    if context_length is None or not (number := int((lengths > context_length).sum())):
        return
    report.beyond_context, report.context_length = number, context_length
    if config.overflow == "raise":
        raise ValueError(
            f"{number:,} {'sequences are' if number > 1 else 'sequence is'} longer than the model's context of "
            f"{context_length:,} tokens (max_position_embeddings in its config.json), the longest {lengths.max():,}. Set "
            f"data.max_length={context_length} to be told which, or with it data.overflow=truncate or data.overflow=drop."
        )


def shared_prompts(documents: Documents) -> np.ndarray:
    """How many tokens each of N documents, pair after pair, begins with as the one before it, (N,): those of the prompt for
    a rejected answer, and 0 for a chosen one."""
    shared = np.zeros(len(documents), dtype=np.int64)
    for i in range(0, len(documents), 2):
        shared[i + 1] = len(Pair.of(documents[i], documents[i + 1]).prompt)
    return shared


def layout_of(
    documents: Documents,
    packed: dict[str, np.ndarray],
    config: DataConfig,
    batch_size: int,
    pad_id: int,
    shared: np.ndarray | None = None,
) -> Layout:
    """The rows of `documents`, as `pack_documents` found them or, where nothing is packed, one for each row of data."""
    sides = len(config.sides)
    arrays: dict[str, Any] = {"starts": documents.starts, "lengths": documents.lengths}
    arrays |= packed or {"order": np.arange(len(documents)), "offsets": np.arange(0, len(documents) + 1, sides)}
    layout = Layout(
        documents.tokens,
        documents.trained,
        **arrays,
        kind="packed" if packed else "padded" if config.packing == "none" else "flat",
        row_tokens=config.max_length * (sides if packed or shared is not None else 1),
        batch_size=batch_size,
        pad_id=pad_id,
        batch_tokens=config.batch_tokens,
        joined=config.packing == "wrapped",
        most_in_a_row=2 if config.packing == "wrapped" else sides,
        sides=sides,
        objective=objective_of(config),
        values=documents.values,
        shared=shared,
    )
    if layout.kind == "packed" and not layout.joined:
        tokens = np.add.reduceat(layout.taken[layout.order], layout.offsets[:-1])
        most = int((np.diff(layout.offsets) + (tokens < layout.row_tokens)).max())
        return replace(layout, most_in_a_row=most)
    return layout


def tell_packing(report: DataReport, layout: Layout, documents: Documents, config: DataConfig) -> None:
    """Tells `report` how full packed rows are, and what of them is trained."""
    report.packing, report.packed_rows = config.packing, len(layout)
    computed_once = 0 if layout.shared is None else int(layout.shared.sum())
    report.packing_efficiency = (report.tokens - computed_once) / (len(layout) * layout.row_tokens)
    if layout.joined:
        # A document's first token is predicted by what stands before it, and a row's first token by nothing.
        row_starts = layout.starts[layout.order[layout.offsets[:-1]]]
        report.target_tokens += int(documents.trained[documents.starts].sum())
        report.target_tokens -= int(documents.trained[row_starts].sum())


# Documents, made or found ---------------------------------------------------------------------------------------------------


def load_documents(config: DataConfig, tokenizer: Tokenizer, source: Sources, folder: Path) -> Prepared:
    """The documents of `source`, from the cache in `folder` or newly made.

    Raises ValueError as `Parts` does, and for a file that changes while it is read.
    """
    content, key, digest = source_content(config, source, folder), None, None
    if content is None:
        digest = hashlib.blake2b(digest_size=16)
    else:
        settings = config.model_dump(mode="json", exclude=NOT_OF_DOCUMENTS) | {"longest": config.longest}
        objective = [settings_class(config).__name__, settings]
        key = f"documents-{hash_of(FORMAT, code_digest(), content, tokenizer_digest(tokenizer), objective)}"

    def write(writer: EntryWriter) -> None:
        parts = Parts(config, tokenizer, source, digest)
        for part in parts:
            writer.append({name: getattr(part, name) for name in ARRAYS})
        writer.about["report"] = asdict(parts.report)
        if content is not None and source_content(config, source, folder) != content:
            raise ValueError(f"a file of {source} changed while it was read. Start again when it is complete.")

    arrays, about = load_entry(folder, key, write)
    documents = Documents.of(*(arrays[name] for name in ARRAYS))
    if content is None:
        assert digest is not None
        content = digest.hexdigest()
    return Prepared(documents, DataReport(**about["report"]), content, key)


def source_content(config: DataConfig, source: Sources, folder: Path) -> str | None:
    """Hash of the content of the files of `source`, in order; None where some of it lies in no file.

    Of a file's name its endings count, by which CSV is told. Raises ValueError where there is no such file.
    """
    parts: list[Any] = []
    for one in list_sources(source, config):
        files, part = files_of(one), one.split if is_sliced(one.split or "") else None
        if files is None and not config.streaming:
            assert one.split is not None
            files = dataset_files(str(resolve_data_path(one.path)), subset=one.subset, split=one.split)
            part = [one.subset, one.split]  # the same files hold `train[:10%]`
        if not files:
            return None
        contents = [(file.suffixes, content_digest(file, folder / "files")) for file in files]
        form = [one.format, file_digest(one.format)] if is_function_path(one.format) else one.format
        parts.append([form, one.columns, part, *contents])
    return hash_of(parts)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    files = [*tokenizer.files, *filter(None, [tokenizer.template_file])]
    return hash_of(*(hashlib.blake2b(file.read_bytes()).hexdigest() for file in files))


@cache
def code_digest() -> str:
    """Hash of the code that makes documents of rows, and of the versions of the libraries under it."""
    package = Path(__file__).parents[1]
    files = [file for part in ("data", "tokenizers") for file in sorted((package / part).glob("*.py"))]
    return hash_of(*(file.read_text(encoding="utf-8") for file in files), *map(version, LIBRARIES))


def hash_of(*values: Any) -> str:
    """A short hash of plain values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
