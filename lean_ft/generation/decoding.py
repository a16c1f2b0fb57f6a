"""Generates tokens: one pass over the prompts fills the KV cache, then each pass computes one token of every running
row.

Prompts of different lengths are computed together, padded on the right, where the causal mask hides the padding.
Completions of one prompt share its pass. A row that has ended leaves the batch, and another row takes its place in the
cache. Rows that do not fit into the cache's memory wait for the next wave.

A row's tokens depend on its prompt, its sample number and the seed (`choosing`), not on its batch. Another batch size
can round logits differently in the last bits, which changes a token only if two tokens are equal up to that rounding.

If rotary frequencies depend on the length of the text, the text is read again when they change: with `longrope` once,
when a text outgrows the original context; with `dynamic` at every token after that.

Source: our own; a preallocated cache and shared prompts as in vLLM (Kwon et al. 2023, arXiv:2309.06180), without pages.

Shapes: B running rows, T tokens of the longest prompt, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lean_ft.generation.choosing import RowKey, Sampling, choose
from lean_ft.generation.compiled_layers import CompiledLayers
from lean_ft.models import Decoder, FewRows, KVCache
from lean_ft.system.environment import memory_bytes
from lean_ft.system.log import say
from lean_ft.system.shapes_only import stage
from lean_ft.tokenizers.loading import context_length

PROMPT_TOKENS = 8192  # prompt positions per pass
CACHE_SHARE = 4  # the cache takes at most 1 / CACHE_SHARE of the memory that the weights leave
UNKNOWN_MEMORY_ROWS = 64  # per wave, if the memory size is unknown

Decode = Callable[[Sequence[int]], str]


@dataclass
class Sample:
    """A sampled completion."""

    ids: list[int] = field(default_factory=list)
    """Token ids, including the token that ended the completion."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each token in the sampled distribution."""
    ended: bool = False
    """True if a stop id or a stop text ended it, False if it reached the maximum length."""


@dataclass
class _Row:
    """A completion in progress."""

    place: int  # in the order of the prompts
    prompt: Sequence[int]
    key: RowKey
    sample: Sample

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.sample.ids]


def sample(
    model: Decoder,
    prompts: Tensor | Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
    decode: Decode | None = None,
    cache_gib: float | None = None,
    compile: bool = False,
) -> list[Sample]:
    """Return a completion of each prompt, in order.

    Args:
        model: on any device; runs without gradients.
        prompts: lists of token ids of any length, without padding; or a tensor (B, T) int64. Repeat a prompt to get
            several completions; it is read once.
        sampling: sampling settings and stop conditions.
        numbers: sample number of each prompt, so that equal prompts get different completions; None counts equal
            prompts from 0.
        decode: converts ids to text; needed for `sampling.stop_texts`.
        cache_gib: maximum memory of the KV cache, in GiB; rows that do not fit are generated later. None uses a quarter
            of the memory that the weights leave on the device.
        compile: compile the layers for tokens after the prompts (`CompiledLayers`), which rounds differently.

    Raises:
        ValueError: for an empty prompt, for stop texts without `decode`, or if the cache cannot hold one row.
        FloatingPointError: if the model's logits are not finite.
    """
    rows = _rows(prompts, sampling, numbers)
    if sampling.max_new_tokens and rows:
        for wave in _waves(model, rows, sampling, cache_gib):
            for _ in _decode_rows(model, wave, sampling, decode, compile):
                pass
    return [row.sample for row in rows]


