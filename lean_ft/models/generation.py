"""Generates text: one pass over the prompts fills the key-value cache, then one pass a token.

Prompts of different lengths go through as one batch. They are padded on the right, where causality hides the padding,
and each row then goes on from its own end; so a row's tokens are those it would get alone.

Where rotary frequencies depend on the length of the text, all that came before is read again once they change: with
`longrope` when a text outgrows the original context, with `dynamic` at every token from there on.

Shapes: B batch, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lean_ft.context import context_length
from lean_ft.log import say
from lean_ft.models.cache import KVCache
from lean_ft.models.decoder import Decoder


def generate(
    model: Decoder, prompt_ids: Tensor | Sequence[Sequence[int]], max_new_tokens: int, **sampling: Any
) -> list[list[int]]:
    """Returns the tokens that follow each prompt, all at once; settings and errors are those of `generate_steps`."""
    generated: list[list[int]] = [[] for _ in prompt_ids]
    for tokens in generate_steps(model, prompt_ids, max_new_tokens, **sampling):
        for row, token in zip(generated, tokens, strict=True):
            if token is not None:
                row.append(token)
    return generated


def generate_steps(
    model: Decoder,
    prompt_ids: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[list[int | None]]:
    """Yields each step as it is computed: a token that follows each prompt, None for rows that have ended.

    A row ends after `max_new_tokens`, or with the first of `stop_ids`. prompt_ids: lists of token ids, of any lengths,
    without padding; or a tensor (B, T) int64. Temperature 0 takes the likeliest token; above it, tokens are drawn from
    the softmax of logits / temperature, among the `top_k` likeliest and then among the fewest whose probabilities reach
    `top_p`. Raises ValueError for an empty prompt or settings out of range.
    """
    prompts = [[int(token) for token in prompt] for prompt in prompt_ids]
    _check(prompts, max_new_tokens, temperature, top_k, top_p)
    if not prompts or max_new_tokens == 0:
        return
    texts = [list(prompt) for prompt in prompts]
    longest = max(map(len, prompts))
    capacity, context = longest + max_new_tokens, context_length(model.hf_config)
    beyond = max(0, context - longest + 1) + 1 if context is not None else None  # the step that reads too long a text
    cache, hidden = _read(model, texts, capacity)
    running = [True] * len(prompts)
    for count in range(1, max_new_tokens + 1):
        if count == beyond:
            _say_too_long(context)
        with torch.no_grad():
            logits = model.logits(hidden)  # (B, V)
        tokens = _next_tokens(logits, temperature, top_k, top_p, generator)  # (B,)
        new = tokens.tolist()
        step = [token if goes_on else None for token, goes_on in zip(new, running, strict=True)]
        yield step
        running = [token is not None and token not in stop_ids for token in step]
        if count == max_new_tokens or not any(running):
            return
        for text, token in zip(texts, new, strict=True):
            text.append(token)
        if all(rope.same_frequencies(len(text) - 1, len(text)) for rope in model.rotary for text in texts):
            hidden = _forward(model, tokens[:, None], cache)[:, 0]
        else:
            cache, hidden = _read(model, texts, capacity)


@cache
def _say_too_long(context: int | None) -> None:  # once, however many texts are
    say("WARNING", f"a text is longer than the model's context of {context:,} tokens: it was not made for what follows")


def _read(model: Decoder, texts: list[list[int]], capacity: int) -> tuple[KVCache, Tensor]:
    """Fills a new cache with texts of any lengths; returns it and the hidden state (B, D) of each one's last token."""
    device = model.output_weight.device
    lengths = torch.tensor([len(text) for text in texts], device=device)
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)  # (B, T)
    cache = model.new_cache(len(texts), capacity)
    hidden = _forward(model, padded, cache, lengths)
    return cache, hidden[torch.arange(len(texts), device=device), lengths - 1]


# The cache grows with every token, so compiled layers would be compiled anew for each: they run as written here.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def _forward(model: Decoder, ids: Tensor, cache: KVCache, lengths: Tensor | None = None) -> Tensor:
    return model(ids, cache=cache, return_hidden=True, lengths=lengths)


def _next_tokens(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, indices = probabilities.sort(descending=True)
        # A token is out once those before it reach top_p, so the likeliest always stays.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, indices, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _check(
    prompts: list[list[int]], max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; expected at least one token, such as the tokenizer's bos_id.")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; expected 0 or more.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; expected 0 (the likeliest token) or more.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; expected 1 or more, or None.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; expected a number above 0 and at most 1, or None.")
