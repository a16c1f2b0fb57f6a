"""Generates tokens: one pass over the prompts fills the KV cache, then each pass computes one token of every running
row.

Prompts of different lengths are computed together, padded on the right, where the causal mask hides the padding.
Completions of one prompt share its pass. A row that has ended leaves the batch. Rows that do not fit into the cache's memory
wait and take the places of rows that have ended. A row can go on after given tokens (`turns`).

An image is encoded once for all completions of its prompt, and a prompt that is read in parts is never cut inside of an image.

A row's tokens depend on its prompt, its sample number and the seed (`choosing`), not on its batch. Another batch size
can round logits differently in the last bits, which changes a token only if two tokens are equal up to that rounding.

If rotary frequencies depend on the length of the text, the text is read again when they change: with `longrope` once,
when a text outgrows the original context; with `dynamic` at every token after that.

Source: our own; a preallocated cache and shared prompts as in vLLM (Kwon et al. 2023, arXiv:2309.06180), without pages.

Shapes: B running rows, T tokens of the longest prompt, V vocabulary.
"""

import base64
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor

from lean_ft.data.collate import batch_of
from lean_ft.data.columns import Document, identity
from lean_ft.data.images import behind_image, has_images
from lean_ft.generation.choosing import RowKey, Sampling, choose
from lean_ft.generation.compiled_layers import CompiledLayers
from lean_ft.generation.step_graphs import StepGraphs, can_record, should_shrink
from lean_ft.generation.turns import Replies, RunningRow, Sample, Waiting, divided
from lean_ft.models import Decoder, FewRows, KVCache, pack_in_place
from lean_ft.models.cache import in_pinned_memory, on_device
from lean_ft.system.environment import memory_bytes
from lean_ft.system.log import say
from lean_ft.system.world import world
from lean_ft.tokenizers.loading import context_length

PROMPT_TOKENS = 8192  # prompt positions per pass
# The cache, and on a CPU packed weights, take at most 1 / CACHE_SHARE each of the memory that the weights leave.
CACHE_SHARE = 4
PACKED_TOKENS = 32  # packing takes the time that it saves in about 16 tokens, and an answer can end before its limit
UNKNOWN_MEMORY_ROWS = 64  # at a time, if the memory size is unknown
# Waiting rows are read when a part of this size is free, because each pass over prompts reads all weights.
ROOM_PARTS = 8

Asked = Sequence[int] | Document
"""A prompt: token ids, or a document, which can have images."""
Decode = Callable[[Sequence[int]], str]


def sample(
    model: Decoder,
    prompts: Tensor | Sequence[Asked],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
    decode: Decode | None = None,
    cache_gib: float | None = None,
    compile: bool = False,
    records_experts: bool = False,
    replies: Replies | None = None,
    max_given_tokens: int = 0,
) -> list[Sample]:
    """Return a completion of each prompt, in order.

    With `replies`, a completion has several turns, with given tokens in between. `sampling.max_new_tokens` limits the sampled tokens
    of all its turns. A completion ends with `ended` False at this limit, and if a reply exceeds `max_given_tokens` or the model's
    context. A token depends on the same facts as without replies; given tokens count as positions.

    Args:
        model: on any device; runs without gradients.
        prompts: lists of token ids of any length, without padding, or documents; or a tensor (B, T) int64. Repeat a
            prompt to get several completions; it is read once.
        sampling: sampling settings and stop conditions.
        numbers: sample number of each prompt, so that equal prompts get different completions; None counts equal
            prompts from 0.
        decode: converts ids to text; needed for `sampling.stop_texts`.
        cache_gib: maximum memory of the KV cache, in GiB; rows that do not fit are generated later. None uses a quarter
            of the memory that the weights leave on the device.
        compile: compile the layers for tokens after the prompts (`CompiledLayers`), which rounds differently.
        records_experts: record the experts that the tokens choose in a mixture (`Sample.experts`).
        replies: gives tokens after each turn.
        max_given_tokens: the most given tokens of a completion. If there are any, the KV cache takes half of its memory, and copies of
            rows that wait take the rest.

    Raises:
        ValueError: for an empty prompt, for stop texts without `decode`, if the cache cannot hold one row, for an image that
            cannot be read, or for an empty reply.
        FloatingPointError: if the model's logits are not finite.
    """
    rows = running_rows(prompts, sampling, numbers)
    if sampling.max_new_tokens and rows:
        num_new = sampling.max_new_tokens + max_given_tokens
        room = _room(model, rows, num_new, cache_gib, 2 if max_given_tokens else 1)
        packs = sampling.max_new_tokens >= PACKED_TOKENS and not compile
        packed_bytes = (_most_bytes(model, None) or 0) if packs else 0
        more = records_experts, replies, max_given_tokens
        for _ in _decode_rows(model, rows, sampling, decode, room, compile, None, packed_bytes, *more):
            pass
    return [row.sample for row in rows]


