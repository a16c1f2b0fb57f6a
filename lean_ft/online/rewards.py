"""What answers are worth: functions of the user's own, a few that are there, and reward models.

A function takes `prompts` and `completions`, lists of as many, and returns a number for each, or None for an answer that it
cannot judge. Whatever else it names is given by name: further columns of the rows (`answer`), `prompt_ids`, `completion_ids`,
`ended` (whether an answer ended by itself). It may be `async`; several of these run beside one another. A reward is the sum of all functions, each
by its weight; an answer that none of them judges has none.

    def right(prompts, completions, answer):
        return [float(said.strip() == expected) for said, expected in zip(completions, answer)]

Source: the protocol is TRL's, so that functions written for it run here.
"""

import asyncio
import contextlib
import copy
import inspect
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lean_ft.data import Prompt
from lean_ft.frozen.reward_model import JudgingModel
from lean_ft.generation import Sample
from lean_ft.hub.paths import repository_name
from lean_ft.settings import Reward
from lean_ft.system.log import say
from lean_ft.system.shapes_only import stage
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import load_function
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.answers import last_match
from lean_ft.training.bad_steps import TrainingFailed
from lean_ft.training.continuation import QUICK_BYTES
from lean_ft.training.finished_models import find_finished

GIVEN = ("prompts", "completions", "prompt_ids", "completion_ids", "ended")
SLOW_SECONDS = 10.0
Function = Callable[..., Any]


@dataclass(frozen=True)
class Scores:
    """Of N answers."""

    totals: list[float | None]  # (N,)
    each: list[list[float | None]]  # (N, functions): not weighed
    texts: list[str]  # (N,)


