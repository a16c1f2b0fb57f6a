"""Completions of several turns compared with reading the whole text again."""

import base64
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lean_ft.generation import Completion, Sampling, sample
from lean_ft.models import Decoder, load_model
from lean_ft.models.moe import MixtureOfExperts
from lean_ft.tokenizers.loading import context_length
from tests.generation.plain_draws import draw

PROMPTS = [[5, 17, 3], [9], [44, 2, 71, 90, 13, 8, 60], [5, 17, 3], [1, 2, 3, 4], [5, 17, 3, *range(40, 60)]]
NUMBERS = [0, 0, 0, 1, 0, 0]
STOPS, LIMIT, TURNS, MOST_GIVEN = frozenset(range(0, 101, 9)), 40, 4, 45
# Plain, windowed and dynamic caches, recurrent states, keys that layers share, and latents.
CASES = ["llama", "gemma3_text", "llama_dynamic_rope", "llama_longrope", "qwen3_5_text", "falcon_h1", "gemma4_text"]
Reply = Callable[[int, int], list[int] | None]


def random_reply(place: int, turn: int) -> list[int] | None:
    """Between 1 and 24 tokens, which depend on the completion and its turn alone."""
    drawn = random.Random(100 * place + turn)
    return None if turn == TURNS else [drawn.randrange(101) for _ in range(drawn.choice((1, 2, 9, 24)))]


class Delayed:
    """Replies that come after a random number of steps, in a random order; with `seed` None, all when no row runs."""

    def __init__(self, seed: int | None, places: list[int], reply: Reply = random_reply) -> None:
        self.drawn, self.places, self.reply = None if seed is None else random.Random(seed), places, reply
        self.waiting, self.polls, self.turns = list[int](), 0, dict.fromkeys(range(len(places)), 0)
        self.ends: list[int] = []

    def ended(self, place: int, completion: Completion) -> None:
        if completion.ended:
            self.turns[place] += 1
            self.waiting.append(place)
        else:
            self.ends.append(place)

    def ready(self, wait: bool) -> dict[int, list[int] | None]:
        assert self.waiting
        self.polls += not wait
        found = self.waiting if wait else []
        if self.drawn is not None:
            most = max(0, self.drawn.randint(-6, len(self.waiting)))
            found = self.drawn.sample(self.waiting, max(most, int(wait)))
        self.waiting = [place for place in self.waiting if place not in found]
        return {place: self.reply(self.places[place], self.turns[place]) for place in found}


def whole_texts(model: Decoder, place: int, sampling: Sampling) -> Completion:
    """The completion of a prompt, with each token drawn from a pass over the whole text."""
    prompt, found, turn, longest = PROMPTS[place], Completion(), 1, context_length(model.source.config) or 0

    def has_room() -> bool:
        return sum(found.sampled) < sampling.max_new_tokens and len(prompt) + len(found.ids) < longest

    while has_room():
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found.ids]))[0, -1]
        token = draw(logits, sampling.temperature, sampling.seed, prompt, NUMBERS[place], len(found.ids))
        found.log_probs.append(float((logits / sampling.temperature).log_softmax(-1)[token]))
        found.ids.append(token)
        found.sampled.append(True)
        if token not in sampling.stop_ids:
            continue
        if (given := random_reply(place, turn)) is None:
            found.ended = True
            break
        if (
            found.sampled.count(False) + len(given) > MOST_GIVEN
            or len(prompt) + len(found.ids) + len(given) >= longest
            or not has_room()
        ):
            break
        found.ids += given
        found.log_probs += [0.0] * len(given)
        found.sampled += [False] * len(given)
        turn += 1
    return found


def check(found: list[Completion], expected: list[Completion]) -> None:
    for own, one in zip(found, expected, strict=True):
        assert (own.ids, own.ended) == (one.ids, one.ended)
        assert own.sampled == (one.sampled if False in one.sampled else [])
        assert own.log_probs == pytest.approx(one.log_probs, abs=1e-4)


