"""What every training loop needs and no author wants to write: run directory, checkpoints, metrics, progress."""

from lean_ft.training.answers import answer_held_out, say_answers
from lean_ft.training.device import start
from lean_ft.training.on_policy import OnPolicy
from lean_ft.training.process_memory import peak_memory_bytes, peak_rss_bytes, rss_bytes
from lean_ft.training.reference import load_policy_reference, load_reference
from lean_ft.training.regularization import apply_regularization
from lean_ft.training.rewards import Rewards
from lean_ft.training.rollouts import PairRollouts, Rollouts, ValuedRollouts
from lean_ft.training.run import Run
from lean_ft.training.sample_log import SampleLog
from lean_ft.training.sampler import Sampler
from lean_ft.training.shared_prompts import shares_prompts
from lean_ft.training.teacher import load_teacher
from lean_ft.training.value_model import ValueModel

__all__ = [
    "OnPolicy",
    "PairRollouts",
    "Rewards",
    "Rollouts",
    "Run",
    "SampleLog",
    "Sampler",
    "ValueModel",
    "ValuedRollouts",
    "answer_held_out",
    "apply_regularization",
    "load_policy_reference",
    "load_reference",
    "load_teacher",
    "peak_memory_bytes",
    "peak_rss_bytes",
    "rss_bytes",
    "say_answers",
    "shares_prompts",
    "start",
]
