"""Sampling from token ids (`sample`, for training and evaluation), and text generation from runs and checkpoints
(`generate`).

Text generation is imported on first use: it depends on `lean_ft.training`, which itself uses `sample`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import Sample, longest_first, sample, sample_numbers, sample_steps
from lean_ft.generation.stopping import stop_ids

if TYPE_CHECKING:
    from lean_ft.generation.texts import answers, generate, open_model, read_prompts, stream

__all__ = [
    "Sample",
    "Sampling",
    "answers",
    "generate",
    "longest_first",
    "open_model",
    "read_prompts",
    "sample",
    "sample_numbers",
    "sample_steps",
    "stop_ids",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lean_ft.generation' has no attribute {name!r}")
    return getattr(import_module("lean_ft.generation.texts"), name)


def __dir__() -> list[str]:
    return __all__
