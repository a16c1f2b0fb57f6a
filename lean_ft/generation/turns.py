"""Completions in progress, and rows that wait between two turns.

A turn ends with a stop id or a stop text, or at a limit. If the caller replies to turns, a row whose turn has ended
leaves the batch with a copy of its part of the cache, which later steps of the batch cannot change. When its reply is
there, the row joins the batch again, and only the tokens that the copy lacks are computed: the reply, and the turn's
last token if no step has computed it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lean_ft.data.columns import Document
from lean_ft.generation.choosing import RowKey, Sampling
from lean_ft.models import KVCache

Decode = Callable[[Sequence[int]], str]


@dataclass
class Completion:
    """A sampled completion."""

    ids: list[int] = field(default_factory=list)
    """Token ids, including the token that ended the completion, and given tokens."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each token in the sampled distribution; 0 for given tokens."""
    ended: bool = False
    """True if a stop id or a stop text ended it, False if it reached a limit."""
    experts: str = ""
    """With `records_experts`: the experts of all tokens except the last, from the first token of the prompt on, as
    base64 text of (tokens, choices) int16 (`KVCache.experts`)."""
    sampled: list[bool] = field(default_factory=list)
    """Whether each token was sampled, rather than given in a reply. Empty: all were sampled."""


class Replies(Protocol):
    """Answers the turns of completions with given tokens, such as the results of tools. `place`: the index of the
    prompt."""

    def ended(self, place: int, completion: Completion) -> None:
        """A turn has ended: start to work on its reply, in other threads.

        If `completion.ended` is False, the completion has reached a limit and waits for no reply. Do not change
        `completion`, and copy what you need after `ready` has returned its reply.
        """
        ...

    def ready(self, wait: bool) -> dict[int, list[int] | None]:
        """Return the replies that are ready, by place: at least one token id each, or None to end the completion.

        Each reply is returned once. wait: no row is left to compute, so wait until a reply is ready.
        """
        ...


@dataclass
class RunningRow:
    """A completion in progress."""

    place: int  # in the order of the prompts
    prompt: Document
    key: RowKey
    completion: Completion
    longest: float = math.inf  # tokens of the prompt and the completion
    num_given: int = 0

    @property
    def text(self) -> Document:
        return self.prompt.continued(self.completion.ids) if self.completion.ids else self.prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion.ids)

    def after(self, num_tokens: int) -> Document:
        """The text after the first tokens, which include the prompt."""
        return Document.of(self.completion.ids[num_tokens - len(self.prompt) :])

    def room(self, sampling: Sampling) -> float:
        """The number of tokens until a limit."""
        num_sampled = len(self.completion.ids) - self.num_given
        return min(sampling.max_new_tokens - num_sampled, self.longest - self.length)

    def continues(self, sampling: Sampling, ahead: int = 0) -> bool:
        """Whether the row needs a token after `ahead` more."""
        return self.room(sampling) > ahead and not self.completion.ended

    def take(self, token: float, log_prob: float, sampling: Sampling, decode: Decode | None) -> None:
        """Append a sampled token. Raises FloatingPointError if its log-probability is not finite."""
        if log_prob != log_prob or log_prob == float("-inf"):
            raise FloatingPointError(
                f"the logits after token {self.length} are not finite: the weights are not finite, or float16 "
                "overflows. Check the weights, or set dtype to bfloat16 or float32."
            )
        completion, token = self.completion, int(token)
        completion.ids.append(token)
        completion.log_probs.append(log_prob)
        if completion.sampled:
            completion.sampled.append(True)
        completion.ended = token in sampling.stop_ids
        if sampling.stop_texts and not completion.ended:
            assert decode is not None
            # A token has at least one byte, so the last `longest` tokens contain any stop text that ends here.
            longest = max(len(text.encode()) for text in sampling.stop_texts)
            newest = completion.sampled[: -longest - 5 : -1]  # the latest first
            tail = decode(completion.ids[-(newest.index(False) if False in newest else longest + 4) :])
            completion.ended = any(text in tail for text in sampling.stop_texts)

    def give(self, ids: Sequence[int], sampling: Sampling, max_given_tokens: int) -> bool:
        """Append given tokens. Return whether the row continues; if not, it has reached a limit without them."""
        if not ids:
            raise ValueError(f"the reply to place {self.place} is empty. Give at least one token, or None to end it.")
        completion, num_given = self.completion, self.num_given + len(ids)
        completion.ended = False
        if num_given > max_given_tokens or not self.continues(sampling) or self.length + len(ids) >= self.longest:
            return False
        completion.sampled = (completion.sampled or [True] * len(completion.ids)) + [False] * len(ids)
        completion.ids += ids
        completion.log_probs += [0.0] * len(ids)
        self.num_given = num_given
        return True


class Waiting:
    """The rows that wait for a reply, each with its part of the cache."""

    def __init__(self, replies: Replies | None, sampling: Sampling, max_given_tokens: int = 0) -> None:
        """replies: None if rows have a single turn."""
        self.has_replies, self.max_given_tokens = replies is not None, max_given_tokens
        self._replies, self._sampling = replies, sampling
        self._rows: dict[int, tuple[RunningRow, KVCache]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: RunningRow, kept: KVCache | None) -> None:
        """Add a row whose turn has ended; without a part of the cache, it has reached a limit and does not wait."""
        assert self._replies is not None
        if kept is not None:
            self._rows[row.place] = row, kept
        self._replies.ended(row.place, row.completion)

    def ready(self, wait: bool) -> list[tuple[RunningRow, KVCache]]:
        """Return the rows that continue after their replies, those with the fewest tokens to compute first."""
        if self._replies is None or not self._rows:
            return []
        replies = self._replies.ready(wait)
        found = [(given, *self._rows.pop(place)) for place, given in replies.items()]
        limits = self._sampling, self.max_given_tokens
        rows = [(row, kept) for given, row, kept in found if given is not None and row.give(given, *limits)]
        return sorted(rows, key=lambda one: (one[0].length - one[1].filled, one[0].place))


def divided(
    rows: list[tuple[RunningRow, KVCache]], capacity: int, positions: int
) -> Iterator[list[tuple[RunningRow, KVCache]]]:
    """Divide rows in the order of `Waiting.ready`, so that the new tokens of each group fit, padded to the longest,
    into the cache and into `positions` in all. A single row always fits."""
    group: list[tuple[RunningRow, KVCache]] = []
    for row, kept in rows:
        num_new, longest = row.length - kept.filled, max(one.filled for _, one in [*group, (row, kept)])
        if group and (longest + num_new > capacity or (len(group) + 1) * num_new > positions):
            yield group
            group = []
        group.append((row, kept))
    if group:
        yield group