def exact_answer(pattern: str | None, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where what `pattern` finds last in the completion is what it finds in the column `answer`, to the letter; without a
    pattern, or where it finds nothing in the column, all of the text counts."""

    def right(said: str, expected: str) -> bool:
        if pattern is None:
            return said.strip() == expected.strip()
        expected_part = last_match(pattern, expected)
        return last_match(pattern, said) == (expected.strip() if expected_part is None else expected_part)

    return [float(right(said, str(expected))) for said, expected in zip(completions, answer, strict=True)]


def format_found(pattern: str, completions: Sequence[str], **_: Any) -> list[float]:
    """1 where the whole completion is as `pattern` says, a dot standing for any character."""
    return [float(re.fullmatch(pattern, said.strip(), re.DOTALL) is not None) for said in completions]


def length(
    pattern: str | None, completion_ids: Sequence[Sequence[int]], ended: Sequence[bool], **_: Any
) -> list[float]:
    """Less for every token, from 0 down to -1 for the longest answer of the round, and -1 for one that was cut."""
    longest = max(len(ids) for ids in completion_ids)
    return [-len(ids) / longest if done else -1.0 for ids, done in zip(completion_ids, ended, strict=True)]


BUILT_IN: dict[str, Function] = {"exact_answer": exact_answer, "format": format_found, "length": length}


def rewards_of(settings: Sequence[Reward | str]) -> list[Reward]:
    """Each of the settings as a `Reward`. Raises ValueError where there is none."""
    if not settings:
        raise ValueError(
            "rewards is empty, and answers are learned from by their rewards. Name a function of your own "
            "(rewards=[my_rewards.py:right]), one that is there (rewards=[exact_answer]) or the folder of a reward model."
        )
    found = []
    for one in settings:
        is_model = isinstance(one, str) and one not in BUILT_IN and Path(one).expanduser().is_dir()
        found.append(Reward.model_validate({"model" if is_model else "function": one}) if isinstance(one, str) else one)
    return found


def check_rewards(settings: Sequence[Reward | str]) -> None:
    """Raises ValueError as `Rewards` does, without opening a model."""
    for one in rewards_of(settings):
        if one.model is None:
            _load(one)
        elif repository_name(one.model) is None:
            find_finished(one.model, QUICK_BYTES)


class Rewards:
    """`score(prompts, samples)`: what N answers are worth, as the settings say."""

    def __init__(
        self, settings: Sequence[Reward | str], tokenizer: Tokenizer, device: str = "auto", ranks: Ranks = ALONE
    ) -> None:
        """Loads functions, and models onto `device`; of many `ranks` the first judges for all. Raises ValueError where there is
        none, or one is not there or cannot be run."""
        self._settings, self._tokenizer, self._ranks = rewards_of(settings), tokenizer, ranks
        self._functions: list[Function] = []
        if ranks.rank == 0:
            for one in self._settings:
                own = one.model is not None
                self._functions.append(JudgingModel(one.name, device, tokenizer) if own else _load(one))

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Scores:
        """prompts, samples: N of each. Raises TrainingFailed where a function fails, with the row's place, or returns
        something else than a finite number or None for each answer."""
        if stage() is not None:
            return Scores([0.0] * len(samples), [[]] * len(samples), [""] * len(samples))
        return self._ranks.on_rank_zero(lambda: self._judged(prompts, samples))

    def _judged(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Scores:
        texts = [self._tokenizer.decode(one.ids, skip_special_tokens=True) for one in samples]
        given = {
            "prompts": [prompt.asked for prompt in prompts],
            "completions": texts,
            "prompt_ids": [prompt.ids for prompt in prompts],
            "completion_ids": [one.ids for one in samples],
            "ended": [one.ended for one in samples],
        }
        for name in {name for prompt in prompts for name in prompt.columns} - set(GIVEN):
            given[name] = [prompt.columns.get(name) for prompt in prompts]
        with contextlib.chdir("."):  # back from wherever a function leads
            columns = asyncio.run(self._all(prompts, given))
        each = [list(row) for row in zip(*columns, strict=True)]
        weights = [one.weight for one in self._settings]
        totals: list[float | None] = []
        for row in each:
            judged = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
            totals.append(sum(judged) if judged else None)
        return Scores(totals, each, texts)

    async def _all(self, prompts: Sequence[Prompt], given: dict[str, list[Any]]) -> list[list[float | None]]:
        calls = [
            self._one(one.name, function, prompts, given)
            for one, function in zip(self._settings, self._functions, strict=True)
        ]
        return list(await asyncio.gather(*calls))

    async def _one(
        self, name: str, function: Function, prompts: Sequence[Prompt], given: dict[str, list[Any]]
    ) -> list[float | None]:
        taken = _taken(name, function, given)
        try:
            with _reported(name):
                values = await _call(function, taken)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too: the run would end as if it were complete
            place = await _failing(function, prompts, taken)
            raise TrainingFailed(
                f"the reward {name} failed at {place}: {type(error).__name__}: {error}\nThe run keeps what it has learned; "
                "mend the function and start the same command again."
            ) from error
        return _checked(name, values, prompts)


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    """Report a function that takes long, after 10 s, 20 s, 40 s and so on."""

    def report(seconds: float, began: float) -> None:
        while not done.wait(began + seconds - time.monotonic()):
            say("waiting", f"for the reward {name}: {seconds:.0f} s")
            seconds *= 2

    done = threading.Event()
    threading.Thread(target=report, args=(SLOW_SECONDS, time.monotonic()), daemon=True).start()
    try:
        yield
    finally:
        done.set()


async def _call(function: Function, taken: dict[str, list[Any]]) -> Any:
    values = function(**copy.deepcopy(taken))  # it may change what it is given
    return await values if inspect.isawaitable(values) else values


async def _failing(function: Function, prompts: Sequence[Prompt], taken: dict[str, list[Any]]) -> str:
    """The place of the first row that fails by itself."""
    for i, prompt in enumerate(prompts):
        try:
            await _call(function, {name: values[i : i + 1] for name, values in taken.items()})
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException:
            return prompt.place
    return f"a round of {len(prompts)} answers, and at none of them alone (the first is to {prompts[0].place})"


def _taken(name: str, function: Function, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What of the given a function takes: all, or what it names."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        # Functions for TRL get no prompt_ids.
        taken = {name: values for name, values in given.items() if name != "prompt_ids"}
    else:
        taken = {one.name: given[one.name] for one in named if one.name in given}
    missing = [one.name for one in named if one.default is one.empty and one.name not in given]
    if missing:
        columns = [column for column in given if column not in GIVEN]
        raise ValueError(
            f"the reward {name} takes {', '.join(missing)}, and the rows have no such column; they have "
            f"{', '.join(columns) or 'none'}, and there are {', '.join(GIVEN)}.{did_you_mean(missing[0], [*given])}"
        )
    return taken


def _checked(name: str, values: Any, prompts: Sequence[Prompt]) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        came = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise TrainingFailed(
            f"the reward {name} returned {came} for {len(prompts)} answers; expected a list with a number or None for each."
        )
    numbers: list[float | None] = []
    for value, prompt in zip(values, prompts, strict=True):
        try:
            one = value.item() if hasattr(value, "item") else value  # numpy's and torch's numbers
            number = None if one is None or isinstance(one, str | bytes) else float(one)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several, or 10**400
            number = None
        if value is not None and (number is None or not math.isfinite(number)):
            raise TrainingFailed(
                f"the reward {name} returned {str(value)[:80]} at {prompt.place}; expected a finite number, or None for no reward."
            )
        numbers.append(number)
    return numbers


def _load(reward: Reward) -> Function:
    assert reward.function is not None
    if ":" not in reward.function:
        if reward.function not in BUILT_IN:
            raise ValueError(
                f"no reward is called '{reward.function}'.{did_you_mean(reward.function, BUILT_IN)} There are "
                f"{', '.join(BUILT_IN)}; one of your own is given as my_rewards.py:name, a reward model as its folder."
            )
        built_in, pattern = BUILT_IN[reward.function], reward.pattern
        if reward.function == "format" and pattern is None:
            raise ValueError("the reward `format` looks for a regular expression: give its pattern.")
        return partial(built_in, pattern)
    if reward.pattern is not None:
        raise ValueError(
            f"rewards: a pattern is for {' and '.join(BUILT_IN)}; {reward.function} is a function of yours."
        )
    try:
        return load_function(reward.function)
    except ValueError as error:
        raise ValueError(f"rewards: {error}") from error
