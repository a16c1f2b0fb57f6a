"""Data: files of rows to batches of token ids and labels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.data.batch import Batch, PairBatch, PolicyBatch, UnpairedBatch, longest_batch
    from lean_ft.data.batches import Batches, EvalBatches
    from lean_ft.data.prepare import preference_batches, sft_batches, unpaired_batches
    from lean_ft.data.prompts import Prompt, Prompts, prompt_rows
    from lean_ft.data.report import DataReport

__all__ = [
    "Batch",
    "Batches",
    "DataReport",
    "EvalBatches",
    "PairBatch",
    "PolicyBatch",
    "Prompt",
    "Prompts",
    "UnpairedBatch",
    "longest_batch",
    "preference_batches",
    "prompt_rows",
    "sft_batches",
    "unpaired_batches",
]

# The others: batch.
_HOMES: dict[str, str] = dict.fromkeys(("preference_batches", "sft_batches", "unpaired_batches"), "prepare")
_HOMES |= dict.fromkeys(("Batches", "EvalBatches"), "batches")
_HOMES |= dict.fromkeys(("Prompt", "Prompts", "prompt_rows"), "prompts") | {"DataReport": "report"}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that processes which only tokenise never load torch."""
    if name not in __all__:
        raise AttributeError(f"module 'lean_ft.data' has no attribute {name!r}")
    return getattr(import_module(f"lean_ft.data.{_HOMES.get(name, 'batch')}"), name)


def __dir__() -> list[str]:
    return __all__
