"""Rounds of answers that a model samples and then learns from, in the place that other recipes have batches of data for.

A round is `ask`ed, `add`ed to until it is full, `begin`s, and is `take`n from, one step's micro-batches at a time. All that a
round knows (which prompts, the tokens and log-probabilities that were sampled, rewards, advantages) is in `state_dict`, so a
run that was killed at any moment goes on with the very same answers, and where it had none yet, samples them anew from the same
weights and the same seed. Answers of a round stand in the order of their prompts, in the same micro-batches in every pass.

Source: our own; what is sampled and when follows TRL's GRPOTrainer, dynamic sampling DAPO (Yu et al. 2025, arXiv:2503.14476).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lean_ft.data import PolicyBatch, Prompt, Prompts
from lean_ft.generation import Sample
from lean_ft.losses import AnswerTokens, advantages
from lean_ft.settings import GenerationConfig, PolicyLossConfig
from lean_ft.shapes_only import stage
from lean_ft.training.rewards import Scores


class OnlineConfig(Protocol):
    """What the Config of a recipe that samples its answers has."""

    generation: GenerationConfig
    loss: PolicyLossConfig
    batch_size: int
    gradient_accumulation_steps: int
    seed: int


@dataclass
class Answer:
    """One answer of a round."""

    prompt: int  # which of the prompts
    ids: list[int]
    log_probs: list[float]  # as they were drawn
    ended: bool
    reward: float | None
    rewards: list[float | None]  # of each function
    text: str
    worth: float | None = None  # the reward, less what the divergence from the reference costs
    divergence: float | None = None
    old: list[float] = field(default_factory=list)  # the trainer's own log-probabilities, before the first update
    counts: list[bool] = field(default_factory=list)  # whether a token is learned from
    advantage: float = 0.0


class Rollouts:
    """The answers that a run learns from, round after round; `lean_ft.training.Run` keeps their state.

    Raises ValueError where a round's answers are no whole groups, and where the sampler leaves tokens out that nothing
    corrects for.
    """

    def __init__(self, cfg: OnlineConfig, prompts: Prompts, pad_id: int) -> None:
        generation, per_step = cfg.generation, cfg.batch_size * cfg.gradient_accumulation_steps
        self._cfg, self._prompts, self._pad_id = cfg, prompts, pad_id
        self.report, self.fingerprint = prompts.report, prompts.fingerprint
        self.num_answers = per_step * generation.steps_per_round
        if self.num_answers % generation.num_answers:
            raise ValueError(
                f"a round has batch_size={cfg.batch_size} x gradient_accumulation_steps={cfg.gradient_accumulation_steps} x "
                f"generation.steps_per_round={generation.steps_per_round} = {self.num_answers} answers, which are no whole "
                f"groups of generation.num_answers={generation.num_answers}. Set them so that it is a multiple."
            )
        if generation.narrows and cfg.loss.correction == "none":
            raise ValueError(
                "generation.top_k, top_p and min_p draw from other probabilities than those that are learned from, so the "
                "loss would be of other answers. Leave them out, or set loss.correction=token_truncate."
            )
        self.num_prompts = self.num_answers // generation.num_answers
        self._steps = generation.steps_per_round * generation.passes
        self._place = self._round = self._attempt = 0
        self._step = self._steps  # of the round, done; no round has begun
        self._answers: list[Answer] = []
        self._even: list[Answer] = []  # groups without spread, that stand in where attempts run out
        self._entropies: dict[int, list[float]] = {}  # of the tokens of each answer, before the first update
        watcher = stage()
        self._planned = None if watcher is None else watcher.batches(self._longest)

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches, passes over the same answers included."""
        generation = self._cfg.generation
        return math.ceil(len(self._prompts) * generation.num_answers * generation.passes / self._cfg.batch_size)

    # A round ------------------------------------------------------------------------------------------------------

    @property
    def used_up(self) -> bool:
        """Whether the next step needs a new round."""
        return self._step == self._steps

    @property
    def wants_more(self) -> bool:
        """Whether the round that comes is not full yet."""
        return self._attempt == 0 or len(self._answers) < self.num_answers

    @property
    def seed(self) -> int:
        """Of what is sampled next."""
        return (self._cfg.seed % 2**31 << 32) + self._round

    def ask(self) -> list[Prompt]:
        """The prompts to be answered next, each once for each of its answers."""
        if self._attempt == 0:  # what is there is of the round before
            self._answers, self._even = [], []
        if self._planned is not None:  # as many different prompts as there are going to be
            longest = self._prompts[0]
            prompts = [replace(longest, ids=[i] * len(longest.ids)) for i in range(self.num_prompts)]
            return [prompt for prompt in prompts for _ in range(self._cfg.generation.num_answers)]
        return [self._prompts[number] for number in self._asked() for _ in range(self._cfg.generation.num_answers)]

    def _asked(self) -> list[int]:
        missing = (self.num_answers - len(self._answers)) // self._cfg.generation.num_answers
        return self._prompts.take(self._place, missing)

    def add(self, samples: Sequence[Sample], scores: Scores) -> None:
        """Takes the answers to what `ask` gave, and what they are worth.

        Of an answer all tokens count, or none: of one without a reward, and with `loss.mask_truncated` of one that was cut.
        """
        if self._planned is not None:
            self._attempt, self._answers = 1, [Answer(0, [], [], True, 0.0, [], "")] * self.num_answers
            return
        size, asked = self._cfg.generation.num_answers, self._asked()
        answers = [
            Answer(asked[i // size], one.ids, one.log_probs, one.ended, total, scores.each[i], scores.texts[i], total)
            for i, (one, total) in enumerate(zip(samples, scores.totals, strict=True))
        ]
        self._place += len(asked)
        self._attempt += 1
        for start in range(0, len(answers), size):
            group = answers[start : start + size]
            spread = len({answer.reward for answer in group if answer.reward is not None}) > 1
            (self._answers if spread or self._cfg.generation.most_attempts == 1 else self._even).extend(group)
        if self.wants_more and self._attempt >= self._cfg.generation.most_attempts:
            self._answers += self._even[: self.num_answers - len(self._answers)]
        for answer in self._answers:
            is_out = answer.reward is None or (self._cfg.loss.mask_truncated and not answer.ended)
            answer.counts = [not is_out] * len(answer.ids)

    def begin(self) -> None:
        """Works the advantages out; from here on there are steps to take."""
        size = self._cfg.generation.num_answers
        if self._planned is None:
            if self._cfg.loss.entropy_share < 1:
                self._keep_least_sure()
            worth = [math.nan if answer.worth is None else answer.worth for answer in self._answers]
            values = advantages(torch.tensor(worth).view(-1, size), self._cfg.loss.advantage_of_loss).flatten().tolist()
            for answer, value in zip(self._answers, values, strict=True):
                answer.advantage = value
        self._step, self._attempt = 0, 0
        self._round += 1

    def take(self) -> list[PolicyBatch]:
        """The micro-batches of the next step."""
        number = self._cfg.gradient_accumulation_steps
        if self._planned is not None:
            return self._planned.take(number)
        first = self._step % self._cfg.generation.steps_per_round * number
        self._step += 1
        return [self._batch(i) for i in range(first, first + number)]

    # What is known before the first update ------------------------------------------------------------------------

    @property
    def looks_back(self) -> bool:
        """Whether the trainer's own log-probabilities are needed before the first update: for more than one update, for the
        entropies of all tokens, or for a divergence in the rewards."""
        loss = self._cfg.loss
        in_reward = loss.kl == "in_reward" and loss.kl_weight > 0
        return self._steps > 1 or loss.entropy_share < 1 or in_reward

    def batches(self) -> Iterator[PolicyBatch]:
        """All micro-batches of a round that has not begun, as the first pass takes them."""
        if self._planned is not None:
            yield from self._planned.take(1)
            return
        for i in range(self.num_answers // self._cfg.batch_size):
            yield self._batch(i)

    def remember(self, batch: PolicyBatch, now: AnswerTokens, reference: Tensor | None) -> None:
        """Notes what the trainer says of a batch of the round.

        reference (B, A): the log-probabilities under it, where the divergence is of the rewards.
        """
        if self._planned is not None:
            return
        loss, mine = self._cfg.loss, self._answers[batch.answers.start : batch.answers.stop]
        if loss.entropy_share < 1:
            for i, entropies in zip(batch.answers, now.entropies.tolist(), strict=True):
                self._entropies[i] = entropies[: len(self._answers[i].ids)]
        for answer, old in zip(mine, now.log_probs.tolist(), strict=True):
            answer.old = old[: len(answer.ids)]
        if reference is not None:
            divergences = (now.log_probs - reference).sum(1).tolist()  # 0 behind an answer
            for answer, divergence in zip(mine, divergences, strict=True):
                answer.divergence = divergence
                answer.worth = None if answer.reward is None else answer.reward - loss.kl_weight * divergence

    def _keep_least_sure(self) -> None:
        """Of the tokens that count leaves out all but the `loss.entropy_share` of highest entropy."""
        tokens = [
            [(entropy, counts) for entropy, counts in zip(self._entropies[i], answer.counts, strict=True)]
            for i, answer in enumerate(self._answers)
        ]
        counted = sorted(entropy for answer in tokens for entropy, counts in answer if counts)
        if not counted:
            return
        least = counted[math.floor((len(counted) - 1) * (1 - self._cfg.loss.entropy_share))]
        for answer, own in zip(self._answers, tokens, strict=True):
            answer.counts = [counts and entropy >= least for entropy, counts in own]

    # What is told -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Of the round under way, by name."""
        answers, size = self._answers, self._cfg.generation.num_answers
        if not answers or self._planned is not None:
            return {}
        rewards = torch.tensor([math.nan if answer.reward is None else answer.reward for answer in answers])
        groups = rewards.view(-1, size)
        spread = advantages(groups, "mean")
        has_one = (~groups.isnan()).sum(1)
        deviations = (spread.square().sum(1) / (has_one - 1).clamp(min=1)).sqrt()
        told = {
            "reward": float(rewards.nanmean()),
            "reward_std": float(deviations.mean()),
            "even_groups": float((spread == 0).all(1).float().mean()),
            "completion_length": sum(len(answer.ids) for answer in answers) / len(answers),
            "truncated": sum(not answer.ended for answer in answers) / len(answers),
        }
        if divergences := [answer.divergence for answer in answers if answer.divergence is not None]:
            told["kl"] = sum(divergences) / sum(len(answer.ids) for answer in answers)
        return {name: value for name, value in told.items() if not math.isnan(value)}

    def shown(self, count: int) -> list[dict[str, Any]]:
        """A few answers of the round, of as many prompts as may be, for people to read."""
        step = max(1, len(self._answers) // count)
        return [
            {
                "prompt": self._prompts[answer.prompt].asked,
                "answer": answer.text,
                "reward": answer.reward,
                "rewards": answer.rewards,
                "advantage": answer.advantage,
                "ended": answer.ended,
            }
            for answer in self._answers[::step][:count]
        ]

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the prompts and what is left of a round, as plain JSON values."""
        return {
            "place": self._place,
            "round": self._round,
            "step": None if self.used_up else self._step,
            "answers": [] if self.used_up else [dict(vars(answer)) for answer in self._answers],
            **self._sizes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place `state`. Raises ValueError where rounds were of another size or of other prompts."""
        for name, here in self._sizes().items():
            if state.get(name) != here:
                raise ValueError(
                    f"cannot resume: {name.replace('_', ' ')} was {state.get(name)} and is {here} now, so the place in the "
                    "prompts is gone. Restore it, or begin a new run from the checkpoint's weights."
                )
        self._place, self._round = state["place"], state["round"]
        self._step = self._steps if state["step"] is None else state["step"]
        self._answers = [Answer(**answer) for answer in state["answers"]]

    def _sizes(self) -> dict[str, Any]:
        generation = self._cfg.generation
        return {
            "seed": self._cfg.seed,
            "batch_size": self._cfg.batch_size,
            "steps_per_round": generation.steps_per_round,
            "passes": generation.passes,
            "num_answers": generation.num_answers,
            "prompts_per_round": self.num_prompts,
            "data": self.fingerprint,
        }

    # Batches ------------------------------------------------------------------------------------------------------

    def _batch(self, i: int) -> PolicyBatch:
        first = i * self._cfg.batch_size
        answers = self._answers[first : first + self._cfg.batch_size]
        return PolicyBatch.of(
            [self._prompts[answer.prompt].ids for answer in answers],
            [answer.ids for answer in answers],
            pad_id=self._pad_id,
            first=first,
            counts=[answer.counts for answer in answers],
            sampled=[answer.log_probs for answer in answers],
            old=[answer.old for answer in answers] if answers[0].old else None,
            advantages=[answer.advantage for answer in answers],
        )

    def _longest(self) -> PolicyBatch:
        """The micro-batch that takes most, without contents."""
        rows, new = self._cfg.batch_size, self._cfg.generation.max_new_tokens
        tokens = [[0] * new] * rows
        values = [[0.0] * new] * rows
        return PolicyBatch.of(
            [self._prompts[0].ids] * rows,
            tokens,
            pad_id=0,
            first=0,
            counts=[[True] * new] * rows,
            sampled=values,
            old=values if self.looks_back else None,
            advantages=[1.0] * rows,
        )
