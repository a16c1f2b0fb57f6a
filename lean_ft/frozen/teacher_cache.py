"""On-disk cache of a teacher's top-k predictions for every target of prepared documents.

Use it if the teacher does not fit in memory next to the student: the teacher runs once, alone, on any machine. For each
target the cache has the k likeliest tokens with their log-probabilities, and the log-probability of all others
together. That is 8 bytes per token plus 4, or 0.5 KB per target at k = 64.

A document is identified by its content (ids, and which of them are trained), not by its place. When the student trains,
rows may be shuffled, packed or weighted differently, or be fewer. A document that is truncated differently is missing
in the cache.

The folder is written under a temporary name and renamed when it is complete (`lean_ft.system.cache`).

Shapes: N targets of all documents, k stored tokens, M documents.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from lean_ft.data import Batch, EvalBatches, prepare_batches
from lean_ft.data.columns import Columns
from lean_ft.data.keys import NOT_IN_FINGERPRINT
from lean_ft.frozen.frozen_model import for_forward
from lean_ft.losses import TeacherStates, loss_chunk_tokens, top_log_probs
from lean_ft.memory import apply_memory
from lean_ft.models import Decoder, load_model
from lean_ft.models.device import check_dtype, resolve_device
from lean_ft.models.own_families import check_own_families
from lean_ft.peft import quantize_as_loaded
from lean_ft.settings import DataConfig, KeepTeacherConfig
from lean_ft.system.cache import ABOUT, read_entry, write_entry
from lean_ft.system.config_fields import MAX_COUNT
from lean_ft.system.log import say
from lean_ft.system.whole_files import read_json
from lean_ft.tokenizers import Tokenizer, load_tokenizer
from lean_ft.training.progress import shown

# Settings that change the arrangement or number of rows, but no document.
NOT_OF_DOCUMENTS = NOT_IN_FINGERPRINT | {
    "validation_fraction",
    "packing",
    "batch_tokens",
    "subset",
    "split",
    "streaming",
}


@torch.no_grad()
def keep_teacher(cfg: KeepTeacherConfig) -> None:
    """Write the model's top-k predictions for every target of the training and held-out rows to `cfg.destination`.

    Raises ValueError if the folder exists, and for invalid models or data.
    """
    if cfg.destination.exists():
        raise ValueError(f"{cfg.destination} already exists. Choose another destination, or delete it.")
    if cfg.model.new_tokens:
        raise ValueError(
            "model.new_tokens adds tokens that a run trains, and a teacher has no predictions for them. Remove the "
            "setting."
        )
    device = resolve_device(cfg.device)
    check_dtype(cfg.model.dtype, device)
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    trained, held_out = prepare_batches(cfg.data, tokenizer, batch_size=cfg.batch_size, seed=0)
    model = _load_teacher(cfg, device)
    chunk_tokens = loss_chunk_tokens(model, cfg.memory.loss_chunk_tokens)
    weight = model.output_weight[: tokenizer.vocab_size]  # without padding, which a student may lack
    parts = [EvalBatches(trained.layout, trained.report), *([held_out] if held_out is not None else [])]
    num_targets = 0
    cfg.destination.parent.mkdir(parents=True, exist_ok=True)
    with write_entry(cfg.destination.parent, cfg.destination.name) as writer:
        for part in parts:
            columns = part.layout.columns
            digests, counts = columns.digests(), columns.num_targets
            num_targets += int(counts.sum())
            for batch in shown(part, len(part), "scoring"):
                here = batch.to(device)
                hidden = model(**here.inputs, return_hidden=True)
                said = top_log_probs(
                    TeacherStates(hidden, weight, model.config.logits_softcap),
                    here.labels,
                    cfg.top_k,
                    temperature=cfg.temperature,
                    num_targets=batch.num_targets,
                    chunk_tokens=chunk_tokens,
                )
                assert batch.documents is not None
                assert columns.first is not None
                numbers = batch.documents - columns.first
                writer.append(
                    {
                        "log_probs": said.log_probs.float().cpu().numpy().ravel(),
                        "ids": said.ids.int().cpu().numpy().ravel(),
                        "digests": digests[numbers],
                        "num_targets": counts[numbers],
                    }
                )
        writer.about |= _about(cfg, tokenizer, vocab_size=len(weight))
    size = sum(file.stat().st_size for file in cfg.destination.iterdir())
    say("saved", f"{cfg.destination}: {cfg.top_k} tokens for each of {num_targets:,} targets, {size / 2**20:,.1f} MiB")


def _about(cfg: KeepTeacherConfig, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """What a student's run compares with its own settings."""
    return {
        "model": cfg.model.path,
        "dtype": "nf4" if cfg.nf4 else cfg.model.dtype,
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "num_columns": cfg.top_k + (cfg.top_k < vocab_size),
        "vocab_size": vocab_size,
        "tokens": tokens_of(tokenizer),
        "data": _settings_of(cfg.data),
    }