def sample_steps(
    model: Decoder,
    prompts: Tensor | Sequence[Sequence[int]],
    sampling: Sampling,
    decode: Decode | None = None,
    *,
    prompt_part: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield each step's tokens, one per prompt, None for rows that have ended. Arguments are those of `sample`.

    All rows run in one wave. With `prompt_part`, a single prompt is read that many tokens at a time, and each part
    except the last is a step without a token.
    """
    rows = _rows(prompts, sampling, None)
    if sampling.max_new_tokens and rows:
        for tokens in _decode_rows(model, rows, sampling, decode, prompt_part=prompt_part):
            yield [tokens.get(row.place) for row in rows]


def _rows(prompts: Tensor | Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int] | None) -> list[_Row]:
    asked = [tuple(int(token) for token in prompt) for prompt in prompts]
    if () in asked:
        raise ValueError(
            f"prompt {asked.index(())} is empty; expected at least one token, such as the tokenizer's bos_id."
        )
    numbers = sample_numbers(asked) if numbers is None else numbers
    keys = [RowKey(sampling.seed, prompt, number) for prompt, number in zip(asked, numbers, strict=True)]
    return [_Row(place, prompt, key, Sample()) for place, (prompt, key) in enumerate(zip(asked, keys, strict=True))]


def sample_numbers(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the sample number of each prompt: the number of equal prompts before it."""
    seen, numbers = Counter[tuple[int, ...]](), list[int]()
    for prompt in map(tuple, prompts):
        numbers.append(seen[prompt])
        seen[prompt] += 1
    return numbers


def longest_first(lengths: Sequence[int], positions: int) -> Iterator[list[int]]:
    """Yield batches of row indices, longest rows first, with at most `positions` positions including padding, or one
    row."""
    waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while waiting:
        count = max(1, positions // lengths[waiting[0]])
        yield waiting[:count]
        waiting = waiting[count:]


def _waves(model: Decoder, rows: list[_Row], sampling: Sampling, cache_gib: float | None) -> Iterator[list[_Row]]:
    """Yield the rows in groups that fit in the cache, sorted so that equal prompts and equal lengths are together."""
    limit = _most_bytes(model, cache_gib)
    waiting = sorted(rows, key=lambda row: (-len(row.prompt), row.prompt))
    while waiting:
        capacity = len(waiting[0].prompt) + sampling.max_new_tokens
        row_bytes = model.cache_bytes(1, capacity)
        room = UNKNOWN_MEMORY_ROWS if limit is None else int(limit // row_bytes)
        if room < 1:
            raise ValueError(
                f"the KV cache of one completion takes {row_bytes / 2**30:.2f} GiB at {capacity} tokens, more than the limit of "
                f"{(limit or 0) / 2**30:.2f} GiB. Raise generation.cache_gib, or lower max_new_tokens."
            )
        yield waiting[:room]
        waiting = waiting[room:]


def _most_bytes(model: Decoder, cache_gib: float | None) -> float | None:
    if cache_gib is not None:
        return cache_gib * 2**30
    # A share of the device's total memory, not of its free memory, so that a resumed run has the same waves.
    total = memory_bytes(model.device)
    if total is None:
        return None
    return (total - sum(parameter.nbytes for parameter in model.parameters())) / CACHE_SHARE


@torch.no_grad()
def _decode_rows(
    model: Decoder,
    rows: list[_Row],
    sampling: Sampling,
    decode: Decode | None,
    compile: bool = False,
    prompt_part: int | None = None,
) -> Iterator[dict[int, int]]:
    """Fill the rows' samples. Yield each step's tokens by the rows' places; empty after a part of a prompt."""
    if sampling.stop_texts and decode is None:
        raise ValueError("stop_texts need `decode`, a function from ids to text. Pass decode=tokenizer.decode.")
    capacity = max(len(row.prompt) for row in rows) + sampling.max_new_tokens
    context = context_length(model.source.config)
    running = sorted(rows, key=lambda row: (-len(row.prompt), row.prompt))
    if stage() is not None:
        rehearse_generation(model, running, capacity)
        return
    caches, hidden = yield from _read(model, running, capacity, prompt_part)
    few_rows, compiled = FewRows(model), CompiledLayers(model) if compile else None
    for position in range(sampling.max_new_tokens):
        if context is not None and max(len(row.prompt) for row in running) + position > context:
            _say_too_long(context)
        keys = None
        if sampling.temperature > 0:
            keys = torch.tensor([row.key.at(position) for row in running], dtype=torch.int32, device=hidden.device)
        chosen, log_probs = choose(model.logits(hidden), keys, sampling)
        # One transfer for both; float64 represents both exactly.
        chosen_now = zip(running, *torch.stack((chosen.double(), log_probs.double())).tolist(), strict=True)
        continues = [_take(row, int(token), log_prob, sampling, decode) for row, token, log_prob in chosen_now]
        yield {row.place: row.sample.ids[-1] for row in running}
        left = [i for i, row_continues in enumerate(continues) if row_continues]
        if not left or position + 1 == sampling.max_new_tokens:
            return
        if len(left) < len(running):
            order = caches.keep(left)
            running = [running[i] for i in order]
            chosen = chosen[order]
        length = [len(row.prompt) + position + 1 for row in running]
        if all(rope.same_frequencies(n - 1, n) for rope in model.rotary for n in length):
            with few_rows, compiled or _as_written():  # the model is restored between two steps
                hidden = model(chosen[:, None], cache=caches, return_hidden=True)[:, 0]
        else:
            caches, hidden = yield from _read(model, running, capacity, prompt_part)


def _take(row: _Row, token: int, log_prob: float, sampling: Sampling, decode: Decode | None) -> bool:
    """Add a token to a row. Return whether the row continues."""
    if log_prob != log_prob or log_prob == float("-inf"):
        raise FloatingPointError(
            f"the logits after token {len(row.prompt) + len(row.sample.ids)} are not finite: the weights are not finite, or "
            "float16 overflows. Check the weights, or set dtype to bfloat16 or float32."
        )
    found = row.sample
    found.ids.append(token)
    found.log_probs.append(log_prob)
    found.ended = token in sampling.stop_ids
    if sampling.stop_texts and not found.ended:
        assert decode is not None
        # A token has at least one byte, so the last `longest` tokens contain any stop text that ends here.
        longest = max(len(text.encode()) for text in sampling.stop_texts)
        tail = decode(found.ids[-longest - 4 :])
        found.ended = any(text in tail for text in sampling.stop_texts)
    return not found.ended


@cache
def _say_too_long(context: int | None) -> None:  # once per process
    say("WARNING", f"a text is longer than the model's context of {context:,} tokens. Expect poor tokens beyond it")


def _read(
    model: Decoder, rows: list[_Row], capacity: int, prompt_part: int | None
) -> Generator[dict[int, int], None, tuple[KVCache, Tensor]]:
    """Fill a new cache with the rows' texts. Return the cache and the hidden state (B, D) of each row's last token.

    Equal neighboring texts are read once. A single text is read `prompt_part` tokens at a time, with a yield between
    parts.
    """
    device = model.device
    groups = [(text, len(list(same))) for text, same in groupby(row.text for row in rows)]
    caches = model.new_cache(len(rows), capacity)
    parts, lasts = [], []
    start = 0
    while start < len(groups):
        longest = max(len(text) for text, _ in groups[start:])
        texts = [text for text, _ in groups[start : start + max(1, PROMPT_TOKENS // longest)]]
        longest, lengths = max(map(len, texts)), torch.tensor([len(text) for text in texts], device=device)
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)  # (B, T)
        part = caches.part(start, start + len(texts))
        if prompt_part is not None and len(texts) == 1:
            # Only if the rotary frequencies do not depend on the length of the text.
            while longest > prompt_part and all(rope.same_frequencies(1, longest) for rope in model.rotary):
                _forward(model, padded[:, :prompt_part], part)
                padded, longest, lengths = padded[:, prompt_part:], longest - prompt_part, lengths - prompt_part
                yield {}
        hidden = _forward(model, padded, part, None if len(set(map(len, texts))) == 1 else lengths)
        lasts.append(hidden[torch.arange(len(texts), device=device), lengths - 1])
        parts.append(part)
        start += len(texts)
    counts = [count for _, count in groups]
    caches.spread(parts, counts)
    return caches, torch.cat(lasts).repeat_interleave(torch.tensor(counts, device=device), 0, output_size=len(rows))


def _as_written() -> Any:
    """Context manager that disables code compiled for training, which would be recompiled for each prompt length."""
    return torch.compiler.set_stance("force_eager")


def _forward(model: Decoder, ids: Tensor, caches: KVCache, lengths: Tensor | None = None) -> Tensor:
    with _as_written():
        return model(ids, cache=caches, return_hidden=True, lengths=lengths)


def rehearse_generation(model: Decoder, rows: list[_Row], capacity: int) -> None:
    """Run generation for the planner, without values: the cache, the prompts' pass, and the pass of the last token."""
    longest = max(len(row.prompt) for row in rows)
    caches = model.new_cache(len(rows), capacity)
    texts = min(len({tuple(row.prompt) for row in rows}), max(1, PROMPT_TOKENS // longest))
    _forward(model, torch.zeros(texts, longest, dtype=torch.int64), caches.part(0, texts))
    caches.filled = capacity - 1
    hidden = _forward(model, torch.zeros(len(rows), 1, dtype=torch.int64), caches)[:, 0]
    choose(model.logits(hidden), torch.zeros(len(rows), 2, dtype=torch.int32), Sampling(1, temperature=0.5))
