"""Data pipeline: from files of rows to batches of token ids and labels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.data.batch import Batch
    from lean_ft.data.batches import Batches, EvalBatches
    from lean_ft.data.completions import PolicyBatch
    from lean_ft.data.largest import largest_batch
    from lean_ft.data.pairs import PairBatch
    from lean_ft.data.prepare import preference_batches, prepare_batches, sft_batches, unpaired_batches
    from lean_ft.data.prompts import Prompt, Prompts, prompt_rows
    from lean_ft.data.report import DataReport
    from lean_ft.data.unpaired import UnpairedBatch

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
    "largest_batch",
    "preference_batches",
    "prepare_batches",
    "prompt_rows",
    "sft_batches",
    "unpaired_batches",
]

_HOMES = {
    "Batch": "batch",
    "DataReport": "report",
    "PairBatch": "pairs",
    "PolicyBatch": "completions",
    "UnpairedBatch": "unpaired",
    "largest_batch": "largest",
    **dict.fromkeys(("Batches", "EvalBatches"), "batches"),
    **dict.fromkeys(("Prompt", "Prompts", "prompt_rows"), "prompts"),
}  # other names: prepare


def __getattr__(name: str) -> Any:
    """Import on first use, so that tokenizing processes do not load torch."""
    if name not in __all__:
        raise AttributeError(f"module 'lean_ft.data' has no attribute {name!r}")
    return getattr(import_module(f"lean_ft.data.{_HOMES.get(name, 'prepare')}"), name)


def __dir__() -> list[str]:
    return __all__
