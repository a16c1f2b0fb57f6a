"""Data pipeline: from files of rows to batches of token ids and labels."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_ft.data.batch import Batch
    from lean_ft.data.batches import Batches, EvalBatches
    from lean_ft.data.completions import PolicyBatch
    from lean_ft.data.largest import largest_batch
    from lean_ft.data.pairs import PairBatch
    from lean_ft.data.prepare import prepare_batches
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
    "prepare_batches",
    "prompt_rows",
]

_HOMES = {
    "Batch": "batch",
    "DataReport": "report",
    "PairBatch": "pairs",
    "PolicyBatch": "completions",
    "UnpairedBatch": "unpaired",
    "largest_batch": "largest",
    "prepare_batches": "prepare",
    **dict.fromkeys(("Batches", "EvalBatches"), "batches"),
    **dict.fromkeys(("Prompt", "Prompts", "prompt_rows"), "prompts"),
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that tokenizing processes do not load torch."""
    if name in ("sft_batches", "preference_batches", "unpaired_batches"):  # of copied recipes
        raise ImportError(f"{name} is now prepare_batches, with the same arguments. Rename it where it is used.")
    if name not in __all__:
        raise AttributeError(f"module 'lean_ft.data' has no attribute {name!r}")
    return getattr(import_module(f"lean_ft.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
