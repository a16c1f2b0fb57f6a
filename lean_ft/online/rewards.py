"""Rewards of completions: the user's functions, built-in functions, and reward models.

A function takes the lists `prompts` and `completions` and returns a number for each completion, or None if it cannot
judge one. Both are texts, or for prompts of messages lists of messages: `[{"role": "assistant", "content": ...}]`. It
gets further arguments by name: columns of the rows (`answer`), `prompt_ids`, `completion_ids`, `ended` (whether the
completion was not cut), `trainer_state`, `log_metric` and `log_extra`. It may be `async`; async functions run
concurrently. A completion's reward is the weighted sum of all functions, or None if no function judges it.

With tools or an environment, the messages of a completion are those of all its turns, with `tool_calls` and results,
and there are the arguments `environments` (in one process) and `environment_reward`.

    def right(prompts, completions, answer):
        return [float(said.strip() == expected) for said, expected in zip(completions, answer)]

Source: TRL's protocol, so that its reward functions run here.
"""

import inspect
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lean_ft.data import Prompt
from lean_ft.data.columns import Document
from lean_ft.frozen.reward_model import JudgingModel
from lean_ft.generation import Completion
from lean_ft.hub.paths import repository_name
from lean_ft.models.device import resolve_device
from lean_ft.online.episodes import Episode
from lean_ft.online.math_answers import math_answer
from lean_ft.peft.finished_models import find_finished
from lean_ft.settings import Reward
from lean_ft.system.foreign_values import valid_text
from lean_ft.system.log import say
from lean_ft.system.shards import ALONE, Ranks
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.unchanged_process import UnchangedProcess
from lean_ft.system.units import counted
from lean_ft.system.user_code import Caller, Failed, as_json, finite_number, settle
from lean_ft.system.user_functions import (
    check_function,
    load_function,
    name_one_of,
    names_in,
    without_os_exit,
)
from lean_ft.tokenizers import Tokenizer
from lean_ft.training.answers import last_match
from lean_ft.training.bad_steps import TrainingFailed
from lean_ft.training.run import Run

GIVEN = ("prompts", "completions", "prompt_ids", "completion_ids", "ended", "trainer_state", "log_metric", "log_extra")
Function = Callable[..., Any]


@dataclass(frozen=True)
class Scores:
    """The rewards of N completions."""

    totals: list[float | None]  # (N,)
    each: list[list[float | None]]  # (N, functions): without weights
    texts: list[str]  # (N,)
    extras: dict[str, list[Any]] = field(default_factory=dict)  # of `log_extra`: (N,) of each column


def exact_answer(pattern: str | None, completions: Sequence[str], answer: Sequence[Any], **_: object) -> list[float]:
    """1 if the last match of `pattern` in the completion equals its match in the column `answer`. Without a pattern, or
    without a match in the column, the whole text is compared."""

    def right(said: str, expected: str) -> bool:
        if pattern is None:
            return said.strip() == expected.strip()
        expected_part = last_match(pattern, expected)
        return last_match(pattern, said) == (expected.strip() if expected_part is None else expected_part)

    return [float(right(said, str(expected))) for said, expected in zip(completions, answer, strict=True)]


def format_found(pattern: str, completions: Sequence[str], **_: object) -> list[float]:
    """1 if `pattern` matches the whole completion; a dot matches any character."""
    return [float(re.fullmatch(pattern, said.strip(), re.DOTALL) is not None) for said in completions]


def length(
    pattern: str | None, completion_ids: Sequence[Sequence[int]], ended: Sequence[bool], **_: object
) -> list[float]:
    """From 0 down to -1 for the longest completion of the round, in proportion to its tokens; -1 for a cut
    completion."""
    longest = max(len(ids) for ids in completion_ids)
    return [-len(ids) / longest if done else -1.0 for ids, done in zip(completion_ids, ended, strict=True)]


def of_environment(pattern: str | None, environment_reward: Sequence[float | None], **_: object) -> list[float | None]:
    """The environment's own reward."""
    return list(environment_reward)


