"""Completions of a round, and what a round of them tells: its metrics, and why it may train nothing."""

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from lean_ft.data.columns import Document
from lean_ft.data.completions import TOKEN_VALUES
from lean_ft.generation import Completion
from lean_ft.losses import deviation, generalized_advantages
from lean_ft.online.episodes import Episode
from lean_ft.system.foreign_values import JSON
from lean_ft.system.units import counted


@dataclass
class Rollout(Completion):
    """A completion of a round, with its rewards and what training makes of them. Its fields are saved in
    checkpoints."""

    prompt: int = 0  # its number
    reward: float | None = None
    rewards: list[float | None] = field(default_factory=list)  # of each function
    text: str = ""
    extras: dict[str, Any] = field(default_factory=dict)  # of `log_extra`, by column
    # Per token: the divergence from the reference, if it is part of the reward.
    divergences: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # per token, the value model's prediction before it
    returns: list[float] = field(default_factory=list)  # and the prediction's target
    old: list[float] = field(default_factory=list)  # the trainer's own log-probabilities, before the first update
    counts: list[bool] = field(default_factory=list)  # whether a token is in the loss and its denominators
    uncertain: list[bool] = field(default_factory=list)  # with loss.entropy_share: whether its policy loss counts
    advantages: list[float] = field(default_factory=list)  # one per token, or one for all
    # Whether the policy sampled a token that trains. Others are given, such as a tool's result, or a kind of columns
    # never trains them. Empty: all train.
    trained: list[bool] = field(default_factory=list)
    episode: dict[str, Any] = field(default_factory=dict)  # of several turns: `Episode.summary`
    asked: list[int] = field(default_factory=list)  # the prompt's ids if an environment changed them

    def __post_init__(self) -> None:
        self.trained = self.trained or [True] * len(self.ids)

    @classmethod
    def of(cls, completion: Completion, never_trained: frozenset[int], **judged: Any) -> "Rollout":
        """never_trained: ids; judged: the number of the prompt, and the fields that rewards fill."""
        if isinstance(completion, Episode):
            judged |= {"episode": completion.summary, "asked": completion.asked}
        tokens = zip(completion.ids, completion.sampled or [True] * len(completion.ids), strict=True)
        judged["trained"] = [sampled and token not in never_trained for token, sampled in tokens]
        return cls(**{column.name: getattr(completion, column.name) for column in fields(Completion)}, **judged)

    def of_tokens(self, values: list[float]) -> list[float]:
        """One value per token: a single value is repeated; zeros if there is none yet."""
        return values if len(values) == len(self.ids) else (values or [0.0]) * len(self.ids)

    @property
    def token_advantages(self) -> list[float]:
        """The advantage of each token; 0 where `loss.entropy_share` omits the policy loss."""
        advantages = self.of_tokens(self.advantages)
        return (
            [a if u else 0.0 for a, u in zip(advantages, self.uncertain, strict=True)] if self.uncertain else advantages
        )

    @property
    def num_sampled(self) -> int:
        return sum(self.trained)

    @property
    def divergence(self) -> float | None:
        return sum(self.divergences) if self.divergences else None

    def estimate_advantages(self, kl_weight: float, gamma: float, gae_lambda: float) -> None:
        """Set generalized advantages and returns. The steps are the sampled tokens: the value before one of them
        follows the value before the last sampled one."""
        sampled = torch.tensor(self.trained)
        if not sampled.any():  # it has only tokens that are never trained
            self.advantages = self.returns = [0.0] * len(self.ids)
            return
        rewards = -kl_weight * torch.tensor(self.of_tokens(self.divergences))[sampled]
        rewards[-1] += self.reward or 0.0
        values = torch.tensor(self.values)[sampled]
        above, returns = generalized_advantages(rewards[None], values[None], gamma, gae_lambda)
        zeros = torch.zeros(len(self.ids))
        self.advantages = zeros.masked_scatter(sampled, above[0]).tolist()
        self.returns = zeros.masked_scatter(sampled, returns[0]).tolist()

    def shown(self, prompt: JSON, columns: Iterable[str]) -> dict[str, Any]:
        """The line of samples.jsonl, with these columns of `log_extra`."""
        row = {
            "prompt": prompt,
            "answer": self.text,
            "reward": self.reward,
            "rewards": self.rewards,
            **({"advantage": self.advantages[0]} if self.advantages else {}),
            "ended": self.ended,
            **({"messages": self.episode["messages"]} if self.episode else {}),
        }
        return row | {f"extra/{name}" if name in row else name: self.extras.get(name) for name in columns}

    def document(self, prompt: Document) -> Document:
        """The prompt and the completion, of which the sampled tokens are trained, with their recorded experts."""
        document = prompt.continued(self.ids, self.trained)
        if not self.experts:
            return document
        experts = np.frombuffer(base64.b64decode(self.experts), np.int16).reshape(len(document) - 1, -1)
        # Sampling does not compute the last token. 0: its experts are the router's choice.
        experts = np.pad(experts, ((0, 1), (0, 0)))
        return replace(document, per_token={**document.per_token, "recorded_experts": experts})

    def document_with_values(self, prompt: Document, names: Sequence[str]) -> Document:
        """The document with the values of its tokens, by the names of `PolicyBatch`."""
        values = vars(self) | {"sampled": self.log_probs, "advantages": self.token_advantages}
        types = {name: bool if name == "counts" else np.float32 for name in names}
        columns = {n: np.array([0] * len(prompt) + self.of_tokens(values[n]), dtype=types[n]) for n in names}
        document = self.document(prompt)
        of_document = {**document.per_document, "prompt": np.array([len(prompt)])}
        return replace(document, per_token={**document.per_token, **columns}, per_document=of_document)


