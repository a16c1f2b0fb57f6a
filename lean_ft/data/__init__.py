"""Data: files of rows to batches of token ids and labels."""

from lean_ft.data.batches import Batch, Batches, EvalBatches
from lean_ft.data.documents import Documents, prepare_documents
from lean_ft.data.report import DataReport
from lean_ft.data.sft import sft_batches

__all__ = ["Batch", "Batches", "DataReport", "Documents", "EvalBatches", "prepare_documents", "sft_batches"]
