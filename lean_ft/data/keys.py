"""Hashes of what decides prepared data: keys of the cache, and the fingerprint that a resumed run must match.

The key of documents hashes the content of the files in order, the tokenizer's files, the settings that affect
documents, the code that reads, renders and tokenizes rows, and the versions of its libraries. It ignores file paths, so
moved or copied data is a cache hit.
"""

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lean_ft.settings import DataConfig
from lean_ft.system.contents import Content, Contents
from lean_ft.system.user_functions import without_hashes
from lean_ft.tokenizers import Tokenizer
from lean_ft.tokenizers.media import LIMITS, MEDIA_PACKAGES

LIBRARIES = ("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pillow")
# These settings do not change the rows; sources and the chat template count by their content.
NOT_IN_FINGERPRINT = {
    *("source", "validation_source", "num_processes", "cache_dir", "cache_gib", "chat_template"),
    "shared_prompt",  # `share_prompts` counts instead
    "share_of",  # `SourceMix.identity` counts instead
}
# Settings added later count only if they differ from the default, so that older runs can be resumed.
NOT_WHERE_DEFAULT = {"system": None, "separator": None, "chat": "auto", "shuffle": True, "chat_template_kwargs": {}}
LATER_DEFAULTS = {"near_duplicates": "keep", "context_template": None, "max_teacher_length": None}
NOT_WHERE_DEFAULT |= {"labels_per": "text", **LATER_DEFAULTS}
NOT_WHERE_DEFAULT |= {name.partition(".")[2]: None for name in LIMITS}
# These settings apply after documents are made. `packing` and `max_length` count through `config.longest`.
NOT_OF_DOCUMENTS = NOT_IN_FINGERPRINT | {"validation_fraction", "packing", "max_length", "batch_tokens", "shuffle"}


def settings_of_documents(config: DataConfig) -> dict[str, Any]:
    """JSON values of the settings that change documents."""
    settings = without_hashes(config.model_dump(mode="json", exclude=NOT_OF_DOCUMENTS) | {"longest": config.longest})
    return {name: value for name, value in settings.items() if value != LATER_DEFAULTS.get(name, ...)}


def settings_of_batches(config: DataConfig) -> dict[str, Any]:
    """JSON values of the settings that change batches."""
    settings = without_hashes(config.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT))
    return {name: value for name, value in settings.items() if value != NOT_WHERE_DEFAULT.get(name, ...)}


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    variables: list[Any] = [tokenizer.chat_template_kwargs] if tokenizer.chat_template_kwargs else []
    return hash_of(*(file.digest for file in contents_of_tokenizer(tokenizer)), *variables)


def contents_of_tokenizer(tokenizer: Tokenizer) -> Contents:
    """The files that decide how rows are tokenized: the tokenizer's own, the chat template and those of images."""
    template = [tokenizer.template_file] if tokenizer.template_file else []
    of_media = [tokenizer.folder / name for media in tokenizer.media for name in media.files]
    named = [(f"{file.relative_to(tokenizer.folder)} of the model", file) for file in tokenizer.files]
    named += [(f"{file} (data.chat_template)", file) for file in template]
    named += [(f"{file.name} of the model", file) for file in of_media if file.is_file()]
    contents = [(name, file.read_bytes()) for name, file in named]
    return Contents(Content(name, hashlib.blake2b(data).hexdigest(), len(data)) for name, data in contents)


@cache
def code_digest() -> str:
    """Hash of the code that turns rows into documents, and of its libraries' versions."""
    package = Path(__file__).parents[1]
    files = [file for part in ("data", *MEDIA_PACKAGES, "tokenizers") for file in sorted((package / part).glob("*.py"))]
    files.append(package / "system" / "cache.py")
    return hash_of(*(file.read_text(encoding="utf-8") for file in files), *map(version, LIBRARIES))


def hash_of(*values: Any) -> str:
    """Hash of JSON values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
