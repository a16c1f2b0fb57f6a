"""Data: files of rows to batches of token ids and labels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.data.batches import Batch, Batches, EvalBatches
    from lean_ft.data.documents import Documents, prepare_documents
    from lean_ft.data.report import DataReport
    from lean_ft.data.sft import sft_batches

__all__ = ["Batch", "Batches", "DataReport", "Documents", "EvalBatches", "prepare_documents", "sft_batches"]

_HOMES = {
    "Batch": "batches",
    "Batches": "batches",
    "DataReport": "report",
    "Documents": "documents",
    "EvalBatches": "batches",
    "prepare_documents": "documents",
    "sft_batches": "sft",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that processes which only tokenise never load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lean_ft.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"lean_ft.data.{_HOMES[name]}"), name)
