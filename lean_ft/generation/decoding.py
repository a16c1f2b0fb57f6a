"""Generates tokens: one pass over the prompts fills the KV cache, then each pass computes one token of every running
row.

Prompts of different lengths are computed together, padded on the right, where the causal mask hides the padding.
Completions of one prompt share its pass. A row that has ended leaves the batch. Rows that do not fit into the cache's
memory wait and take the places of rows that have ended. A row can go on after given tokens (`turns`).

Inputs of a prompt that need an encoder are encoded once for all its completions. A prompt that is read in parts is cut
where its kinds of columns allow it (`lean_ft.data.kinds`).

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
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor

from lean_ft.data.batch import OF_LAYOUT
from lean_ft.data.collate import batch_of
from lean_ft.data.columns import Document, identity
from lean_ft.data.kinds import kinds_in, next_cut
from lean_ft.generation.choosing import RowKey, Sampling, choose
from lean_ft.generation.compiled_layers import CompiledLayers
from lean_ft.generation.step_graphs import StepGraphs, can_record, should_shrink
from lean_ft.generation.turns import Completion, Decode, Replies, RunningRow, Waiting, divided
from lean_ft.models import Decoder, FewRows, KVCache, pack_in_place
from lean_ft.models.cache import in_pinned_memory, on_device
from lean_ft.system.environment import memory_bytes
from lean_ft.system.log import say
from lean_ft.system.passes import evaluating
from lean_ft.system.world import world
from lean_ft.tokenizers.loading import context_length

PROMPT_TOKENS = 8192  # prompt positions per pass
# The cache, and on a CPU packed weights, take at most 1 / CACHE_SHARE each of the memory that the weights leave.
CACHE_SHARE = 4
PACKED_TOKENS = 32  # packing takes the time that it saves in about 16 tokens, and a completion can end before its limit
UNKNOWN_MEMORY_ROWS = 64  # at a time, if the memory size is unknown
# Waiting rows are read when a part of this size is free, because each pass over prompts reads all weights.
ROOM_PARTS = 8

Asked = Sequence[int] | Document
"""A prompt: token ids, or a document, which can have further columns."""


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
) -> list[Completion]:
    """Return a completion of each prompt, in order.

    With `replies`, a completion has several turns, with given tokens in between. `sampling.max_new_tokens` limits the
    sampled tokens of all its turns. A completion ends with `ended` False at this limit, and if a reply exceeds
    `max_given_tokens` or the model's context. A token depends on the same facts as without replies; given tokens count
    as positions.

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
        records_experts: record the experts that the tokens choose in a mixture (`Completion.experts`).
        replies: gives tokens after each turn.
        max_given_tokens: the most given tokens of a completion. If there are any, the KV cache takes half of its
            memory, and copies of rows that wait take the rest.

    Raises:
        ValueError: for an empty prompt, for stop texts without `decode`, if the cache cannot hold one row, for a file
            of a prompt that cannot be read, or for an empty reply.
        FloatingPointError: if the model's logits are not finite.
    """
    rows = running_rows(prompts, sampling, numbers)
    if sampling.max_new_tokens and rows:
        num_new = sampling.max_new_tokens + max_given_tokens
        room = _room(model, rows, num_new, cache_gib, 2 if max_given_tokens else 1)
        packs = sampling.max_new_tokens >= PACKED_TOKENS and not compile
        packed_bytes = (_most_bytes(model, None) or 0) if packs else 0
        options = DecodingOptions(room, None, compile, packed_bytes, records_experts)
        waiting = Waiting(replies, sampling, max_given_tokens)
        for _ in Decoding(model, rows, sampling, options, decode, waiting).steps():
            pass
    return [row.completion for row in rows]


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
        for tokens in Decoding(model, rows, sampling, DecodingOptions(len(rows), prompt_part), decode).steps():
            yield [tokens.get(row.place) for row in rows]


def pack_for_generation(model: Decoder, new_tokens: int) -> None:
    """Pack a model that only generates, if it generates enough tokens in all (`pack_in_place`)."""
    if new_tokens >= PACKED_TOKENS:
        pack_in_place(model, _most_bytes(model, None) or 0)


def running_rows(
    prompts: Tensor | Sequence[Asked], sampling: Sampling, numbers: Sequence[int] | None
) -> list[RunningRow]:
    documents = [as_document(prompt) for prompt in prompts]
    for place, prompt in enumerate(documents):
        if not len(prompt):
            raise ValueError(f"prompt {place} is empty; expected at least one token, such as the tokenizer's bos_id.")
    numbers = sample_numbers(documents) if numbers is None else numbers
    keys = [RowKey(sampling.seed, _identity(prompt), number) for prompt, number in zip(documents, numbers, strict=True)]
    return [
        RunningRow(place, prompt, key, Completion())
        for place, (prompt, key) in enumerate(zip(documents, keys, strict=True))
    ]


def as_document(prompt: Asked | Tensor) -> Document:
    return prompt if isinstance(prompt, Document) else Document.of([int(token) for token in prompt])


def _identity(prompt: Asked) -> bytes:
    """The identity of a prompt. A text has the same one in runs with and without kinds of columns."""
    prompt = as_document(prompt)
    return prompt.identity if kinds_in(prompt) else identity(prompt.ids)


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
    """The number of rows that fit in the cache, with `num_new` tokens after each prompt and space for `copies` of each
    row."""
    limit = _most_bytes(model, cache_gib)
    capacity = max(len(row.prompt) for row in rows) + num_new
    row_bytes = copies * model.cache_bytes(1, capacity)
    room = UNKNOWN_MEMORY_ROWS if limit is None else int(limit // row_bytes)
    if room < 1:
        raise ValueError(
            f"the KV cache of one completion takes {row_bytes / 2**30:.2f} GiB at {capacity} tokens, more than the "
            f"limit of {(limit or 0) / 2**30:.2f} GiB. Raise generation.cache_gib, or lower max_new_tokens."
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


@dataclass(frozen=True)
class DecodingOptions:
    """How rows are computed. Options change tokens by rounding alone."""

    room: int
    """Rows at a time."""
    prompt_part: int | None = None
    """A single prompt is read about this many tokens at a time."""
    compile: bool = False
    """Compile the layers for tokens after the prompts."""
    packed_bytes: float = 0
    """Memory for packed copies of the weights."""
    records_experts: bool = False


class NextTokens:
    """Computes the next token of each row of a cache. It must not refer to a `Decoding`: a cycle would keep the cache's
    memory."""

    def __init__(self, model: Decoder, cache: KVCache, sampling: Sampling, options: DecodingOptions) -> None:
        self._model, self._cache, self._sampling, self._compile = model, cache, sampling, options.compile
        self._few_rows = FewRows(model, options.packed_bytes)
        self._compiled = CompiledLayers(model) if options.compile else None

    def choose(self, hidden: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the ids (B,), and the draws: ids and log-probabilities (B, 2), for the host.

        hidden: (B, D); keys: of the draws, (B, 2), or None for temperature 0.
        """
        keys = None if keys is None else keys.to(hidden.device, non_blocking=hidden.is_cuda)
        with self._few_rows:
            logits = self._model.logits(hidden)
        ids, log_probs = choose(logits, keys, self._sampling, self._compile)
        return ids, torch.stack((ids.double(), log_probs.double()), 1)  # float64 represents both exactly

    def __call__(self, ids: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the rows' last tokens, `ids` (B,). Return their next tokens as `choose` does."""
        with self._few_rows, self._compiled or _as_written():  # the model is restored between two steps
            hidden = self._model(ids[:, None], cache=self._cache, return_hidden=True)[:, 0]
        return self.choose(hidden, keys)


class Decoding:
    """Fills the completions of rows, at most `options.room` rows at a time.

    A row is in the queue, then in the batch, which has the order of the cache, and between two turns in `waiting`. On a
    GPU the next step is launched before the host reads a step's tokens. A row that has ended then computes a token too
    many.
    """

    _cache: KVCache
    _next: NextTokens
    _ids: Tensor  # (B,): the batch's last tokens, which the next step computes
    _draws: Tensor  # (B, 2): these tokens and their log-probabilities, which the host reads

    def __init__(
        self,
        model: Decoder,
        rows: list[RunningRow],
        sampling: Sampling,
        options: DecodingOptions,
        decode: Decode | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """waiting: empty; None if a row has a single turn. Raises ValueError for stop texts without `decode`."""
        if sampling.stop_texts and decode is None:
            raise ValueError("stop_texts need `decode`, a function from ids to text. Pass decode=tokenizer.decode.")
        self._model, self._sampling, self._options, self._decode = model, sampling, options, decode
        self._waiting = Waiting(None, sampling) if waiting is None else waiting
        self._context = context_length(model.source.config)
        if self._waiting.has_replies and self._context is not None:
            for row in rows:
                row.longest = max(self._context, len(row.prompt) + 1)
        # Equal prompts and equal lengths are together.
        self._queue = sorted(rows, key=lambda row: (-len(row.prompt), row.prompt.ids.tolist(), _identity(row.prompt)))
        # Tokens of the longest row.
        self._capacity = len(self._queue[0].prompt) + sampling.max_new_tokens + self._waiting.max_given_tokens
        self._fits_at_once = len(rows) <= options.room
        self._batch: list[RunningRow] = []
        self._graphs: StepGraphs | None = None
        self._is_late = False

    @torch.no_grad()  # also beside `evaluating`, so that the caller has gradients between two steps
    def steps(self) -> Iterator[dict[int, int]]:
        """Yield each step's tokens by the rows' places; empty after a part of a prompt."""
        with evaluating(self._model):
            yield from self._begin()
            while self._batch or self._queue or self._waiting:
                on_host, is_ahead = self._launch()
                places = self._take(on_host())
                yield {self._batch[i].place: self._batch[i].completion.ids[-1] for i in places}
                self._end_turns(places, is_ahead)
                staying = [i for i, row in enumerate(self._batch) if row.continues(self._sampling)]
                new, replied = self._next_rows(len(staying))
                self._regroup(staying, len(new) + len(replied))
                if self._batch and not self._is_late:
                    yield from self._step()
                yield from self._join(new, replied)

    def _begin(self) -> Iterator[dict[int, int]]:
        """Read the first rows' prompts, and choose their first tokens."""
        options, first = self._options, self._queue[: self._options.room]
        copies = 2 if self._waiting.max_given_tokens else 1
        self._batch = world().generate(self._model, first, self._capacity, options.packed_bytes, copies)
        self._queue = self._queue[options.room :] if self._batch else []  # none in a plan
        if not self._batch:
            return
        self._cache = self._model.new_cache(len(self._batch), self._capacity, options.records_experts)
        hidden = yield from _read(self._model, self._batch, self._cache, options.prompt_part)
        self._next = NextTokens(self._model, self._cache, self._sampling, options)
        self._device = hidden.device
        self._is_late = hidden.is_cuda and not any(rope.depends_on_length for rope, _ in self._model.rotary)
        if self._is_late and can_record(self._model):
            self._graphs = StepGraphs(self._next, self._cache)
        self._ids, self._draws = self._next.choose(hidden, self._keys(self._batch))

    def _keys(self, rows: Sequence[RunningRow], ahead: int = 0) -> Tensor | None:
        """The keys of the draws after `ahead` more tokens, (B, 2)."""
        if self._sampling.temperature == 0:
            return None
        keys = [row.key.at(len(row.completion.ids) + ahead) for row in rows]
        return in_pinned_memory(keys, self._device, torch.int32)

    def _launch(self) -> tuple[Callable[[], list[tuple[float, float]]], bool]:
        """Start to copy the draws to the host, and on a GPU the step after them. Return a function that waits for the
        copy, and whether there is such a step."""
        longest = max((row.length for row in self._batch), default=0)
        if self._context is not None and longest > self._context:
            _say_too_long(self._context)
        on_host = _to_host(self._draws)
        is_ahead = self._is_late and any(row.continues(self._sampling, 1) for row in self._batch)
        if is_ahead:
            keys = self._keys(self._batch, 1)
            if self._graphs is None:
                self._ids, self._draws = self._next(self._ids, keys)
            else:
                self._ids, self._draws = self._graphs(self._ids, keys, longest + 1)
        return on_host, is_ahead

    def _take(self, draws: list[tuple[float, float]]) -> list[int]:
        """Add the tokens to the rows that continue. Return the indices of these rows."""
        places = [i for i, row in enumerate(self._batch) if row.continues(self._sampling)]
        for i in places:
            self._batch[i].take(*draws[i], self._sampling, self._decode)
        return places

    def _end_turns(self, places: list[int], is_ahead: bool) -> None:
        """Of rows whose turn has ended, keep the recorded experts, and with replies a copy of their part of the
        cache."""
        for i in places:
            row = self._batch[i]
            if row.continues(self._sampling):
                continue
            if self._cache.experts is not None:
                experts = self._cache.experts[i, : row.length - 1].cpu().numpy().tobytes()
                row.completion.experts = base64.b64encode(experts).decode()
            if self._waiting.has_replies:
                num_kept = row.length - (not is_ahead)
                self._waiting.add(row, self._cache.copy_of(i, num_kept) if row.completion.ended else None)
                self._batch[i] = replace(row, completion=Completion(ended=True))  # until the row leaves the batch

    def _next_rows(self, num_staying: int) -> tuple[list[RunningRow], list[tuple[RunningRow, KVCache]]]:
        """Take the rows of the queue that have room, and those that continue after a reply."""
        room, busy = self._options.room, num_staying + len(self._waiting)
        new = self._queue[: room - busy] if busy <= room - room // ROOM_PARTS else []
        self._queue = self._queue[len(new) :]
        return new, self._waiting.ready(wait=not num_staying and not new)

    def _regroup(self, staying: list[int], num_joining: int) -> None:
        """Drop the rows that have ended, if rows join, or the batch then shrinks."""
        num_rows = len(self._batch)
        num_needed = len(staying) + len(self._waiting) + num_joining
        shrinks = len(staying) < num_rows and (self._graphs is None or should_shrink(num_needed, num_rows))
        if not num_joining and not shrinks:
            return
        if self._waiting.has_replies and self._graphs is not None:
            # Rows that have ended stay in the place of those that wait, because another number of rows is another
            # graph.
            size, ended = num_needed if shrinks else num_rows, [i for i in range(num_rows) if i not in staying]
            staying = staying + ended[: max(0, size - len(staying) - num_joining)]
        order, remaining = self._cache.keep(staying)
        self._batch = [self._batch[i] for i in order]
        self._ids, self._draws = self._ids[remaining], self._draws[remaining]
        if not self._fits_at_once or self._waiting.has_replies:  # an upper bound of the lengths would outgrow the cache
            self._cache.filled = max((row.length - (not self._is_late) for row in self._batch), default=0)

    def _step(self) -> Iterator[dict[int, int]]:
        """Compute the next tokens of the batch. Its texts are read again if their rotary frequencies change."""
        rows, keys = self._batch, self._keys(self._batch)
        if all(_same_frequencies(self._model, row.length - 1, row.length) for row in rows):
            self._ids, self._draws = self._next(self._ids, keys)
        else:
            hidden = yield from _read(self._model, rows, self._cache, self._options.prompt_part)
            self._ids, self._draws = self._next.choose(hidden, keys)

    def _join(self, new: list[RunningRow], replied: list[tuple[RunningRow, KVCache]]) -> Iterator[dict[int, int]]:
        """Add rows to the batch, and choose their first tokens. Of rows with a copy, only the tokens after it are
        computed."""
        keeps = [_same_frequencies(self._model, kept.filled, row.length) for row, kept in replied]
        new = [*new, *(row for (row, _), is_kept in zip(replied, keeps, strict=True) if not is_kept)]
        if new:
            part = self._part(new)
            hidden = yield from _read(self._model, new, part, self._options.prompt_part)
            self._append(new, part, hidden)
        for group in divided(list(compress(replied, keeps)), self._capacity, PROMPT_TOKENS):
            rows, copies = zip(*group, strict=True)
            part = self._part(rows)
            part.put(copies)
            texts = [row.after(kept.filled) for row, kept in group]
            self._append(rows, part, _last_hidden(self._model, texts, part))

    def _part(self, rows: Sequence[RunningRow]) -> KVCache:
        """The part of the cache behind the batch, for these rows."""
        return self._cache.part(len(self._batch), len(self._batch) + len(rows))

    def _append(self, rows: Sequence[RunningRow], part: KVCache, hidden: Tensor) -> None:
        self._cache.join(part)
        ids, draws = self._next.choose(hidden, self._keys(rows))
        self._ids, self._draws = torch.cat((self._ids, ids)), torch.cat((self._draws, draws))
        self._batch = [*self._batch, *rows]


def _to_host(draws: Tensor) -> Callable[[], list[tuple[float, float]]]:
    """Start to copy each row's token and log-probability (B, 2) to the host. Return a function that waits for the
    copy."""
    copied = draws.to("cpu", non_blocking=draws.is_cuda)
    if not draws.is_cuda:
        return copied.tolist
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[tuple[float, float]]:
        if not event.query():
            event.synchronize()
        return copied.tolist()

    return wait


@cache
def _say_too_long(context: int | None) -> None:  # once per process
    say("WARNING", f"a text is longer than the model's context of {context:,} tokens. Expect poor tokens beyond it")


def _read(
    model: Decoder, rows: list[RunningRow], caches: KVCache, prompt_part: int | None
) -> Generator[dict[int, int], None, Tensor]:
    """Fill the cache with the rows' texts. Return the hidden state (B, D) of each row's last token.

    Equal neighboring texts are read once. A single text is read about `prompt_part` tokens at a time, with a yield
    between parts.
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
            while len(texts[0]) > prompt_part and all(rope.same_frequencies(1, longest) for rope, _ in model.rotary):
                end = next_cut(texts[0], prompt_part)
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
    return all(rope.same_frequencies(length, other) for rope, _ in model.rotary)


def padded_inputs(texts: Sequence[Document], device: torch.device) -> dict[str, Any]:
    """Arguments of the forward pass over texts, padded on the right."""
    longest = max(map(len, texts))
    if not texts[0].kinds:
        rows = [text.ids.tolist() + [0] * (longest - len(text)) for text in texts]
        return {"input_ids": on_device(rows, device)}  # (B, T)
    batch = batch_of(texts, kind="padded", row_tokens=longest, pad_id=0).to(device)
    return {name: value for name, value in batch.inputs.items() if name not in OF_LAYOUT}  # a cache has the positions


def _as_written() -> Any:
    """Context manager that disables code compiled for training, which would be recompiled for each prompt length."""
    return torch.compiler.set_stance("force_eager")


def forward_as_written(model: Decoder, input_ids: Tensor, cache: KVCache, **inputs: Any) -> Tensor:
    with _as_written():
        return model(input_ids, cache=cache, return_hidden=True, **inputs)