def _load_teacher(cfg: KeepTeacherConfig, device: torch.device) -> Decoder:
    quantize = quantize_as_loaded("nf4" if cfg.nf4 else "none")
    model = load_model(cfg.model, device, dtype=cfg.model.dtype, quantize=quantize)
    check_own_families()
    apply_memory(model.requires_grad_(False).eval(), for_forward(cfg.memory), compile=cfg.compile)
    return model


def tokens_of(tokenizer: Tokenizer) -> list[str]:
    """The text of each id, empty for an id without a token."""
    return [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]


class TeacherCache:
    """A folder written by `keep_teacher`, for the documents of several columns, numbered like `Batch.documents`."""

    def __init__(self, folder: Path, columns: Sequence[Columns], data: DataConfig) -> None:
        """Raise ValueError if the folder is missing or damaged, or lacks a document."""
        self.about = read_about(folder)
        entry = read_entry(folder.parent, folder.name)
        if entry is None:
            raise ValueError(
                f"distill.cached={folder} is damaged: a file is missing or too short. Run leanft score again."
            )
        arrays, _ = entry
        self._log_probs, self._ids, kept, counts = _arrays(folder, arrays, self.about)
        order = np.argsort(kept, kind="stable")
        digests = np.concatenate([part.digests() for part in columns])
        place = order[np.minimum(np.searchsorted(kept[order], digests), len(order) - 1)]
        self.num_documents = len(digests)
        if num_missing := int((kept[place] != digests).sum()):
            raise ValueError(
                f"distill.cached={folder} lacks {num_missing:,} of this run's {len(digests):,} documents: the rows, "
                f"their truncation or their rendering differ.{_differences(self.about['data'], data)} Run leanft score "
                "with this run's rows, including the held-out rows, and the same `data.*` settings."
            )
        self._counts = counts[place]
        self._starts = (np.cumsum(counts) - counts)[place]

    def rows_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities (N, k + 1) and ids (N, k) of the batch's targets, in order."""
        assert batch.documents is not None
        numbers = batch.documents if batch.num_targets else batch.documents[:0]
        spans = [slice(start, start + n) for start, n in zip(self._starts[numbers], self._counts[numbers], strict=True)]
        empty = slice(0, 0)
        log_probs, ids = (
            np.concatenate([values[span] for span in spans or [empty]]) for values in (self._log_probs, self._ids)
        )
        assert len(log_probs) == batch.num_targets
        if ids.size and not 0 <= ids.min() <= ids.max() < self.about["vocab_size"]:
            raise ValueError(
                "distill.cached is damaged: it has ids outside the teacher's vocabulary. Run leanft score again."
            )
        return log_probs, ids


def _arrays(folder: Path, arrays: dict[str, Any], about: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Log-probabilities (N, k + 1), ids (N, k), digests (M,) and numbers of targets (M,). Raise ValueError unless they
    fit."""
    names = ("log_probs", "ids", "digests", "num_targets")
    log_probs, ids, digests, counts = (arrays.get(name, np.empty(0)) for name in names)
    num_targets = int(counts.sum()) if counts.dtype.kind in "iu" and (counts >= 0).all() else -1
    is_whole = len(digests) == len(counts) > 0 and (log_probs.dtype, ids.dtype) == (np.float32, np.int32)
    sizes = num_targets * about["num_columns"], num_targets * about["top_k"]
    if not is_whole or (log_probs.size, ids.size) != sizes:
        raise ValueError(
            f"distill.cached={folder} is damaged: its arrays do not fit one another. Run leanft score again."
        )
    return log_probs.reshape(-1, about["num_columns"]), ids.reshape(-1, about["top_k"]), digests, counts


def read_about(folder: Path) -> dict[str, Any]:
    """Return the metadata of a folder written by `keep_teacher`. Raise ValueError for any other folder."""
    about = read_json(folder / ABOUT)
    counts = [about.get(name) for name in ("top_k", "num_columns", "vocab_size")]
    texts = [about.get("model"), *(tokens if isinstance(tokens := about.get("tokens", []), list) else [None])]
    are_right = all(type(count) is int and 0 < count <= MAX_COUNT for count in counts)
    are_right = are_right and type(about.get("temperature")) in (int, float) and isinstance(about.get("data"), dict)
    if are_right and all(isinstance(text, str) for text in texts):
        return about
    raise ValueError(
        f"distill.cached={folder} is not a folder of a teacher's predictions. Write one: leanft score MODEL FILE "
        f"{quote(str(folder))} --top-k 64"
    )


def _settings_of(data: DataConfig) -> dict[str, Any]:
    return data.model_dump(mode="json", exclude=NOT_OF_DOCUMENTS)


def _differences(then: dict[str, Any], data: DataConfig) -> str:
    """Return a sentence that lists the settings that differ from the folder's."""
    now = _settings_of(data)
    changed = [f"data.{key}={then[key]} there, {now[key]} here" for key in now if key in then and then[key] != now[key]]
    return f" Settings differ: {'; '.join(changed)}." if changed else ""