def sample_steps(
    model: Decoder,
    prompts: Tensor | Sequence[Asked],
    sampling: Sampling,
    decode: Decode | None = None,
    *,
    prompt_part: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield each step's tokens, one per prompt, None for rows that have ended. Arguments are those of `sample`.

    All rows run in one wave. With `prompt_part`, a single prompt is read that many tokens at a time, and each part
    except the last is a step without a token.
    """
    rows = running_rows(prompts, sampling, None)
    if sampling.max_new_tokens and rows:
        for tokens in _decode_rows(model, rows, sampling, decode, len(rows), prompt_part=prompt_part):
            yield [tokens.get(row.place) for row in rows]


def pack_for_answers(model: Decoder, new_tokens: int) -> None:
    """Pack a model that only generates, if it generates enough tokens in all (`pack_in_place`)."""
    if new_tokens >= PACKED_TOKENS:
        pack_in_place(model, _most_bytes(model, None) or 0)


def running_rows(
    prompts: Tensor | Sequence[Asked], sampling: Sampling, numbers: Sequence[int] | None
) -> list[RunningRow]:
    asked = [as_document(prompt) for prompt in prompts]
    for place, prompt in enumerate(asked):
        if not len(prompt):
            raise ValueError(f"prompt {place} is empty; expected at least one token, such as the tokenizer's bos_id.")
    numbers = sample_numbers(asked) if numbers is None else numbers
    keys = [RowKey(sampling.seed, _identity(prompt), number) for prompt, number in zip(asked, numbers, strict=True)]
    return [
        RunningRow(place, prompt, key, Sample()) for place, (prompt, key) in enumerate(zip(asked, keys, strict=True))
    ]


def as_document(prompt: Asked | Tensor) -> Document:
    return prompt if isinstance(prompt, Document) else Document.of([int(token) for token in prompt])


def _identity(prompt: Asked) -> bytes:
    """The identity of a prompt. A text has the same one in runs with and without images."""
    prompt = as_document(prompt)
    return prompt.identity if has_images(prompt) else identity(prompt.ids)


def sample_numbers(prompts: Sequence[Asked]) -> list[int]:
    """Return the sample number of each prompt: the number of equal prompts before it."""
    seen, numbers = Counter[bytes](), list[int]()
    for prompt in map(_identity, prompts):
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


def _room(model: Decoder, rows: list[RunningRow], num_new: int, cache_gib: float | None, copies: int) -> int:
    """The number of rows that fit in the cache, with `num_new` tokens after each prompt and space for `copies` of each row."""
    limit = _most_bytes(model, cache_gib)
    capacity = max(len(row.prompt) for row in rows) + num_new
    row_bytes = copies * model.cache_bytes(1, capacity)
    room = UNKNOWN_MEMORY_ROWS if limit is None else int(limit // row_bytes)
    if room < 1:
        raise ValueError(
            f"the KV cache of one completion takes {row_bytes / 2**30:.2f} GiB at {capacity} tokens, more than the limit of "
            f"{(limit or 0) / 2**30:.2f} GiB. Raise generation.cache_gib, or lower max_new_tokens."
        )
    return room


def _most_bytes(model: Decoder, cache_gib: float | None) -> float | None:
    if cache_gib is not None:
        return cache_gib * 2**30
    # A share of the device's total memory, not of its free memory, so that a resumed run has the same batches.
    total = memory_bytes(model.device)
    if total is None:
        return None
    return (total - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))) / CACHE_SHARE


@torch.no_grad()
def _decode_rows(
    model: Decoder,
    rows: list[RunningRow],
    sampling: Sampling,
    decode: Decode | None,
    room: int,
    compile: bool = False,
    prompt_part: int | None = None,
    packed_bytes: float = 0,
    records_experts: bool = False,
    replies: Replies | None = None,
    max_given_tokens: int = 0,
) -> Iterator[dict[int, int]]:
    """Fill the rows' samples, at most `room` rows at a time. Yield each step's tokens by the rows' places; empty after a part of a
    prompt."""
    if sampling.stop_texts and decode is None:
        raise ValueError("stop_texts need `decode`, a function from ids to text. Pass decode=tokenizer.decode.")
    context = context_length(model.source.config)
    # Equal prompts and equal lengths are together.
    waiting = sorted(rows, key=lambda row: (-len(row.prompt), row.prompt.ids.tolist(), _identity(row.prompt)))
    capacity = len(waiting[0].prompt) + sampling.max_new_tokens + max_given_tokens
    turns = Waiting(replies, sampling, max_given_tokens)
    if replies is not None and context is not None:
        for row in rows:
            row.longest = max(context, len(row.prompt) + 1)
    copies = 2 if max_given_tokens else 1
    running, waiting = world().generate(model, waiting[:room], capacity, packed_bytes, copies), waiting[room:]
    if not running:  # in a plan
        return
    caches = model.new_cache(len(running), capacity, records_experts)
    hidden = yield from _read(model, running, caches, prompt_part)
    few_rows, compiled = FewRows(model, packed_bytes), CompiledLayers(model) if compile else None

    def chosen(hidden: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        keys = None if keys is None else keys.to(hidden.device, non_blocking=hidden.is_cuda)
        with few_rows:
            logits = model.logits(hidden)
        ids, log_probs = choose(logits, keys, sampling, compile)
        return ids, torch.stack((ids.double(), log_probs.double()), 1)  # float64 represents both exactly

    def step(ids: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        with few_rows, compiled or _as_written():  # the model is restored between two steps
            hidden = model(ids[:, None], cache=caches, return_hidden=True)[:, 0]
        return chosen(hidden, keys)

    def keys_of(rows: list[RunningRow], ahead: int = 0) -> Tensor | None:
        if sampling.temperature == 0:
            return None
        return in_pinned_memory([row.key.at(len(row.sample.ids) + ahead) for row in rows], hidden.device, torch.int32)

    # On a GPU the next step is launched before the host reads a step's tokens. A row that has ended then computes tokens too many.
    is_late = hidden.is_cuda and not any(rope.depends_on_length for rope in model.rotary)
    graphs = StepGraphs(step, caches) if is_late and can_record(model) else None
    ids, answers = chosen(hidden, keys_of(running))
    while running or waiting or turns:
        longest = max((row.length for row in running), default=0)
        if context is not None and longest > context:
            _say_too_long(context)
        on_host = _to_host(answers)
        is_ahead = is_late and any(row.continues(sampling, 1) for row in running)
        if is_ahead:
            keys = keys_of(running, 1)
            ids, answers = step(ids, keys) if graphs is None else graphs(ids, keys, longest + 1)
        now = [(i, one) for i, one in enumerate(on_host()) if running[i].continues(sampling)]
        for i, one in now:
            _take(running[i], *one, sampling, decode)
        yield {running[i].place: running[i].sample.ids[-1] for i, _ in now}
        for i, row in [(i, running[i]) for i, _ in now if not running[i].continues(sampling)]:
            if caches.experts is not None:
                experts = caches.experts[i, : row.length - 1].cpu().numpy().tobytes()
                row.sample.experts = base64.b64encode(experts).decode()
            if replies is not None:
                num_kept = row.length - (not is_ahead)
                turns.add(row, caches.copy_of(i, num_kept) if row.sample.ended else None)
                running[i] = replace(row, sample=Sample(ended=True))  # until the row leaves the batch
        left = [i for i, row in enumerate(running) if row.continues(sampling)]
        busy = len(left) + len(turns)
        new = waiting[: room - busy] if busy <= room - room // ROOM_PARTS else []
        waiting = waiting[len(new) :]
        ready = turns.ready(wait=not left and not new)
        num_joining = len(new) + len(ready)
        num_here = len(left) + len(turns) + num_joining
        shrinks = len(left) < len(running) and (graphs is None or should_shrink(num_here, len(running)))
        if num_joining or shrinks:
            if replies is not None and graphs is not None:
                # Rows that have ended stay in the place of those that wait, because another number of rows is another graph.
                size, ended = num_here if shrinks else len(running), [i for i in range(len(running)) if i not in left]
                left += ended[: max(0, size - len(left) - num_joining)]
            order, remaining = caches.keep(left)
            running = [running[i] for i in order]
            ids, answers = ids[remaining], answers[remaining]
            if len(rows) > room or replies is not None:  # an upper bound of the lengths would outgrow the cache
                caches.filled = max((row.length - (not is_late) for row in running), default=0)
        if running and not is_late:
            if all(_same_frequencies(model, row.length - 1, row.length) for row in running):
                ids, answers = step(ids, keys_of(running))
            else:
                ids, answers = chosen((yield from _read(model, running, caches, prompt_part)), keys_of(running))
        keeps = [_same_frequencies(model, kept.filled, row.length) for row, kept in ready]
        new += [row for (row, _), is_kept in zip(ready, keeps, strict=True) if not is_kept]
        groups = divided(list(compress(ready, keeps)), capacity, PROMPT_TOKENS)
        for group in filter(None, ([(row, None) for row in new], *groups)):
            part, joining = caches.part(len(running), len(running) + len(group)), [row for row, _ in group]
            if kept_parts := [kept for _, kept in group if kept is not None]:
                part.put(kept_parts)
                hidden = _last_hidden(model, [row.after(kept.filled) for row, kept in group if kept is not None], part)
            else:
                hidden = yield from _read(model, joining, part, prompt_part)
            caches.join(part)
            first_ids, first_answers = chosen(hidden, keys_of(joining))
            ids, answers = torch.cat((ids, first_ids)), torch.cat((answers, first_answers))
            running = running + joining


def _to_host(answers: Tensor) -> Callable[[], list[tuple[float, float]]]:
    """Start to copy each row's token and log-probability (B, 2) to the host. Return a function that waits for the copy."""
    copied = answers.to("cpu", non_blocking=answers.is_cuda)
    if not answers.is_cuda:
        return copied.tolist
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[tuple[float, float]]:
        if not event.query():
            event.synchronize()
        return copied.tolist()

    return wait


def _take(row: RunningRow, token: float, log_prob: float, sampling: Sampling, decode: Decode | None) -> None:
    """Add a token to a row."""
    if log_prob != log_prob or log_prob == float("-inf"):
        raise FloatingPointError(
            f"the logits after token {len(row.prompt) + len(row.sample.ids)} are not finite: the weights are not finite, or "
            "float16 overflows. Check the weights, or set dtype to bfloat16 or float32."
        )
    found, token = row.sample, int(token)
    found.ids.append(token)
    found.log_probs.append(log_prob)
    if found.sampled:
        found.sampled.append(True)
    found.ended = token in sampling.stop_ids
    if sampling.stop_texts and not found.ended:
        assert decode is not None
        # A token has at least one byte, so the last `longest` tokens contain any stop text that ends here.
        longest = max(len(text.encode()) for text in sampling.stop_texts)
        given = found.sampled[: -longest - 5 : -1]  # the latest first
        tail = decode(found.ids[-(given.index(False) if False in given else longest + 4) :])
        found.ended = any(text in tail for text in sampling.stop_texts)


@cache
def _say_too_long(context: int | None) -> None:  # once per process
    say("WARNING", f"a text is longer than the model's context of {context:,} tokens. Expect poor tokens beyond it")


def _read(
    model: Decoder, rows: list[RunningRow], caches: KVCache, prompt_part: int | None
) -> Generator[dict[int, int], None, Tensor]:
    """Fill the cache with the rows' texts. Return the hidden state (B, D) of each row's last token.

    Equal neighboring texts are read once. A single text is read about `prompt_part` tokens at a time, with a yield between
    parts.
    """
    device = model.device
    equal = [list(same) for _, same in groupby((row.text for row in rows), key=_identity)]
    groups = [(same[0], len(same)) for same in equal]
    parts, lasts = [], []
    start = 0
    while start < len(groups):
        longest = max(len(text) for text, _ in groups[start:])
        texts = [text for text, _ in groups[start : start + max(1, PROMPT_TOKENS // longest)]]
        part = caches.part(start, start + len(texts))
        start += len(texts)
        if prompt_part is not None and len(texts) == 1:
            # Only if the rotary frequencies do not depend on the length of the text.
            while len(texts[0]) > prompt_part and all(rope.same_frequencies(1, longest) for rope in model.rotary):
                end = behind_image(texts[0], prompt_part)
                if end == len(texts[0]):
                    break
                forward_as_written(model, cache=part, **padded_inputs([texts[0][:end]], device))
                texts = [texts[0][end:]]
                yield {}
        lasts.append(_last_hidden(model, texts, part))
        parts.append(part)
    return torch.cat(lasts)[caches.spread(parts, [count for _, count in groups])]


def _last_hidden(model: Decoder, texts: Sequence[Document], caches: KVCache) -> Tensor:
    """Add texts to the cache's rows. Return the hidden state (B, D) of each one's last token."""
    is_even = len(set(map(len, texts))) == 1
    lengths = on_device([len(text) for text in texts], model.device)
    inputs = padded_inputs(texts, model.device)
    hidden = forward_as_written(model, cache=caches, lengths=None if is_even else lengths, **inputs)
    return hidden[torch.arange(len(texts), device=model.device), lengths - 1]


def _same_frequencies(model: Decoder, length: int, other: int) -> bool:
    return all(rope.same_frequencies(length, other) for rope in model.rotary)


def padded_inputs(texts: Sequence[Document], device: torch.device) -> dict[str, Any]:
    """Arguments of the forward pass over texts, padded on the right."""
    longest = max(map(len, texts))
    if not texts[0].kinds:
        rows = [text.ids.tolist() + [0] * (longest - len(text)) for text in texts]
        return {"input_ids": on_device(rows, device)}  # (B, T)
    batch = batch_of(texts, kind="padded", row_tokens=longest, pad_id=0).to(device)
    return {name: batch.inputs[name] for name in ("input_ids", "images", "position_shift") if name in batch.inputs}


def _as_written() -> Any:
    """Context manager that disables code compiled for training, which would be recompiled for each prompt length."""
    return torch.compiler.set_stance("force_eager")


def forward_as_written(model: Decoder, input_ids: Tensor, cache: KVCache, **inputs: Any) -> Tensor:
    with _as_written():
        return model(input_ids, cache=cache, return_hidden=True, **inputs)
