"""Generates text: one pass over the prompts fills the key-value cache, then one pass a token.

Prompts of different lengths go through as one batch. They are padded on the right, where causality hides the padding,
and each row then goes on from its own end; so a row's tokens are those it would get alone.

Shapes: B batch, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lean_ft.models.cache import KVCache
from lean_ft.models.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Returns the tokens that follow each prompt: at most `max_new_tokens`, up to and with the first of `stop_ids`.

    prompt_ids: lists of token ids, of any lengths, without padding; or a tensor (B, T) int64. Temperature 0 takes the
    likeliest token; above it, tokens are drawn from the softmax of logits / temperature, among the `top_k` likeliest
    and then among the fewest whose probabilities reach `top_p`. Raises ValueError for an empty prompt or settings out
    of range.
    """
    generated: list[list[int]] = [[] for _ in prompt_ids]
    steps = generate_steps(model, prompt_ids, max_new_tokens, temperature, top_k, top_p, stop_ids, generator)
    for tokens in steps:
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
    """As `generate`, but yields each step as it is computed: a token for each row, None for rows that have ended."""
    prompts = [[int(token) for token in prompt] for prompt in prompt_ids]
    _check(prompts, max_new_tokens, temperature, top_k, top_p)
    if not prompts or max_new_tokens == 0:
        return
    device = model.output_weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # (B, T)

    cache = model.new_cache(len(prompts), longest + max_new_tokens)
    hidden = _forward(model, padded, cache)
    cache.truncate(lengths)
    hidden = hidden[torch.arange(len(prompts), device=device), lengths - 1]  # (B, D): logits only where they are used

    running = [True] * len(prompts)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model.logits(hidden)  # (B, V)
        tokens = _next_tokens(logits, temperature, top_k, top_p, generator)  # (B,)
        step = [token if goes_on else None for token, goes_on in zip(tokens.tolist(), running, strict=True)]
        yield step
        running = [token is not None and token not in stop_ids for token in step]
        if not any(running):
            return
        hidden = _forward(model, tokens[:, None], cache)[:, 0]


# The cache grows with every token, so compiled layers would be compiled anew for each: they run as written here.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def _forward(model: Decoder, ids: Tensor, cache: KVCache) -> Tensor:
    return model(ids, cache=cache, return_hidden=True)


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
