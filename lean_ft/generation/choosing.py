"""Chooses the next token of each row: the likeliest, or one that is drawn.

A draw is a function of (seed, prompt, sample, position) and of the logits, and of nothing else: neither the batch that a row
is in, nor what was drawn before, nor a generator's state. Each token has an exponentially distributed waiting time, computed
from those four and the token's number by a hash; the token with the least waiting time over its probability is taken, which
draws from the distribution exactly (the Gumbel-max trick, written without logarithms of probabilities). So tokens that
have no probability, by top-k and the like, are never taken, and a small change of the logits seldom changes a token, as batches
of another size round them otherwise.

Sources: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030; the mixer of 32 bits is lowbias32 (Wellons, hash-prospector); min_p:
Nguyen et al. 2024, arXiv:2407.01082.

Shapes: B rows, V vocabulary.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 18  # float32 logits at a time on a CPU: the passes over them stay in its cache
ROW_KEY_BYTES = 8


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and what ends an answer; `temperature` 0 takes the likeliest token and reads nothing below it.

    Raises ValueError for settings out of range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None  # draw among so many likeliest tokens
    top_p: float | None = None  # among the fewest of these whose probabilities reach this share
    min_p: float | None = None  # among those at least so likely as this share of the likeliest's probability
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; expected 0 or more.")
        if self.temperature != 0 and not 1e-4 <= self.temperature < math.inf:  # logits over it have to fit into float32
            raise ValueError(f"temperature is {self.temperature}; expected 0 (the likeliest token), or 0.0001 or more.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected 1 or more, or None.")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name} is {share}; expected a number above 0 and at most 1, or None.")
        if "" in self.stop_texts:
            raise ValueError("stop_texts has an empty text, which every answer begins with; leave it out.")

    @property
    def narrows(self) -> bool:
        """Whether some tokens can never be drawn, so that probabilities are not the model's own."""
        shares = (self.top_p or 1) < 1 or self.min_p is not None
        return self.temperature > 0 and (self.top_k is not None or shares)


class RowKey:
    """What a row's draws depend on beside their position: the seed, the prompt's tokens, and which sample of it this is."""

    def __init__(self, seed: int, prompt: Sequence[int], sample: int) -> None:
        ids = struct.pack(f"<qq{len(prompt)}q", seed, sample, *prompt)
        self._hash = hashlib.blake2b(ids, digest_size=ROW_KEY_BYTES)

    def at(self, position: int) -> tuple[int, int]:
        """Two numbers of 32 bits, for the draw that is `position` tokens behind the prompt."""
        mixed = self._hash.copy()
        mixed.update(struct.pack("<q", position))
        return struct.unpack("<2i", mixed.digest())


def choose(logits: Tensor, keys: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns a token for each row, (B,) int64, and its log-probability, (B,) float32, as it was drawn: with the temperature
    in it, and of the tokens that top-k and the like leave. That of the likeliest token (temperature 0) is the model's own.

    logits (B, V); keys (B, 2) int32 are `RowKey.at` of each row, None for temperature 0.
    """
    rows = max(1, CPU_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = [
        _choose(logits[start : start + rows], None if keys is None else keys[start : start + rows], sampling)
        for start in range(0, len(logits), rows)
    ]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _choose(logits: Tensor, keys: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    values = logits.float() if sampling.temperature in (0, 1) else logits.float() / sampling.temperature
    highest, chosen = values.max(1, keepdim=True)  # on a CPU several times faster than argmax
    values = values - highest
    weights = values.exp()  # over the likeliest token's
    if keys is not None:
        _leave_out(weights, sampling)
        chosen = weights.div(waiting_times(keys, weights.shape[1])).max(1, keepdim=True).indices
    log_probs = values.gather(1, chosen) - weights.sum(1, keepdim=True).log()
    return chosen[:, 0], log_probs[:, 0]


def _leave_out(weights: Tensor, sampling: Sampling) -> None:
    """Sets to zero, of weights (B, V) over the largest, those that are not drawn from."""
    if sampling.top_k is not None and sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k).values[:, -1:]
        weights.masked_fill_(weights < least, 0.0)
    if sampling.min_p is not None:
        weights.masked_fill_(weights < sampling.min_p, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, indices = weights.sort(descending=True)
        share = ordered / ordered.sum(1, keepdim=True)
        # A token is out once those before it reach top_p, so the likeliest always stays.
        is_out = share.cumsum(1) - share >= sampling.top_p
        weights.scatter_(1, indices, ordered.masked_fill_(is_out, 0.0))


def waiting_times(keys: Tensor, num_tokens: int) -> Tensor:
    """Exponentially distributed numbers (B, num_tokens) float32, a function of keys (B, 2) int32 and the token alone.

    The same on every device but for the rounding of the logarithm.
    """
    # Arithmetic of 32 bits that wraps: a step of its own through the numbers for each row, then every bit mixed into every one.
    mixed = torch.arange(num_tokens, dtype=torch.int32, device=keys.device) * (keys[:, 1:] | 1)
    mixed += keys[:, :1]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, None)):
        mixed ^= (mixed >> shift).bitwise_and_(2 ** (32 - shift) - 1)
        if factor is not None:
            mixed *= factor
    # The least of many decides, so what is near 0 has to be fine: 31 bits, and log1p.
    uniform = mixed.bitwise_and_(2**31 - 1).float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()
