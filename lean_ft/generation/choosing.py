"""Choice of the next token of each row: the likeliest token, or a random draw.

A draw depends only on (seed, prompt, sample, position) and the logits, not on the batch, earlier draws or a generator's
state. A hash of these four and the token id gives each token an exponentially distributed waiting time. The token with
the smallest waiting time divided by probability is chosen, which samples exactly from the distribution (the Gumbel-max
trick without logs of probabilities). Tokens excluded by top-k, top-p or min-p have probability 0 and are never chosen.
A small change of the logits, such as the rounding of another batch size, rarely changes a token.

Sources: Gumbel-max: Maddison et al. 2014, arXiv:1411.0030; 32-bit mixer: lowbias32 (Wellons, hash-prospector); min_p:
Nguyen et al. 2024, arXiv:2407.01082.

Shapes: B rows, V vocabulary.
"""

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 18  # float32 logits processed at a time on a CPU, so that they stay in its cache
ROW_KEY_BYTES = 8


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. With `temperature` 0, the likeliest token is chosen and top_k, top_p, min_p and seed are
    ignored.

    Raises ValueError for settings out of range.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None  # draw from the k likeliest tokens
    top_p: float | None = None  # draw from the fewest likeliest tokens whose total probability reaches top_p
    min_p: float | None = None  # draw from tokens with at least min_p times the highest probability
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; expected 0 or more.")
        if self.temperature != 0 and not 1e-4 <= self.temperature < math.inf:  # logits / temperature must fit float32
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
        """Whether some tokens can never be drawn, so that probabilities differ from the model's."""
        shares = (self.top_p or 1) < 1 or self.min_p is not None
        return self.temperature > 0 and (self.top_k is not None or shares)


class RowKey:
    """Hash of the seed, the prompt's `identity` and the sample number."""

    def __init__(self, seed: int, prompt: bytes, sample: int) -> None:
        words = np.frombuffer(prompt, dtype="<i4").astype("<i8").tobytes()
        self._hash = hashlib.blake2b(struct.pack("<qq", seed, sample) + words, digest_size=ROW_KEY_BYTES)

    def at(self, position: int) -> tuple[int, int]:
        """Return two 32-bit numbers for the draw `position` tokens after the prompt."""
        mixed = self._hash.copy()
        mixed.update(struct.pack("<q", position))
        return struct.unpack("<2i", mixed.digest())


def choose(logits: Tensor, keys: Tensor | None, sampling: Sampling, compile: bool = False) -> tuple[Tensor, Tensor]:
    """Return a token per row, (B,) int64, and its log-probability in the sampled distribution, (B,) float32.

    The sampled distribution includes the temperature, top_k, top_p and min_p; with temperature 0 it is the model's own.

    logits: (B, V); keys: (B, 2) int32, `RowKey.at` of each row, or None for temperature 0. compile: on a GPU, few
    kernels instead of about 40 passes over the logits.
    """
    if compile and logits.is_cuda:
        return _compiled()(logits, keys, sampling)
    rows = max(1, CPU_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = [
        _choose(logits[start : start + rows], None if keys is None else keys[start : start + rows], sampling)
        for start in range(0, len(logits), rows)
    ]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _choose(logits: Tensor, keys: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    values = logits.float() if sampling.temperature in (0, 1) else logits.float() / sampling.temperature
    highest, chosen = values.max(1, keepdim=True)  # several times faster than argmax on a CPU
    values = values - highest
    weights = values.exp()  # probabilities relative to the likeliest token's
    if keys is not None:
        _leave_out(weights, sampling)
        chosen = weights.div(waiting_times(keys, weights.shape[1])).max(1, keepdim=True).indices
    log_probs = values.gather(1, chosen) - weights.sum(1, keepdim=True).log()
    return chosen[:, 0], log_probs[:, 0]


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_choose, dynamic=True)  # imports the compiler, which takes a second


def _leave_out(weights: Tensor, sampling: Sampling) -> None:
    """Set the weights (B, V) of tokens excluded by top_k, min_p and top_p to zero. The largest weight of each row is
    1."""
    if sampling.top_k is not None and sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k).values[:, -1:]
        weights.masked_fill_(weights < least, 0.0)
    if sampling.min_p is not None:
        weights.masked_fill_(weights < sampling.min_p, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, indices = weights.sort(descending=True)
        share = ordered / ordered.sum(1, keepdim=True)
        # A token is excluded if the likelier tokens already reach top_p, so the likeliest token always stays.
        is_out = share.cumsum(1) - share >= sampling.top_p
        weights.scatter_(1, indices, ordered.masked_fill_(is_out, 0.0))


def waiting_times(keys: Tensor, num_tokens: int) -> Tensor:
    """Return exponentially distributed numbers, (B, num_tokens) float32, from keys (B, 2) int32 and token ids only.

    Devices agree up to the rounding of the logarithm.
    """
    # Wrapping 32-bit arithmetic: an arithmetic sequence with its own step for each row, then a hash that mixes all
    # bits.
    mixed = torch.arange(num_tokens, dtype=torch.int32, device=keys.device) * (keys[:, 1:] | 1)
    mixed += keys[:, :1]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, None)):
        mixed ^= (mixed >> shift).bitwise_and_(2 ** (32 - shift) - 1)
        if factor is not None:
            mixed *= factor
    # The smallest number wins, so numbers near 0 need a high resolution: 31 bits and log1p.
    uniform = mixed.bitwise_and_(2**31 - 1).float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()