@pytest.mark.first
@pytest.mark.parametrize("number", [1, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [*CASES, "deepseek_v3"])
def test_turns_are_those_of_whole_texts_for_any_order_of_replies_and_batch(
    make_checkpoint: Any, case: str, number: int
) -> None:
    model, sampling = load_model(make_checkpoint(case)[0]), Sampling(LIMIT, 1.3, seed=2, stop_ids=STOPS)
    expected = [whole_texts(model, place, sampling) for place in range(len(PROMPTS))]
    assert {one.ended for one in expected} == {True, False}
    row_gib = model.cache_bytes(1, max(map(len, PROMPTS)) + LIMIT + MOST_GIVEN) / 2**30
    for trial in range(number):
        places = random.Random(trial).sample(range(len(PROMPTS)), len(PROMPTS) - trial % 2)
        replies, gib = Delayed(trial, places), [None, 4 * row_gib, 7 * row_gib][trial % 3]
        prompts, numbers = [PROMPTS[place] for place in places], [NUMBERS[place] for place in places]
        more: dict[str, Any] = {"replies": replies, "max_given_tokens": MOST_GIVEN, "cache_gib": gib}
        found = sample(model, prompts, sampling, numbers=numbers, **more)
        assert replies.polls and not replies.waiting and len(replies.ends) == len(set(replies.ends))
        check(found, [expected[place] for place in places])


@pytest.mark.first(2)
@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_5_text", "deepseek_v3", "gemma4_text"])
def test_each_token_is_computed_once_over_all_turns(make_checkpoint: Any, case: str) -> None:
    """And the tokens are those of sampling each turn from the whole text."""
    model, computed = load_model(make_checkpoint(case)[0]), []
    model.register_forward_pre_hook(lambda model, args, kwargs: computed.append(args[0].numel()), with_kwargs=True)
    prompt, given, how = (
        [*range(20, 90)],
        [*range(3, 37)],
        {"temperature": 0.0, "stop_ids": frozenset(range(0, 101, 2))},
    )
    text, num_sampled = prompt, 0
    for turn in range(5):
        (one,) = sample(model, [text], Sampling(60 - num_sampled, **how))
        assert one.ended
        text, num_sampled = text + one.ids + (given if turn < 4 else []), num_sampled + len(one.ids)
    again, computed[:] = sum(computed), []
    replies = Delayed(None, [0], lambda place, turn: given if turn < 5 else None)
    (found,) = sample(model, [prompt], Sampling(60, **how), replies=replies, max_given_tokens=4 * len(given))
    assert prompt + found.ids == text and found.ended and sum(found.sampled) == num_sampled
    assert sum(computed) == len(text) - 1 and again > 3 * sum(computed)


def test_replies_that_do_not_fit_side_by_side_are_computed_one_after_another(make_checkpoint: Any) -> None:
    """A row's long reply would be padded beyond the cache beside a long row."""
    model, prompts, passes = load_model(make_checkpoint("llama")[0]), [[*range(60)], [7]], []
    sizes = [(29, 1), (1, 29)]
    everything = Sampling(8, 1.0, seed=1, stop_ids=frozenset(range(101)))  # a turn is one token
    model.register_forward_pre_hook(lambda model, args, kwargs: passes.append(tuple(args[0].shape)), with_kwargs=True)
    replies = Delayed(None, [0, 1], lambda place, turn: [5] * sizes[place][turn - 1] if turn < 3 else None)
    found = sample(model, prompts, everything, replies=replies, max_given_tokens=30)
    assert [len(one.ids) for one in found] == [33, 33] and all(one.ended for one in found)
    assert passes == [(2, 60), (2, 30), (1, 2), (1, 30)]


def test_a_row_goes_on_after_a_longer_row_has_filled_the_cache(make_checkpoint: Any) -> None:
    model, long, short, given = load_model(make_checkpoint("llama")[0]), [*range(60)], [7], [*range(3, 33)]

    def greedy(text: list[int], count: int, stops: frozenset[int] = frozenset()) -> list[int]:
        return sample(model, [text], Sampling(count, stop_ids=stops))[0].ids

    first, second = greedy(long, 1), greedy(short, 1)
    stops = frozenset(first + second)
    other = next([n] for n in range(101) if len(greedy([*short, *second, n], 7, stops)) == 7)

    class LongFirst(Delayed):
        def ready(self, wait: bool) -> dict[int, list[int] | None]:
            found = [0] if 0 in self.waiting else self.waiting if wait else []
            self.waiting = [place for place in self.waiting if place not in found]
            return {place: self.reply(place, self.turns[place]) for place in found}

    replies = LongFirst(None, [0, 1], lambda place, turn: None if turn > 1 else other if place else given)
    found = sample(model, [long, short], Sampling(8, stop_ids=stops), replies=replies, max_given_tokens=30)
    assert [len(one.ids) for one in found] == [1 + 30 + 7, 1 + 1 + 7]
    assert found[1].ids == second + other + greedy([*short, *second, *other], 7)


@pytest.mark.long
def test_recorded_experts_are_those_of_all_turns(make_checkpoint: Any) -> None:
    model = load_model(make_checkpoint("gpt_oss")[0]).double()
    sampling, places = Sampling(LIMIT, 1.3, seed=2, stop_ids=STOPS), [*range(len(PROMPTS))]
    replies = Delayed(3, places)
    found = sample(model, PROMPTS, sampling, records_experts=True, replies=replies, max_given_tokens=MOST_GIVEN)
    logits: list[torch.Tensor] = []
    routers = [layer.mlp for layer in model.layers]
    for router in (getattr(one, one.config.router_name) for one in routers if isinstance(one, MixtureOfExperts)):
        router.register_forward_hook(lambda router, args, found: logits.append(found))
    assert any(False in one.sampled for one in found)
    for prompt, one in zip(PROMPTS, found, strict=True):
        logits.clear()
        with torch.no_grad():
            model(torch.tensor([prompt + one.ids[:-1]]))
        assert model.mixture is not None
        expected = torch.cat([own.topk(model.mixture.experts_per_token).indices + 1 for own in logits], -1)
        recorded = np.frombuffer(base64.b64decode(one.experts), np.int16)
        assert recorded.tolist() == expected.flatten().tolist()


def test_an_empty_reply_is_refused(make_checkpoint: Any) -> None:
    model, replies = load_model(make_checkpoint("llama")[0]), Delayed(None, [0], lambda place, turn: [])
    with pytest.raises(ValueError, match="the reply to place 0 is empty. Give at least one token, or None"):
        sample(model, PROMPTS[:1], Sampling(3, stop_ids=frozenset(range(101))), replies=replies, max_given_tokens=4)
