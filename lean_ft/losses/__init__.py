"""Losses computed from hidden states in chunks, without a full (tokens, vocabulary) tensor."""

from lean_ft.losses.answer_log_probs import AnswerLogProbs, Answers
from lean_ft.losses.cross_entropy import CrossEntropy
from lean_ft.losses.distillation import Distillation, Teacher
from lean_ft.losses.linear_cross_entropy import IGNORED_LABEL, linear_cross_entropy
from lean_ft.losses.linear_distillation import TeacherStates, TopLogProbs, linear_distillation, top_log_probs
from lean_ft.losses.linear_log_probs import linear_log_probs
from lean_ft.losses.output_layer import hidden_states, loss_chunk_tokens
from lean_ft.losses.policy import advantages, batch_loss, deviation, policy_loss
from lean_ft.losses.preference import LOSSES, pair_losses, preference_loss
from lean_ft.losses.reward import add_scores, output_scores, reward_loss, scores_of
from lean_ft.losses.statistics import TokenStatistics
from lean_ft.losses.token_log_probs import AnswerTokens, TokenLogProbs, on_grid
from lean_ft.losses.unpaired import Baseline, RunningMean, UnpairedStatistics, answer_losses, unpaired_loss
from lean_ft.losses.values import generalized_advantages, value_loss, whitened

__all__ = [
    "IGNORED_LABEL",
    "LOSSES",
    "AnswerLogProbs",
    "AnswerTokens",
    "Answers",
    "Baseline",
    "CrossEntropy",
    "Distillation",
    "RunningMean",
    "Teacher",
    "TeacherStates",
    "TokenLogProbs",
    "TokenStatistics",
    "TopLogProbs",
    "UnpairedStatistics",
    "add_scores",
    "advantages",
    "answer_losses",
    "batch_loss",
    "deviation",
    "generalized_advantages",
    "hidden_states",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "loss_chunk_tokens",
    "on_grid",
    "output_scores",
    "pair_losses",
    "policy_loss",
    "preference_loss",
    "reward_loss",
    "scores_of",
    "top_log_probs",
    "unpaired_loss",
    "value_loss",
    "whitened",
]