BUILT_IN: dict[str, Function] = {
    "exact_answer": exact_answer,
    "math_answer": math_answer,
    "format": format_found,
    "length": length,
    "environment": of_environment,
}
READ_PATTERN = ("exact_answer", "format")


def rewards_of(settings: Sequence[Reward | str | Function]) -> list[Reward]:
    """Each of the settings as a `Reward`. Raises ValueError if there are none."""
    if not settings:
        raise ValueError(
            "rewards is empty. Set your own function (rewards=my_rewards.py:right), a built-in one "
            "(rewards=exact_answer) or the folder of a reward model."
        )
    found = []
    for one in settings:
        is_model = isinstance(one, str) and one not in BUILT_IN and Path(one).expanduser().is_dir()
        kind = "model" if is_model else "function"
        found.append(one if isinstance(one, Reward) else Reward.model_validate({kind: one}))
    functions = [str(reward.function) for reward in found if reward.function is not None]
    for name in functions:
        if ":" not in name and name not in BUILT_IN:
            raise ValueError(_unknown(name, [other.rpartition(":")[0] for other in functions if ":" in other]))
    return found


def _unknown(name: str, files: Sequence[str]) -> str:
    """Return the message for the name of no reward. `files`: of the other rewards, which may have this function."""
    hint = next((f" Did you mean '{file}:{name}'?" for file in files if name in names_in(Path(file).expanduser())), "")
    hint = hint or name_one_of(name) or did_you_mean(name, BUILT_IN)
    if repository_name(name) is not None:
        hint += f" A reward model of the Hub is 'rewards=[{{model: {name}}}]'."
    return (
        f"unknown reward '{name}'.{hint} Expected {', '.join(BUILT_IN)}, your own function (my_rewards.py:name), or "
        "the folder of a reward model."
    )


def check_rewards(settings: Sequence[Reward | str]) -> None:
    """Raise ValueError as `Rewards` does, without loading a model or running a file."""
    for one in rewards_of(settings):
        if one.model is None:
            _load(one, check_function)
        elif repository_name(one.model) is None:
            find_finished(one.model, quick=True)