def documents_of(rollouts: Sequence[Rollout], prompts: Sequence[Document]) -> list[Document]:
    """The documents of completions, with the values that any of them has."""
    always = ("counts", "sampled", "advantages")
    names = [name for name in TOKEN_VALUES if name in always or any(getattr(rollout, name) for rollout in rollouts)]
    return [rollout.document_with_values(prompt, names) for rollout, prompt in zip(rollouts, prompts, strict=True)]


def differ(rollouts: Sequence[Rollout]) -> bool:
    """Whether the rewards of a prompt's completions differ."""
    return len({rollout.reward for rollout in rollouts if rollout.reward is not None}) > 1


def round_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Metrics of a round with `group_size` completions of each prompt."""
    size = group_size if group_size > 1 else len(rollouts)
    groups = torch.tensor([math.nan if rollout.reward is None else rollout.reward for rollout in rollouts]).view(
        -1, size
    )
    num_tokens = sum(rollout.num_sampled for rollout in rollouts)
    told = {
        "reward": float(groups.nanmean()),
        "reward_std": float(deviation(groups, ~groups.isnan(), 1).mean()),
        "even_groups": float(np.mean([not differ(rollouts[i : i + size]) for i in range(0, len(rollouts), size)])),
        "completion_length": num_tokens / len(rollouts),
        "truncated": sum(not rollout.ended for rollout in rollouts) / len(rollouts),
    }
    if divergences := [rollout.divergence for rollout in rollouts if rollout.divergence is not None]:
        told["kl"] = sum(divergences) / max(1, num_tokens)
    if episodes := [rollout.episode for rollout in rollouts if rollout.episode]:
        calls = sum(rollout["calls"] for rollout in episodes)
        told["turns"] = sum(rollout["turns"] for rollout in episodes) / len(episodes)
        told["tool_calls"] = calls / len(episodes)
        num_actions = calls + sum(rollout.get("steps", 0) for rollout in episodes)
        told["tool_errors"] = sum(rollout["errors"] for rollout in episodes) / max(1, num_actions)
    return {name: value for name, value in told.items() if not math.isnan(value)}


def why_calls_fail(rollouts: Sequence[Rollout]) -> str | None:
    """The first error, if all tool calls and all turns in the environment ended in one; empty if any succeeded; None if
    there were none."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode]
    num_actions = sum(episode["calls"] + episode.get("steps", 0) for episode in episodes)
    if not num_actions:
        return None
    if sum(episode["errors"] for episode in episodes) < num_actions:
        return ""
    answered = [message for episode in episodes for message in episode["messages"] if message["role"] != "assistant"]
    first = answered[0] if answered else {"content": "error: the environment did not return in time"}
    caller = f"{first['name']}: " if first.get("name") else ""
    what = counted(num_actions, "tool calls")
    return f"all {what} of this round failed (samples.jsonl has messages). The first: {caller}{first['content']}"


def why_untrained(metrics: dict[str, float], any_trained: bool, has_values: bool) -> str:
    """Why a round with these metrics changes nothing, and what helps; empty if it does.

    has_values: a value model, rather than the prompt's other completions, is the baseline.
    """
    if "reward" not in metrics:
        if metrics.get("truncated") == 1 and "turns" in metrics:
            return (
                "no completion has a reward, and all were cut at generation.max_new_tokens. The environment takes no "
                "step after a cut turn. Raise generation.max_new_tokens"
            )
        return "no completion has a reward, because all reward functions returned None"
    if not any_trained:
        return (
            "all completions that have a reward were cut at generation.max_new_tokens, and loss.mask_truncated=true "
            "leaves those out. Raise generation.max_new_tokens, or set loss.mask_truncated=false"
        )
    if has_values or metrics["even_groups"] < 1:
        return ""
    return (
        "all completions of each prompt have the same reward. To sample other prompts instead, set "
        "generation.most_attempts=4. Or raise generation.num_answers or generation.temperature, or use rewards with "
        "more values"
    )
