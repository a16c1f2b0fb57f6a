"""Sampling from token ids (`sample`, for training and evaluation), and text generation from runs and checkpoints
(`generate`)."""

from lean_ft.generation.calling import CallingTurn, converse
from lean_ft.generation.choosing import Sampling
from lean_ft.generation.decoding import longest_first, sample, sample_numbers, sample_steps
from lean_ft.generation.prompts import is_text_alone
from lean_ft.generation.stopping import stop_ids
from lean_ft.generation.texts import answers, generate, open_model, read_prompts, stream
from lean_ft.generation.turns import Completion, Replies

__all__ = [
    "CallingTurn",
    "Completion",
    "Replies",
    "Sampling",
    "answers",
    "converse",
    "generate",
    "is_text_alone",
    "longest_first",
    "open_model",
    "read_prompts",
    "sample",
    "sample_numbers",
    "sample_steps",
    "stop_ids",
    "stream",
]
