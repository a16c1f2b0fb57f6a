"""Generates text: one pass over the prompts fills the key-value cache, then one pass a token.

Prompts of different lengths go through as one batch. They are padded on the right, where causality hides the padding,
and each row then goes on from its own end; so a row's tokens are those it would get alone.

Shapes: B batch, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lean_ft.models.decoder import Decoder


# The cache grows with every token, so compiled layers would be compiled anew for each: they run as written here.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
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
    prompts = [[int(token) for token in prompt] for prompt in prompt_ids]
    _check(prompts, max_new_tokens, temperature, top_k, top_p)
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    device = model.output_weight.device
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # (B, T)

    cache = model.new_cache(len(prompts), longest + max_new_tokens)
    hidden = model(padded, cache=cache, return_hidden=True)
    ends = torch.tensor(lengths, device=device)
    cache.truncate(ends)
    hidden = hidden[torch.arange(len(prompts), device=device), ends - 1]  # (B, D): logits only where they are used

    generated: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    while True:
        logits = torch.nn.functional.linear(hidden, model.output_weight)  # (B, V)
        tokens = _next_tokens(logits, temperature, top_k, top_p, generator)  # (B,)
        for row, token in enumerate(tokens.tolist()):
            if row in running:
                generated[row].append(token)
                if token in stop_ids or len(generated[row]) == max_new_tokens:
                    running.remove(row)
        if not running:
            return generated
        hidden = model(tokens[:, None], cache=cache, return_hidden=True)[:, 0]


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
