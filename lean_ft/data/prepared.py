"""Documents and packings that are prepared once: taken from the cache, or made and put there.

What decides documents is in their key: the content of the files in order, the tokenizer's files, the settings that a
document depends on, the code that reads, renders and tokenises, and the versions of the libraries that it uses. Where
the files lie is not, so moved or copied data is found again. A template that writes today's date keeps the day of the
first start, so that a run which goes on tomorrow sees the same rows.

A Hugging Face dataset's content is told by the files that the `datasets` library keeps of it. One that is streamed has
none: it is read anew at each start, and its documents lie on the disk for that run alone.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lean_ft.data.arrow_rows import dataset_files
from lean_ft.data.cache import FORMAT, Entry, EntryWriter, read_entry, unkept_entry, write_entry
from lean_ft.data.content import content_digest
from lean_ft.data.documents import ARRAYS, Documents, Parts
from lean_ft.data.report import DataReport
from lean_ft.data.sources import list_sources, source_files
from lean_ft.data.truncation import longest
from lean_ft.paths import resolve_data_path
from lean_ft.settings import SFTDataConfig, Sources
from lean_ft.tokenizers import Tokenizer

LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2")
# What documents do not depend on: where they come from and go to, and what is done with them. `packing` and `max_length`
# count as the length they allow.
NOT_OF_DOCUMENTS = {
    *("source", "validation_source", "validation_fraction"),
    *("packing", "max_length", "batch_tokens", "num_processes", "cache_dir", "cache_gib"),
}


@dataclass(frozen=True)
class Prepared:
    """The documents of a source, mapped from disk."""

    documents: Documents
    report: DataReport
    content: str
    """Hash of everything that was read."""
    key: str | None
    """Of the entry in the cache; None where it is kept for this run alone."""


def load_documents(config: SFTDataConfig, tokenizer: Tokenizer, source: Sources, folder: Path) -> Prepared:
    """The documents of `source`, from the cache in `folder` or newly made. Raises ValueError as `prepare_documents`."""
    content = source_content(config, source, folder)
    if content is None:
        digest = hashlib.blake2b(digest_size=16)
        with unkept_entry(folder) as (writer, mapped):
            _write_documents(writer, Parts(config, tokenizer, source, digest))
        return _prepared(mapped[0], digest.hexdigest(), None)
    key = hash_of(FORMAT, code_digest(), content, tokenizer_digest(tokenizer), _settings_of_documents(config))
    key = f"documents-{key}"
    entry = read_entry(folder, key)
    if entry is None:
        with write_entry(folder, key) as writer:
            _write_documents(writer, Parts(config, tokenizer, source))
            if source_content(config, source, folder) != content:
                raise ValueError(f"a file of {source} changed while it was read. Start again when it is complete.")
        entry = read_entry(folder, key)
        assert entry is not None
    return _prepared(entry, content, key)


def load_arrays(folder: Path, key: str | None, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What `make` returns, from the cache in `folder` if it is there; not kept where `key` is None."""
    if key is None:
        return make()
    entry = read_entry(folder, key)
    if entry is not None:
        return entry[0]
    arrays = make()
    with write_entry(folder, key) as writer:
        for name, values in arrays.items():
            writer.append(name, values)
    return arrays


def source_content(config: SFTDataConfig, source: Sources, folder: Path) -> str | None:
    """Hash of the content of the files of `source`, in order; None where some of it lies in no file.

    Of a file's name its endings count, by which CSV is told. Raises ValueError where there is no such file.
    """
    parts: list[Any] = []
    for one in list_sources(source, config):
        files, part = source_files(one.path), None
        if files is None and not config.streaming:
            assert one.split is not None
            files = dataset_files(str(resolve_data_path(one.path)), subset=one.subset, split=one.split)
            part = [one.subset, one.split]  # the same files hold `train[:10%]`
        if not files:
            return None
        parts.append(
            [
                one.format,
                one.columns,
                part,
                *((file.suffixes, content_digest(file, folder / "files")) for file in files),
            ]
        )
    return hash_of(parts)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    return hash_of(*(hashlib.blake2b(file.read_bytes()).hexdigest() for file in tokenizer.files))


@cache
def code_digest() -> str:
    """Hash of the code that makes documents of rows, and of the versions of the libraries under it."""
    package = Path(__file__).parents[1]
    files = [file for part in ("data", "tokenizers") for file in sorted((package / part).glob("*.py"))]
    return hash_of(*(file.read_text(encoding="utf-8") for file in files), *map(version, LIBRARIES))


def hash_of(*values: Any) -> str:
    """A short hash of plain values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _settings_of_documents(config: SFTDataConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=NOT_OF_DOCUMENTS) | {"longest": longest(config)}


def _write_documents(writer: EntryWriter, parts: Parts) -> None:
    for part in parts:
        for name in ARRAYS:
            writer.append(name, getattr(part, name))
    parts.check_any_left()
    writer.about["report"] = parts.report.to_dict()


def _prepared(entry: Entry, content: str, key: str | None) -> Prepared:
    arrays, about = entry
    return Prepared(Documents.of(*(arrays[name] for name in ARRAYS)), DataReport(**about["report"]), content, key)
