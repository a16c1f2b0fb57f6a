"""Plan rounds of sampled completions, which have no texts to score."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lean_ft.data import Prompt
from lean_ft.data.columns import Document
from lean_ft.data.largest import full_document
from lean_ft.generation.choosing import Sampling, choose
from lean_ft.generation.decoding import PROMPT_TOKENS, forward_as_written, padded_inputs
from lean_ft.models import Decoder, FewRows
from lean_ft.online.rollouts import Rounds
from lean_ft.online.sampler import Sampler
from lean_ft.settings import OnlineConfig


def rehearse_round(rounds: Rounds, cfg: OnlineConfig, answer: Callable[[list[Prompt], int], Any]) -> None:
    """Sample for as many different prompts as a real round, up to the first turns of episodes."""
    ids_of_prompts = ([i] * cfg.data.max_prompt_length for i in range(rounds.num_prompts))
    prompts = (Prompt(ids, "", {}, "", replace(Document.of(ids), kinds=rounds.kinds)) for ids in ids_of_prompts)
    first_turns = answer.first_turns if isinstance(answer, Sampler) else answer
    first_turns([prompt for prompt in prompts for _ in range(cfg.generation.num_answers)], 0)


def rehearse_generation(
    model: Decoder, prompts: Sequence[Document], capacity: int, packed_bytes: float, copies: int, *, is_cpu: bool
) -> None:
    """Run the cache, the prompts' pass, and the pass of the last token. Prompts are full of what their kinds of columns
    add.

    copies: of the cache, in which case rows that wait take the second.
    """
    packed = FewRows(model, packed_bytes, pack=torch.clone) if is_cpu else None
    longest = max(map(len, prompts))
    caches = model.new_cache(len(prompts), capacity)
    texts = min(len({prompt.identity for prompt in prompts}), max(1, PROMPT_TOKENS // longest))
    inputs = padded_inputs([full_document(longest, prompts[0].kinds, i) for i in range(texts)], model.device)
    forward_as_written(model, cache=caches.part(0, texts), **inputs)
    caches.filled = capacity - 1
    waiting = [model.new_cache(len(prompts), capacity) for _ in range(copies - 1)]
    hidden = forward_as_written(model, torch.zeros(len(prompts), 1, dtype=torch.int64), caches)[:, 0]
    choose(model.logits(hidden), torch.zeros(len(prompts), 2, dtype=torch.int32), Sampling(1, temperature=0.5))
    del packed, waiting
