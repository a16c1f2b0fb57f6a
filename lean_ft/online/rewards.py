"""Rewards of completions: the user's functions, built-in functions, and reward models.

A function takes the lists `prompts` and `completions` and returns a number for each completion, or None if it cannot
judge one. It gets further arguments by name: columns of the rows (`answer`), `prompt_ids`, `completion_ids`, `ended`
(whether the completion was not cut). It may be `async`; async functions run concurrently. A completion's reward is the
weighted sum of all functions, or None if no function judges it.

    def right(prompts, completions, answer):
        return [float(said.strip() == expected) for said, expected in zip(completions, answer)]

Source: TRL's protocol, so that its reward functions run here.
"""

import asyncio
import contextlib
import copy
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lean_ft.data import Prompt
from lean_ft.frozen.reward_model import JudgingModel
from lean_ft.generation import Sample
from lean_ft.hub.paths import repository_name
from lean_ft.settings import Reward
from lean_ft.system.log import slow_calls_reported
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import check_function, load_function
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.answers import last_match
from lean_ft.training.bad_steps import TrainingFailed
from lean_ft.training.continuation import QUICK_BYTES
from lean_ft.training.finished_models import find_finished

GIVEN = ("prompts", "completions", "prompt_ids", "completion_ids", "ended")
Function = Callable[..., Any]


@dataclass(frozen=True)
class Scores:
    """The rewards of N completions."""

    totals: list[float | None]  # (N,)
    each: list[list[float | None]]  # (N, functions): without weights
    texts: list[str]  # (N,)


