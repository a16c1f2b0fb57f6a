"""What happens to a sequence that is longer than it may be."""

from lean_ft.data.report import DataReport
from lean_ft.data.rows import Document
from lean_ft.settings import SFTDataConfig


def longest(config: SFTDataConfig) -> int | None:
    """Tokens that one document may have; None where packing takes any length."""
    return config.max_length if config.packing in ("none", "bfd") else None


def fit(document: Document, config: SFTDataConfig, place: str, report: DataReport) -> Document | None:
    """The document within `data.max_length`, or None if it is dropped; `report` counts what was lost.

    A document without a label is dropped, before and after truncation. Raises ValueError, with `place`, for one
    that is too long under `overflow=raise`.
    """
    ids, mask = document
    if not mask[1:].any():
        report.drop("nothing to train on")
        return None
    limit = longest(config)
    if limit is None or len(ids) <= limit:
        return document
    if config.overflow == "raise":
        raise ValueError(
            f"{place}: {len(ids):,} tokens, more than data.max_length={limit:,}. Raise "
            "it, or set data.overflow=truncate or data.overflow=drop."
        )
    if config.overflow == "drop":
        report.drop("longer than max_length")
        return None
    kept = slice(0, limit) if config.truncation_side == "right" else slice(len(ids) - limit, None)
    ids, mask, full_length = ids[kept], mask[kept], len(ids)
    if not mask[1:].any():
        report.drop("nothing to train on within max_length")
        return None
    report.truncated += 1
    report.lost_tokens += full_length - limit
    return ids, mask
