"""Reference implementation of the random draws, for one token of one row at a time."""

import hashlib
import math
import struct

import torch
from torch import Tensor


def waiting_time(seed: int, prompt: list[int], sample: int, position: int, token: int) -> float:
    digest = hashlib.blake2b(struct.pack(f"<qq{len(prompt)}q", seed, sample, *prompt), digest_size=8)
    digest.update(struct.pack("<q", position))
    start, step = struct.unpack("<2I", digest.digest())
    x = (token * (step | 1) + start) % 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    x ^= x >> 16
    return -math.log1p(-((x % 2**31) + 0.5) / 2**31)


def draw(logits: Tensor, temperature: float, seed: int, prompt: list[int], sample: int, position: int) -> int:
    """Return the token with the smallest waiting time divided by probability; logits (V,)."""
    probabilities = (logits.double() / temperature).softmax(-1).tolist()
    times = [waiting_time(seed, prompt, sample, position, token) for token in range(len(probabilities))]
    return min(range(len(times)), key=lambda token: times[token] / max(probabilities[token], 1e-300))


def samples(logits_of, prompt: list[int], count: int, temperature: float, seed: int, sample: int) -> list[int]:
    """Return `count` tokens after a prompt, each from a pass over all preceding tokens; temperature 0 is greedy.

    logits_of: a function from ids (1, T) to logits (1, T, V)."""
    ids = torch.tensor([prompt])
    for position in range(count):
        logits = logits_of(ids)[0, -1]
        token = int(logits.argmax()) if temperature == 0 else draw(logits, temperature, seed, prompt, sample, position)
        ids = torch.cat((ids, torch.tensor([[token]])), 1)
    return ids[0, len(prompt) :].tolist()
