"""Online training: completions sampled from the policy, their rewards, and the batches made of both."""

from lean_ft.online.episodes import Episodes
from lean_ft.online.on_policy import OnPolicy
from lean_ft.online.rewards import Rewards
from lean_ft.online.rollouts import PairRollouts, Rollouts, ValuedRollouts
from lean_ft.online.sample_log import SampleLog
from lean_ft.online.sampler import Sampler
from lean_ft.online.value_model import ValueModel

__all__ = [
    "Episodes",
    "OnPolicy",
    "PairRollouts",
    "Rewards",
    "Rollouts",
    "SampleLog",
    "Sampler",
    "ValueModel",
    "ValuedRollouts",
]