def exact_answer(pattern: str | None, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the last match of `pattern` in the completion equals its match in the column `answer`. Without a pattern, or
    without a match in the column, the whole text is compared."""

    def right(said: str, expected: str) -> bool:
        if pattern is None:
            return said.strip() == expected.strip()
        expected_part = last_match(pattern, expected)
        return last_match(pattern, said) == (expected.strip() if expected_part is None else expected_part)

    return [float(right(said, str(expected))) for said, expected in zip(completions, answer, strict=True)]


def format_found(pattern: str, completions: Sequence[str], **_: Any) -> list[float]:
    """1 if `pattern` matches the whole completion; a dot matches any character."""
    return [float(re.fullmatch(pattern, said.strip(), re.DOTALL) is not None) for said in completions]


def length(
    pattern: str | None, completion_ids: Sequence[Sequence[int]], ended: Sequence[bool], **_: Any
) -> list[float]:
    """From 0 down to -1 for the longest completion of the round, in proportion to its tokens; -1 for a cut
    completion."""
    longest = max(len(ids) for ids in completion_ids)
    return [-len(ids) / longest if done else -1.0 for ids, done in zip(completion_ids, ended, strict=True)]


BUILT_IN: dict[str, Function] = {"exact_answer": exact_answer, "format": format_found, "length": length}


def rewards_of(settings: Sequence[Reward | str]) -> list[Reward]:
    """Each of the settings as a `Reward`. Raises ValueError if there are none."""
    if not settings:
        raise ValueError(
            "rewards is empty. Set your own function (rewards=[my_rewards.py:right]), a built-in one "
            "(rewards=[exact_answer]) or the folder of a reward model."
        )
    found = []
    for one in settings:
        is_model = isinstance(one, str) and one not in BUILT_IN and Path(one).expanduser().is_dir()
        found.append(Reward.model_validate({"model" if is_model else "function": one}) if isinstance(one, str) else one)
    return found


def check_rewards(settings: Sequence[Reward | str]) -> None:
    """Raise ValueError as `Rewards` does, without loading a model or running a file."""
    for one in rewards_of(settings):
        if one.model is None:
            _load(one, check_function)
        elif repository_name(one.model) is None:
            find_finished(one.model, QUICK_BYTES)


class Rewards:
    """`score(prompts, samples)`: the rewards of N completions."""

    def __init__(
        self, settings: Sequence[Reward | str], tokenizer: Tokenizer, device: str = "auto", ranks: Ranks = ALONE
    ) -> None:
        """Load functions, and models onto `device`. Rank 0 judges for all `ranks`. Raises ValueError for an invalid
        reward."""
        self._settings, self._tokenizer, self._ranks = rewards_of(settings), tokenizer, ranks
        self._functions: list[Function] = []
        if ranks.rank == 0:
            for one in self._settings:
                own = one.model is not None
                self._functions.append(JudgingModel(one.name, device, tokenizer) if own else _load(one))

    def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Scores:
        """prompts, samples: N of each. Raises TrainingFailed, with the row's place, if a function raises, or returns
        anything but a finite number or None for each completion."""
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
        with contextlib.chdir("."):  # a function may change the current directory
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
            with slow_calls_reported(f"the reward {name}"):
                values = await _call(function, taken)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too: it would end the run as if it were complete
            place = await _failing(function, prompts, taken)
            raise TrainingFailed(
                f"the reward {name} failed at {place}: {type(error).__name__}: {error}\nThe run keeps its last "
                "completed step. Fix the function and repeat the command."
            ) from error
        return _checked(name, values, prompts)


async def _call(function: Function, taken: dict[str, list[Any]]) -> Any:
    values = function(**copy.deepcopy(taken))  # it may change its arguments
    return await values if inspect.isawaitable(values) else values


async def _failing(function: Function, prompts: Sequence[Prompt], taken: dict[str, list[Any]]) -> str:
    """The place of the first row for which the function fails alone."""
    for i, prompt in enumerate(prompts):
        try:
            await _call(function, {name: values[i : i + 1] for name, values in taken.items()})
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException:
            return prompt.place
    return f"a round of {len(prompts)} answers, but at no single answer (the first prompt is {prompts[0].place})"


def _taken(name: str, function: Function, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The arguments that a function names, or all of them if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        # TRL gives its functions no prompt_ids.
        taken = {name: values for name, values in given.items() if name != "prompt_ids"}
    else:
        taken = {one.name: given[one.name] for one in named if one.name in given}
    missing = [one.name for one in named if one.default is one.empty and one.name not in given]
    if missing:
        columns = [column for column in given if column not in GIVEN]
        raise ValueError(
            f"the reward {name} has the parameter {', '.join(missing)}, but the rows have no such column. Columns: "
            f"{', '.join(columns) or 'none'}; other arguments: {', '.join(GIVEN)}.{did_you_mean(missing[0], [*given])}"
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
        except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor with several values, or 10**400
            number = None
        if value is not None and (number is None or not math.isfinite(number)):
            raise TrainingFailed(
                f"the reward {name} returned {str(value)[:80]} at {prompt.place}; expected a finite number, or None for no reward."
            )
        numbers.append(number)
    return numbers


def _load(reward: Reward, load: Callable[[str], Any] = load_function) -> Function:
    assert reward.function is not None
    if ":" not in reward.function:
        if reward.function not in BUILT_IN:
            raise ValueError(
                f"unknown reward '{reward.function}'.{did_you_mean(reward.function, BUILT_IN)} Expected {', '.join(BUILT_IN)}, "
                "your own function (my_rewards.py:name), or the folder of a reward model."
            )
        built_in, pattern = BUILT_IN[reward.function], reward.pattern
        if reward.function == "format" and pattern is None:
            raise ValueError(
                "the reward `format` needs `pattern`, a regular expression. Set it: rewards=[{function: format, pattern: ...}]."
            )
        return partial(built_in, pattern)
    if reward.pattern is not None:
        raise ValueError(
            f"rewards: only {' and '.join(BUILT_IN)} use `pattern`, and {reward.function} is your own function. Remove `pattern`."
        )
    try:
        return load(reward.function)
    except ValueError as error:
        raise ValueError(f"rewards: {error}") from error
