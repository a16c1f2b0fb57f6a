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
from lean_ft.online.rollouts import Rollouts, Rounds
from lean_ft.settings import OnlineConfig


def plan_rounds(rounds: Rounds, cfg: OnlineConfig, take: Callable[[int], list[Any]]) -> None:
    """Let `rounds` sample as many different prompts as a real round, and train on batches of `take(number)`."""

    def sample(answer: Callable[[list[Prompt], int], Any], score: Any) -> None:
        if cfg.generation.engine != "own":  # on its own devices
            return
        asked = ([i] * cfg.data.max_prompt_length for i in range(rounds.num_prompts))
        prompts = (Prompt(ids, "", {}, "", replace(Document.of(ids), kinds=rounds.kinds)) for ids in asked)
        getattr(answer, "first_turns", answer)(
            [prompt for prompt in prompts for _ in range(cfg.generation.num_answers)], 0
        )

    replaced: dict[str, Any] = {
        "sample": sample,
        "begin": lambda: None,
        "take": lambda: take(cfg.gradient_accumulation_steps),
        "to_remember": lambda: take(1) if isinstance(rounds, Rollouts) and rounds.looks_back else [],
        "remember": lambda *_: None,
        "metrics": dict,
    }
    vars(rounds).update(replaced)


def rehearse_generation(
    model: Decoder, prompts: Sequence[Document], capacity: int, packed_bytes: float, copies: int, *, is_cpu: bool
) -> None:
    """Run the cache, the prompts' pass, and the pass of the last token. Prompts are full of what their kinds of columns add, such as images.

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
