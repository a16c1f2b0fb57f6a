"""Training: the run directory, checkpoints, metrics and progress around a recipe's loop."""

from lean_ft.system.passes import evaluating
from lean_ft.training.answers import answer_held_out, say_answers
from lean_ft.training.process import start
from lean_ft.training.process_memory import peak_memory_bytes, peak_rss_bytes, rss_bytes
from lean_ft.training.regularization import apply_regularization
from lean_ft.training.run import Run
from lean_ft.training.shared_prompts import shares_prompts

__all__ = [
    "Run",
    "answer_held_out",
    "apply_regularization",
    "evaluating",
    "peak_memory_bytes",
    "peak_rss_bytes",
    "rss_bytes",
    "say_answers",
    "shares_prompts",
    "start",
]