class Rewards:
    """`score(prompts, completions)`: the rewards of N completions. Set `run` for `trainer_state` and `log_metric`."""

    run: Run | None = None

    def __init__(
        self, settings: Sequence[Reward | str], tokenizer: Tokenizer, device: str = "auto", ranks: Ranks = ALONE
    ) -> None:
        """Load functions, and models onto `device`. Rank 0 judges for all `ranks`. Raises ValueError for an invalid
        reward."""
        self._settings, self._tokenizer, self._ranks = rewards_of(settings), tokenizer, ranks
        self._functions: list[Function] = []
        self._ignores_environment = False  # and that was reported
        self._unchanged = UnchangedProcess(resolve_device(device))
        if ranks.rank == 0:
            for one in self._settings:
                own = one.model is not None
                self._functions.append(JudgingModel(one.name, device, tokenizer) if own else _load(one))

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Scores:
        """prompts, completions: N of each. Raises TrainingFailed, with the row's place, if a function raises or exits,
        or returns anything but a finite number or None for each completion."""
        return self._ranks.on_rank_zero(lambda: self._judged(prompts, completions))

    def _judged(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Scores:
        texts = [self._text(one) for one in completions]
        episodes = [one for one in completions if isinstance(one, Episode)]
        asked = {i: one for i, one in enumerate(completions) if isinstance(one, Episode) and one.asked}
        extras = defaultdict[str, list[Any]](list)

        def log_extra(column: str, values: Iterable[Any]) -> None:
            name = valid_text(str(column))
            extras[name] += as_json(list(values), f"log_extra({name!r}, ...)", otherwise=str)  # a checkpoint holds JSON

        given: dict[str, Any] = {
            "prompts": [asked[i].prompt if i in asked else prompt.asked for i, prompt in enumerate(prompts)],
            "completions": [
                text if isinstance(prompt.asked, str) else _messages(one, text)
                for prompt, one, text in zip(prompts, completions, texts, strict=True)
            ],
            "prompt_ids": [asked[i].asked if i in asked else prompt.ids for i, prompt in enumerate(prompts)],
            "completion_ids": [one.ids for one in completions],
            "ended": [one.ended for one in completions],
            "log_extra": log_extra,
        }
        if any(one.environment is not None for one in episodes):
            given["environments"] = [one.environment for one in episodes]
        if len(episodes) == len(completions):
            given["environment_reward"] = own = [one.reward for one in episodes]
            is_read = self._ignores_environment or "environment" in [one.name for one in self._settings]
            if own != [None] * len(own) and not is_read:
                self._ignores_environment = True
                say("WARNING", "the environment's own rewards are not added, because rewards has no `environment`")
        if self.run is not None:
            given |= {"trainer_state": self.run.trainer_state, "log_metric": self.run.log_metric}
        for name in {name for prompt in prompts for name in prompt.columns} - {*GIVEN, *given}:
            given[name] = [prompt.columns.get(name) for prompt in prompts]
        with without_os_exit():
            columns = self._columns(prompts, completions, given, texts)
        for column, values in extras.items():
            if len(values) != len(prompts):
                raise TrainingFailed(
                    f"log_extra({column!r}, ...) got {len(values)} values for {len(prompts)} answers; expected one for "
                    "each."
                )
        each = [list(row) for row in zip(*columns, strict=True)]
        weights = [one.weight for one in self._settings]
        totals: list[float | None] = []
        for row in each:
            judged = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
            totals.append(sum(judged) if judged else None)
        return Scores(totals, each, texts, extras)

    def _text(self, one: Completion) -> str:
        """The text of a completion; of several turns, that of the last one."""
        if isinstance(one, Episode):
            return next((said["content"] for said in reversed(one.messages) if said["role"] == "assistant"), "")
        return self._tokenizer.decode(one.ids, skip_special_tokens=True)

    def _columns(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], given: dict[str, Any], texts: list[str]
    ) -> list[list[float | None]]:
        """Call the functions one after another. Those that are async then run concurrently."""
        documents = [
            Document.of(one.asked) if isinstance(one, Episode) and one.asked else prompt.text
            for prompt, one in zip(prompts, completions, strict=True)
        ]
        sampled_ids = [list(compress(one.ids, one.sampled)) if one.sampled else one.ids for one in completions]
        names, calls, found = [one.name for one in self._settings], [], list[Any]()
        seed = zlib.crc32(repr(given["completion_ids"]).encode())  # by round, so that a resumed run has it too
        for one, function in zip(self._settings, self._functions, strict=True):
            reads_texts = one.model is not None or one.function in BUILT_IN
            of_models: dict[str, Any] = {"completions": texts, "documents": documents}
            if one.model is None:  # a length is that of sampled tokens
                of_models["completion_ids"] = sampled_ids
            taken = _taken(one.name, function, given | of_models if reads_texts else given)
            calls.append(partial(_begun, one.name, function, taken, reads_texts))
            with self._unchanged(f"the reward {one.name}", seed):
                found.append(calls[-1](slice(None)))
        found = self._settled(names, found, seed)
        for name, call, value in zip(names, calls, found, strict=True):
            if isinstance(value, Failed):
                raise TrainingFailed(
                    f"the reward {name} failed at {self._failing(name, call, prompts)}: {value}\nThe run keeps its "
                    "last completed step. Fix the function and repeat the command."
                ) from value.error
        return [_checked(name, values, prompts) for name, values in zip(names, found, strict=True)]

    def _settled(self, names: Sequence[str], found: Sequence[Any], seed: int) -> list[Any]:
        """Wait for results that are awaitable. The event loop runs in another thread, where torch's modes must be set
        again."""
        waiting = [name for name, value in zip(names, found, strict=True) if inspect.isawaitable(value)]
        computes_gradients = torch.is_grad_enabled()

        @contextmanager
        def around() -> Iterator[None]:
            with (
                torch.set_grad_enabled(computes_gradients),
                self._unchanged(f"the reward {' or '.join(waiting)}", seed),
            ):
                yield

        return settle(found, [f"the reward {name}" for name in names], around=around)

    def _failing(self, name: str, call: Callable[[slice], Any], prompts: Sequence[Prompt]) -> str:
        """The place of the first row for which the function fails alone."""
        for i, prompt in enumerate(prompts):
            if isinstance(settle([call(slice(i, i + 1))], [f"the reward {name}"])[0], Failed):
                return prompt.place
        return f"a round of {len(prompts)} answers, but at no single answer (the first prompt is {prompts[0].place})"


