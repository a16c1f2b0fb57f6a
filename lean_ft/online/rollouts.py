"""Rollouts: completions sampled from the policy, used as training batches.

`Rounds` is the base class. `Rollouts` compares the completions of a prompt with each other, `ValuedRollouts` each token
with a value model's prediction, and `PairRollouts` makes preference pairs.

A round is sampled (`sample`), prepared (`begin`), and read one step's micro-batches at a time (`take`). `state_dict`
holds the whole round (prompts, tokens, log-probabilities, rewards, advantages), so a killed run resumes with the same
completions; if it was killed before it had them, it samples the same ones again. Completions are in the order of their
prompts, and each pass has the same micro-batches.

Source: the order of sampling follows TRL's GRPOTrainer; dynamic sampling: DAPO (Yu et al. 2025, arXiv:2503.14476).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from lean_ft.data import Batch, PairBatch, PolicyBatch, Prompt, Prompts
from lean_ft.data.batch import PADDED_TO_MULTIPLE_OF
from lean_ft.data.collate import batch_of
from lean_ft.data.columns import Document
from lean_ft.data.completions import SampledCompletions
from lean_ft.data.largest import full_document
from lean_ft.data.pairs import PreferencePairs
from lean_ft.generation import Completion
from lean_ft.losses import AnswerTokens, advantages, whitened
from lean_ft.online.completions import Rollout, differ, documents_of, round_metrics, why_calls_fail, why_untrained
from lean_ft.online.episodes import Episode
from lean_ft.online.rewards import Rewards, Scores
from lean_ft.online.sampler import Sampler
from lean_ft.settings import OnlineConfig, PolicyLossConfig, PPOLossConfig
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.world import world
from lean_ft.training.answers import one_line

BatchT = TypeVar("BatchT", bound=Batch)


class Rounds(Generic[BatchT]):
    """The completions that a run trains on, round after round; `lean_ft.training.Run` saves their state.

    cfg: of a recipe that samples completions. All `ranks` have the same completions. `share_prompts`: compute a prompt
    once for those of its completions that are in one micro-batch. Raises ValueError if a round does not consist of
    whole groups, or if `data.shared_prompt=true` and not `share_prompts`.
    """

    _has_values = False  # whether a value model, rather than the prompt's other completions, is the baseline
    unit = "completions"  # that a batch counts

    def __init__(
        self, cfg: OnlineConfig, prompts: Prompts, pad_id: int, ranks: Ranks = ALONE, share_prompts: bool = False
    ) -> None:
        if cfg.data.shared_prompt is True and not share_prompts:
            raise ValueError(
                "data.shared_prompt=true, but this recipe repeats the prompt for each completion. Remove the setting, "
                "or in the recipe pass share_prompts=shares_prompts(cfg) to the rollouts."
            )
        generation, per_step = cfg.generation, cfg.batch_size * cfg.gradient_accumulation_steps
        self._cfg, self._prompts, self._pad_id, self._ranks = cfg, prompts, pad_id, ranks
        self._shares_prompts, self.kinds = share_prompts, prompts[0].text.kinds
        self._never_trained = frozenset[int]().union(*(kind.never_trained for kind in self.kinds))
        self.report, self.fingerprint, self.contents = prompts.report, prompts.fingerprint, prompts.contents
        self.num_completions = per_step * generation.steps_per_round * self.completions_in_a_row
        if self.num_completions % generation.num_answers:
            whole = cfg.batches_of_a_round
            number = math.ceil(cfg.gradient_accumulation_steps / whole) * whole
            raise ValueError(
                f"a round has batch_size={cfg.batch_size} x "
                f"gradient_accumulation_steps={cfg.gradient_accumulation_steps} x "
                f"generation.steps_per_round={generation.steps_per_round} = {self.num_completions} completions, which "
                f"is not a multiple of generation.num_answers={generation.num_answers}. Set "
                f"gradient_accumulation_steps={number}, or change batch_size."
            )
        self.num_prompts = self.num_completions // generation.num_answers
        self._steps = generation.steps_per_round * generation.passes
        self._place = self._round = 0
        self._step = self._steps  # steps done in the round; no round has begun
        self._rollouts: list[Rollout] = []
        self._token_values: dict[int, dict[str, list[float]]] = {}  # of each completion, before the first update
        self._told = set[str]()  # reasons why a round trained nothing
        self._calls_fail = False  # all tool calls of the last round that had any
        self._sampling_seconds: float | None = None  # of the round, until it is logged
        self._ahead: Callable[[], list[Completion]] | None = None  # waits for the first completions of the next round
        self._observer = world().observer

    @property
    def completions_in_a_row(self) -> int:
        """Completions that make a row of a batch."""
        return 1

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches, including further passes over the same completions."""
        generation = self._cfg.generation
        rows = len(self._prompts) * generation.num_answers * generation.passes / self.completions_in_a_row
        return math.ceil(rows / self._cfg.batch_size)

    # A round ------------------------------------------------------------------------------------------------------

    @property
    def used_up(self) -> bool:
        """Whether the next step needs a new round."""
        return self._step == self._steps

    def sample(self, answer: Callable[[list[Prompt], int], list[Completion]], score: Rewards) -> None:
        """Fill the next round. `answer`: a `Sampler`, or, without `generation.ahead`, a function of prompts and a seed.

        All sampled tokens of a completion are trained, except those that a kind of columns never trains; or none:
        without a reward, or if cut with `loss.mask_truncated`.
        """
        self._observer.sample(self, self._cfg, answer, partial(self._fill, answer, score))

    def _fill(self, answer: Callable[[list[Prompt], int], list[Completion]], score: Rewards) -> None:
        started = time.perf_counter()
        seed, attempts = (self._cfg.seed % 2**31 << 32) + self._round, self._cfg.generation.most_attempts
        self._rollouts, even = [], list[Rollout]()
        while len(self._rollouts) < self.num_completions and attempts:
            attempts -= 1
            numbers, asked = self._ask(self.num_completions - len(self._rollouts))
            completions = answer(asked, seed) if self._ahead is None else self._ahead()
            self._ahead = None
            even += self._add(numbers, completions, score(asked, completions))
        self._rollouts += even[: self.num_completions - len(self._rollouts)]
        for rollout in self._rollouts:
            rollout.counts = [trained and self._counts(rollout) for trained in rollout.trained]
        trains = any(self._counts(one) for one in self._rollouts)
        if (why := why_untrained(self.metrics(), trains, self._has_values)) and why not in self._told:
            self._told.add(why)
            told = f"the rewards of this round train nothing: {why}. Later rounds of this kind are not reported."
            say("WARNING", told)
        self._warn_of_failed_calls()
        if self._cfg.generation.ahead:
            if not isinstance(answer, Sampler):
                raise ValueError("generation.ahead=1 needs a Sampler as `answer`. Pass one, or set generation.ahead=0.")
            self._ahead = answer.ahead(self._ask(self.num_completions)[1], seed + 1)
        self._sampling_seconds = time.perf_counter() - started

    def _warn_of_failed_calls(self) -> None:
        """Warn if all tool calls of the round failed, once until a call succeeds."""
        why = why_calls_fail(self._rollouts)
        if why and not self._calls_fail:
            say("WARNING", one_line(why, 400))
        self._calls_fail = self._calls_fail if why is None else bool(why)

    def _ask(self, num_completions: int) -> tuple[list[int], list[Prompt]]:
        """The numbers of the next prompts, and these prompts, each repeated for its completions."""
        numbers = self._prompts.take(self._place, num_completions // self._cfg.generation.num_answers)
        return numbers, [self._prompts[one] for one in numbers for _ in range(self._cfg.generation.num_answers)]

    def _add(self, asked: list[int], completions: Sequence[Completion], scores: Scores) -> list[Rollout]:
        """Add completions with their rewards. Return those of prompts that dynamic sampling replaces."""
        size = self._cfg.generation.num_answers
        rollouts = [
            Rollout.of(
                completion,
                self._never_trained,
                prompt=asked[i // size],
                reward=scores.totals[i],
                rewards=scores.each[i],
                text=scores.texts[i],
                extras={column: values[i] for column, values in scores.extras.items()},
            )
            for i, completion in enumerate(completions)
        ]
        self._place += len(asked)
        even = []
        for start in range(0, len(rollouts), size):
            group = rollouts[start : start + size]
            (self._rollouts if differ(group) or self._cfg.generation.most_attempts == 1 else even).extend(group)
        return even

    def _asked_of(self, rollout: Rollout) -> Document:
        """The completion's prompt."""
        return Document.of(rollout.asked) if rollout.asked else self._prompts[rollout.prompt].text

    def begin(self) -> None:
        """Compute the advantages. Then `take` returns batches."""
        if self._rollouts:  # a plan has none
            self._work_out()
        self._step = 0
        self._round += 1

    def take(self) -> list[BatchT]:
        """The micro-batches of the next step."""
        number = self._cfg.gradient_accumulation_steps
        first = self._step % self._cfg.generation.steps_per_round * number
        self._step += 1
        return self._observer.round_batches(partial(self._batches, first, first + number), self.largest, number)

    # Overridden by subclasses --------------------------------------------------------------------

    def _counts(self, rollout: Rollout) -> bool:
        """Return whether the completion's tokens are trained."""
        return rollout.reward is not None

    def _work_out(self) -> None:
        """Compute advantages, before the first step of a round."""

    def _batches(self, first: int, end: int) -> list[BatchT]:
        """The round's micro-batches `first` to `end`."""
        raise NotImplementedError

    def largest(self) -> BatchT:
        """The largest micro-batch, without contents."""
        raise NotImplementedError

    def _full_prompt(self, number: int) -> Document:
        """The longest prompt, full of what kinds of columns add, without labels. `number` tells prompts apart."""
        prompt = full_document(len(self._prompts[0].ids), self.kinds, number)
        return replace(prompt, trained=np.zeros_like(prompt.trained))

    # Metrics -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Metrics of the current round."""
        if not self._rollouts:
            return {}
        found = round_metrics(self._rollouts, self._cfg.generation.num_answers)
        if self._sampling_seconds is not None:
            found["sampling_seconds"], self._sampling_seconds = self._sampling_seconds, None
        return found

    def shown(self, count: int) -> list[dict[str, Any]]:
        """A few completions of the round, from as many prompts as possible, for samples.jsonl."""
        step = max(1, len(self._rollouts) // count)
        columns = dict.fromkeys(column for rollout in self._rollouts for column in rollout.extras)
        return [one.shown(self._prompts[one.prompt].asked, columns) for one in self._rollouts[::step][:count]]

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the prompts and the current round, as plain JSON values."""
        return {
            "place": self._place,
            "round": self._round,
            "step": None if self.used_up else self._step,
            "answers": [] if self.used_up else [dict(vars(rollout)) for rollout in self._rollouts],
            "ahead": [] if self._ahead is None else [dict(vars(completion)) for completion in self._ahead()],
            **self._sizes(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at `state`. Raises ValueError if the size of rounds or the prompts changed."""
        for name, here in self._sizes().items():
            if state.get(name) != here:
                change = "changed" if name == "data" else f"was {state.get(name)} and is now {here}"
                raise ValueError(
                    f"cannot resume: {name.replace('_', ' ')} {change}, so the run's position in the prompts is "
                    "unknown. Restore the old value, or start a new run from the checkpoint's weights."
                )
        self._place, self._round = state["place"], state["round"]
        self._step = self._steps if state["step"] is None else state["step"]
        self._rollouts = [Rollout(**fields) for fields in state["answers"]]
        ahead = [(Episode if "turns" in one else Completion)(**one) for one in state.get("ahead") or ()]
        self._ahead = (lambda: ahead) if ahead else None

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


class Rollouts(Rounds[PolicyBatch]):
    """Completions compared with the others of the same prompt.

    Raises ValueError as `Rounds` does, for a single completion per prompt, and if the sampler's probabilities differ
    from the model's without `loss.correction`.
    """

    # Log-probabilities before the first update ------------------------------------------------------------------------

    @property
    def looks_back(self) -> bool:
        """Whether the trainer's log-probabilities are needed before the first update: for several updates, for the
        entropies of all tokens, or for a divergence in the rewards."""
        loss = self._cfg.needed(PolicyLossConfig)
        return self._steps > 1 or loss.entropy_share < 1 or loss.kl_in_reward

    def to_remember(self) -> list[PolicyBatch]:
        """All micro-batches of the sampled round, as in the first pass; none if no log-probabilities are needed
        beforehand."""
        if not self.looks_back:
            return []
        # All are alike, and a plan counts one of them.
        make = partial(self._batches, 0, self.num_completions // self._cfg.batch_size)
        return self._observer.round_batches(make, self.largest, 1)

    def remember(
        self, batch: PolicyBatch, now: AnswerTokens, reference: Tensor | None, values: Tensor | None = None
    ) -> None:
        """Store the trainer's log-probabilities and entropies for a batch of the round.

        reference (G, A): the reference's log-probabilities, if the divergence is part of the reward; values (G, A): the
        value model's predictions, with a value model.
        """
        if not self._rollouts:  # in a plan, whose batches are of no round
            return
        values_of = {"old": now.log_probs.tolist(), "entropies": now.entropies.tolist()}
        values_of |= {} if reference is None else {"divergences": (now.log_probs - reference).tolist()}
        values_of |= {} if values is None else {"values": values.tolist()}
        for row, i in enumerate(batch.answers):
            length = len(self._rollouts[i].ids)
            self._token_values[i] = {name: rows[row][:length] for name, rows in values_of.items()}

    def _take_token_values(self) -> list[list[float]]:
        """Merge the stored token values of all ranks into the completions. Return the entropies of their tokens."""
        for values in self._ranks.on_every_rank(lambda: self._token_values):
            self._token_values = self._token_values | values
        stored = [self._token_values.pop(i) for i in range(len(self._rollouts))]
        entropies = [values.pop("entropies") for values in stored]
        self._rollouts = [replace(one, **values) for one, values in zip(self._rollouts, stored, strict=True)]
        return entropies

    def _counts(self, rollout: Rollout) -> bool:
        loss = self._cfg.group(PPOLossConfig) or self._cfg.needed(PolicyLossConfig)
        return rollout.reward is not None and (rollout.ended or not loss.mask_truncated)

    def _work_out(self) -> None:
        loss, size = self._cfg.needed(PolicyLossConfig), self._cfg.generation.num_answers
        if self.looks_back:
            entropies = self._take_token_values()
            if loss.entropy_share < 1:
                self._mark_uncertain(entropies, loss.entropy_share)
        worth = [
            math.nan if one.reward is None else one.reward - loss.kl_weight * (one.divergence or 0.0)
            for one in self._rollouts
        ]
        # In float64: if only a divergence differs, float32 would round it to 1e-7 of the reward that it is added to.
        exact = torch.tensor(worth, dtype=torch.float64).view(-1, size)
        above = advantages(exact, loss.advantage_of_loss).flatten().tolist()
        for rollout, value in zip(self._rollouts, above, strict=True):
            rollout.advantages = [value]

    def _mark_uncertain(self, entropies: list[list[float]], share: float) -> None:
        """Keep the policy loss of this share of a round's tokens, those with the highest entropy.

        Denominators and the divergence from the reference stay those of all tokens. Wang et al. 2025, arXiv:2506.01939.
        """
        counted = [e for own, one in zip(entropies, self._rollouts, strict=True) for e in compress(own, one.counts)]
        threshold = float(np.quantile(counted or [0.0], 1 - share))  # a checkpoint takes no numpy bool
        for rollout, of_tokens in zip(self._rollouts, entropies, strict=True):
            rollout.uncertain = [entropy >= threshold for entropy in of_tokens]

    # Batches ------------------------------------------------------------------------------------------------------

    def _batches(self, first: int, end: int) -> list[PolicyBatch]:
        return [self._batch(i * self._cfg.batch_size) for i in range(first, end)]

    def _batch(self, first: int) -> PolicyBatch:
        rollouts = self._rollouts[first : first + self._cfg.batch_size]
        return self._policy_batch(rollouts, list(map(self._asked_of, rollouts)), first)

    def _policy_batch(self, rollouts: Sequence[Rollout], prompts: Sequence[Document], first: int) -> PolicyBatch:
        """The batch of the completions numbered from `first` on."""
        group, documents = self._cfg.generation.num_answers, documents_of(rollouts, prompts)
        shares = [
            i > 0 and (first + i) % group > 0 and one.asked == rollouts[i - 1].asked for i, one in enumerate(rollouts)
        ]
        shared = [len(prompt) * shares[i] for i, prompt in enumerate(prompts)]
        batch = batch_of(
            documents,
            SampledCompletions(),
            kind="flat" if self._shares_prompts else "padded",
            row_tokens=max(map(len, documents)) + PADDED_TO_MULTIPLE_OF,
            pad_id=self._pad_id,
            shared=np.array(shared) if self._shares_prompts else None,
        )
        assert isinstance(batch, PolicyBatch)
        return replace(batch, answers=range(first, first + len(rollouts)))

    def largest(self) -> PolicyBatch:
        size, group, new = self._cfg.batch_size, self._cfg.generation.num_answers, self._cfg.completion_tokens
        # The micro-batch with completions of the most groups has the most prompts.
        first = max(
            range(0, self.num_completions, size), key=lambda first: (first + size - 1) // group - first // group
        )
        zeros = [0.0] * new
        predicted = zeros if self._has_values else []
        rollout = Rollout(
            [0] * new,
            zeros,
            counts=[True] * new,
            advantages=zeros,
            old=zeros if self.looks_back else [],
            values=predicted,
            returns=predicted,
        )
        return self._policy_batch(
            [rollout] * size, [self._full_prompt((first + i) // group) for i in range(size)], first
        )


class ValuedRollouts(Rollouts):
    """Completions with generalized advantages from a value model, normalized over a round to mean 0 and deviation 1.
    The reward is at the last token, and the divergence's cost at each token."""

    _has_values = True

    @property
    def looks_back(self) -> bool:
        return True

    def _work_out(self) -> None:
        loss = self._cfg.needed(PPOLossConfig)
        self._take_token_values()
        for rollout in self._rollouts:
            rollout.estimate_advantages(loss.kl_weight, loss.gamma, loss.gae_lambda)
        places = [(one, i) for one in self._rollouts for i, counts in enumerate(one.counts) if counts]
        if places:
            even = whitened(torch.tensor([one.advantages[i] for one, i in places])).tolist()
            for (one, i), value in zip(places, even, strict=True):
                one.advantages[i] = value


class PairRollouts(Rounds[PairBatch]):
    """Pairs of the best and the worst completion of a prompt; none if their rewards are equal."""

    unit = "pairs"

    @property
    def completions_in_a_row(self) -> int:
        return self._cfg.generation.num_answers

    def _batches(self, first: int, end: int) -> list[PairBatch]:
        size, rows = self._cfg.generation.num_answers, self._cfg.batch_size
        pairs = []
        for start in range(first * rows * size, end * rows * size, size):
            judged = [one for one in self._rollouts[start : start + size] if self._counts(one) and one.num_sampled]
            best = max(judged, key=lambda one: one.reward or 0.0, default=None)
            worst = min(judged, key=lambda one: one.reward or 0.0, default=None)
            if best is not None and worst is not None and best.reward != worst.reward:
                pairs.append((best, worst))
        if not pairs:  # the step still runs, without targets
            one = self._rollouts[first * rows * size]
            return [self._batch([(one, one)]).without_targets()]
        return [self._batch(pairs[i : i + rows]) for i in range(0, len(pairs), rows)]

    def _batch(self, pairs: Sequence[tuple[Rollout, Rollout]]) -> PairBatch:
        rollouts = [one for pair in pairs for one in pair]
        return self._pair_batch(rollouts, list(map(self._asked_of, rollouts)))

    def _pair_batch(self, rollouts: Sequence[Rollout], prompts: Sequence[Document]) -> PairBatch:
        """rollouts: the chosen completion of each pair before the rejected one, which shares its prompt."""
        documents = [one.document(prompt) for one, prompt in zip(rollouts, prompts, strict=True)]
        shares = [i % 2 == 1 and one.asked == rollouts[i - 1].asked for i, one in enumerate(rollouts)]
        shared = [len(prompt) * shares[i] for i, prompt in enumerate(prompts)]
        batch = batch_of(
            documents,
            PreferencePairs(),
            sides=2,
            kind="padded",
            row_tokens=2 * max(map(len, documents)) + PADDED_TO_MULTIPLE_OF,
            pad_id=self._pad_id,
            shared=np.array(shared) if self._shares_prompts else None,
        )
        assert isinstance(batch, PairBatch)
        return batch

    def largest(self) -> PairBatch:
        rollout = Rollout([0] * self._cfg.completion_tokens)
        size = 2 * self._cfg.batch_size
        return self._pair_batch([rollout] * size, [self._full_prompt(i // 2) for i in range(size)])
