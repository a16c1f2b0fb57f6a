"""Environments of episodes, in the forms that people write.

    class Env:                                        class Env:
        def reset(self, row): ...                         def reset(self, **row): ...
        def step(self, action): ...                       def any_method(self, word: str) -> str: ...
                                                          def get_reward(self): ...

On the left, `action` is the text of a turn without calls, and `step` returns (observation, reward, done). On the right,
the
public methods are tools: TRL's `environment_factory`. `reset` returns a text that is added to the last message of the
prompt, messages that follow it, or None.

A `gymnasium.Env` has `reset(seed=, options=)`. Its action is the text if the action space contains it, or else the last
whole number of the text. An OpenEnv client, or an OpenEnv environment in this process, has `parse_action(text)`, which
the user adds. `format_observation(observation)`, if there is one, writes the observations of both as text.

All methods of an object run in one thread, one after another, and get copies (`lean_ft.system.user_code`).
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Integral
from threading import Thread
from typing import Any, NamedTuple

from lean_ft.settings import ToolsConfig
from lean_ft.system.foreign_values import JSON
from lean_ft.system.log import say, slow_calls_reported
from lean_ft.system.user_code import (
    Caller,
    CallThread,
    Failed,
    as_json,
    as_text,
    close_later,
    close_objects,
    cut,
    finite_number,
)
from lean_ft.system.user_functions import load_factory
from lean_ft.training.bad_steps import TrainingFailed

NO_TOOLS = ("reset", "get_reward", "state_dict", "load_state_dict", "close", "render", "seed")


class Reply(NamedTuple):
    """What an environment answers to a turn."""

    observation: str
    reward: float | None = None
    done: bool = False
    failed: bool = False
    """Whether the turn was no action, and the observation says so."""


class Environment:
    """An environment's class or factory, `my_env.py:Env`. Its objects are used again in later rounds, after a reset.

    Its methods raise Failed and ValueError. When the run ends, all objects are closed.
    """

    def __init__(self, name: str, settings: ToolsConfig) -> None:
        """settings: for the limits. Raises ValueError if it cannot be loaded, or its objects lack `reset`, or `step`
        and methods."""
        self.name, self._make, self._settings = name, load_factory(name), settings
        self.objects: list[Any] = []  # None: to be made
        self._threads: list[CallThread] = []  # of the objects
        self._reported = set[str]()
        close_later(self._close)
        with failing(name, "cannot be made", ValueError):
            probe = self.object(0)
        if not callable(getattr(probe, "reset", None)):
            raise ValueError(f"environment={name} has no reset. Add reset(self, row), or reset(self, **row).")
        with failing(name, "has a reset whose parameters cannot be read", ValueError):
            kinds = {name: parameter.kind for name, parameter in inspect.signature(probe.reset).parameters.items()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self._names = None if takes_all else kinds.keys()  # of reset
        steps = callable(getattr(probe, "step", None))
        if steps and {"seed", "options"} <= kinds.keys():
            self._form = "gymnasium"
        elif len(kinds) == 1 and not takes_all:
            self._form = "row"
        else:
            self._form = "openenv" if steps and hasattr(probe, "parse_action") else "methods"
        self.has_steps = steps and self._form != "methods"
        self.has_state = hasattr(probe, "state_dict") and hasattr(probe, "load_state_dict")
        is_openenv = all(hasattr(probe, method) for method in ("step", "state", "close"))
        if not self.has_steps and (is_openenv or not self.methods_of(probe)):
            raise ValueError(
                f"environment={name} has neither step(self, action) and reset(self, row), nor public methods, which "
                "would be tools. Add them. An environment of OpenEnv needs parse_action(self, text), which returns "
                "its action."
            )
        if self._form == "gymnasium" and not hasattr(probe, "parse_action"):
            if (space := getattr(probe, "action_space", None)) is None:
                raise ValueError(f"environment={name} has no action_space. Add it, or parse_action(self, text).")
            if not isinstance(space.sample(), str | Integral):
                raise ValueError(
                    f"environment={name} has the action space {space}, and a turn can be a text or a whole number. Add "
                    "parse_action(self, text), which returns the action, to a wrapper of it."
                )

    def methods_of(self, environment: Any) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        functions = inspect.getmembers(type(environment), inspect.isfunction)
        names = [name for name, _ in functions if name not in NO_TOOLS and not name.startswith("_")]
        return [] if self.has_steps else [getattr(environment, name) for name in names]

    def object(self, number: int) -> Any:
        """Return the environment of this number, and make it if there is none. Raises ValueError if another number has
        the same object."""
        while len(self.objects) <= number:
            self.objects.append(None)
            self._threads.append(CallThread())
        if self.objects[number] is None:
            with slow_calls_reported(f"environment={self.name}, which is being made,"):
                made = Caller(f"environment={self.name}", thread=self._threads[number]).call(self._make)
            if any(existing is made for existing in self.objects if existing is not None):
                raise ValueError("it returned the same object twice, and each completion needs its own")
            self.objects[number] = made
        return self.objects[number]

    def thread(self, number: int) -> CallThread:
        """The thread in which the methods of this environment run."""
        return self._threads[number]

    def leave(self, number: int) -> None:
        """Drop an environment that hangs, and close it without waiting. `object` then makes a new one."""
        hangs, self.objects[number] = self.objects[number], None

        def close() -> None:
            with suppress(Failed, AttributeError):
                Caller(f"environment={self.name}").call(hangs.close)

        Thread(target=close, daemon=True).start()

    def _close(self) -> None:
        made = [
            (instance, thread)
            for instance, thread in zip(self.objects, self._threads, strict=True)
            if instance is not None
        ]
        self.objects, self._threads = [], []
        if made:
            with slow_calls_reported(f"close of environment={self.name}"):
                close_objects(made, f"environment={self.name}", self._settings.seconds)

    def reset(self, number: int, row: dict[str, Any], seed: int) -> Any:
        """Return the first observation: a text, messages or None. A row's own `seed` replaces the seed."""
        seeded = {"seed": seed, **row}
        with slow_calls_reported(f"environment={self.name}"):
            match self._form:
                case "row":
                    return self._beginning(self._call(number, "reset", row))
                case "methods":
                    return self._beginning(self._call(number, "reset", **row))
                case "gymnasium":
                    result = self._call(number, "reset", seed=seeded["seed"], options=row)
                    seen, _ = _parts(result, 2, "reset", "(observation, info)")
                case _:
                    names = [name for name in seeded if self._names is None or name in self._names]
                    result = self._call(number, "reset", **{name: seeded[name] for name in names})
                    seen = getattr(result, "observation", result)
            text = self._written(number, seen, "reset")
        return f"\n{text}" if text else None

    def step(self, number: int, text: str) -> Reply:
        """Act, and return what follows."""
        if self._form == "row":
            result = self._call(number, "step", text)
            seen, reward, done = _parts(result, 3, "step", "(observation, reward, whether the episode is over)")
            seen = "" if seen is None else self._text(seen, "step")
        else:
            try:
                action = self._action(number, text)
            except ValueError as error:
                return Reply(self._text(f"error: {error}", "parse_action"), failed=True)
            # The action comes from the user's own code, so it is not copied.
            result = self._call(number, partial(self.objects[number].step, action))
            if self._form == "gymnasium":
                expected = "(observation, reward, terminated, truncated, info)"
                seen, reward, is_terminal, is_late, _ = _parts(result, 5, "step", expected)
                done = is_terminal or is_late
            elif hasattr(result, "reward") and hasattr(result, "done"):
                seen, reward, done = getattr(result, "observation", result), result.reward, result.done
            else:
                raise ValueError(f"step returned a {type(result).__name__}; expected a result with reward and done")
            seen = self._written(number, seen, "step")
        return Reply(seen, _reward(reward, "step"), _flag(done))

    def reward(self, number: int) -> float | None:
        """The reward of an environment whose methods are tools, if it has one."""
        if not hasattr(self.objects[number], "get_reward"):
            return None
        with slow_calls_reported(f"environment={self.name}"):
            return _reward(self._call(number, "get_reward"), "get_reward")

    def state(self, number: int) -> Any:
        """A copy of the state, as a resumed run reads it."""
        try:
            return json.loads(json.dumps(self._call(number, "state_dict")))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"state_dict returned a value that JSON cannot hold: {error}") from None

    def load_state(self, number: int, state: JSON) -> None:
        self._call(number, "load_state_dict", state)

    def _call(self, number: int, method: str | Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Call a method of an object, by its name or as a function. Raises Failed."""
        function = getattr(self.objects[number], method) if isinstance(method, str) else method
        caller = Caller(f"environment={self.name}", self._settings.seconds, self._threads[number])
        return caller.call(function, *arguments, **named)

    def _action(self, number: int, text: str) -> Any:
        """Return the action for a text. Raises ValueError for a text that is no action; the model reads this error."""
        environment = self.objects[number]
        if hasattr(environment, "parse_action"):
            try:
                return self._call(number, "parse_action", text)
            except Failed as failed:
                if isinstance(failed.error, ValueError):
                    raise ValueError(str(failed.error)) from None
                raise
        space = environment.action_space
        numbers = [int(number) for number in re.findall(r"-?\d+", text)[-1:]]
        for action in (text, *numbers):
            if space.contains(action):
                return action
        raise ValueError(f"this is no action. Actions: {space}.")

    def _beginning(self, observation: JSON) -> JSON:
        """Check what `reset` returned. Return a text, messages or None."""
        if observation is None or isinstance(observation, str):
            return observation if observation is None else self._text(observation, "reset")
        messages: JSON = as_json(observation, "reset")
        messages = [messages] if isinstance(messages, dict) else messages
        if not isinstance(messages, list):
            raise ValueError(f"reset returned a {type(observation).__name__}; expected a text, messages or None")
        for message in messages:
            if isinstance(message, dict) and isinstance(content := message.get("content"), str):
                message["content"] = self._text(content, "reset")
        return messages

    def _written(self, number: int, seen: Any, what: str) -> str:
        """An observation as text, without the other fields of OpenEnv's observations."""
        environment = self.objects[number]
        if hasattr(environment, "format_observation"):
            seen = self._call(number, partial(environment.format_observation, seen))
        if hasattr(seen, "model_dump"):
            seen = seen.model_dump(exclude={"done", "reward", "metadata"})
        return self._text(seen, what)

    def _text(self, seen: Any, what: str) -> str:
        text, most = as_text(seen, what, sys.maxsize), self._settings.result_characters
        if len(text) > most and what not in self._reported:
            self._reported.add(what)
            say(
                "WARNING",
                f"environment={self.name}: {what} returned a text of {len(text):,} characters, which is cut after "
                f"tools.result_characters={most}. Later ones are not reported",
            )
        return cut(text, most)


def _parts(result: object, number: int, what: str, expected: str) -> Sequence[Any]:
    if isinstance(result, tuple | list) and len(result) == number:
        return result
    came = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
    raise ValueError(f"{what} returned {came}; expected {expected}")


def _reward(value: object, what: str) -> float | None:
    try:
        return finite_number(value)
    except ValueError as error:
        raise ValueError(f"{what} returned the reward {error}") from None


def _flag(done: object) -> bool:
    if isinstance(done, str | bytes):
        raise ValueError(f"step returned {done!r:.80} for whether the episode is over; expected true or false")
    return bool(done)


@contextmanager
def failing(name: str, what: str, error_class: type[Exception] = TrainingFailed) -> Iterator[None]:
    """Raise the errors of an environment's code with its name."""
    try:
        yield
    except TrainingFailed:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, Failed | ValueError) else f"{type(error).__name__}: {error}"
        cause = error.error if isinstance(error, Failed) else error
        raise error_class(f"environment={name} {what}: {reason}") from cause