def _messages(one: Completion, text: str) -> list[dict[str, Any]]:
    return one.messages if isinstance(one, Episode) else [{"role": "assistant", "content": text}]


def _begun(name: str, function: Function, taken: dict[str, Any], is_ours: bool, rows: slice) -> Any:
    """Call a reward function for these rows. Its result may be awaitable, or a Failed."""
    taken = {key: values[rows] if isinstance(values, list) else values for key, values in taken.items()}
    # Built-in functions change nothing. Environments are passed as they are.
    shared = taken if is_ours else {"environments": taken["environments"]} if "environments" in taken else {}
    copies = {key: values for key, values in taken.items() if key not in shared}

    def listed(**copies: object) -> Any:
        found = function(**copies, **shared)
        return list(found) if isinstance(found, Iterator) else found

    return Caller(f"the reward {name}").begin(listed, **copies)


def _taken(name: str, function: Function, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function names, or all of them if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    taken = {one.name: given[one.name] for one in named if one.name in given}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):  # TRL passes no prompt_ids
        taken |= {name: values for name, values in given.items() if name != "prompt_ids"}
    missing = [one.name for one in named if one.default is one.empty and one.name not in given]
    if missing:
        columns = [column for column in given if column not in GIVEN]
        raise ValueError(
            f"the reward {name} has the parameter {', '.join(missing)}, but the rows have no such column. Columns: "
            f"{', '.join(columns) or 'none'}; other arguments: {', '.join(GIVEN)} (trainer_state and log_metric if the "
            f"recipe sets score.run = run).{did_you_mean(missing[0], [*given])}"
        )
    return taken


def _checked(name: str, values: Any, prompts: Sequence[Prompt]) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values
    values = list(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes | dict) else values
    if not isinstance(values, list) or len(values) != len(prompts):
        came = counted(len(values), "values") if isinstance(values, list) else f"a {type(values).__name__}"
        raise TrainingFailed(
            f"the reward {name} returned {came} for {len(prompts)} answers; expected a list with a number or None for "
            "each."
        )
    numbers: list[float | None] = []
    for value, prompt in zip(values, prompts, strict=True):
        try:
            numbers.append(finite_number(value))
        except ValueError:
            raise TrainingFailed(
                f"the reward {name} returned {valid_text(str(value))[:80]} at {prompt.place}; expected a finite "
                "number, or None for no reward."
            ) from None
    return numbers


def _load(reward: Reward, load: Callable[[str], Any] = load_function) -> Function:
    assert reward.function is not None
    if reward.function == "format" and reward.pattern is None:
        raise ValueError(
            "the reward `format` needs `pattern`, a regular expression. Set it: 'rewards={function: format, "
            "pattern: ...}'."
        )
    if reward.pattern is not None and reward.function not in READ_PATTERN:
        raise ValueError(
            f"rewards: only {' and '.join(READ_PATTERN)} use `pattern`, and {reward.function} does not. Remove "
            "`pattern`."
        )
    if ":" not in reward.function:
        return partial(BUILT_IN[reward.function], reward.pattern)
    try:
        loaded = load(reward.function)
    except ValueError as error:
        raise ValueError(f"rewards: {error}") from error
    if isinstance(loaded, nn.Module) and "completions" not in inspect.signature(loaded.forward).parameters:
        raise ValueError(
            f"rewards: a {type(loaded).__name__} is a model, and a reward is a function of texts. Save the model with "
            "its tokenizer, model.save_pretrained('judge') and tokenizer.save_pretrained('judge'), and set "
            "'rewards=[{model: judge}]'."
        )
    return loaded
