"""Environments of episodes, in the forms that people write.

    class Env:                                        class Env:
        def reset(self, row): ...                         def reset(self, **row): ...
        def step(self, action): ...                       def any_method(self, word: str) -> str: ...
                                                          def get_reward(self): ...

On the left, `action` is the text of a turn without calls, and `step` returns (observation, reward, done). On the right, the
public methods are tools: TRL's `environment_factory`. `reset` returns a text that is added to the last message of the
prompt, messages that follow it, or None.

A `gymnasium.Env` has `reset(seed=, options=)`. Its action is the text if the action space contains it, or else the last whole
number of the text. An OpenEnv client, or an OpenEnv environment in this process, has `parse_action(text)`, which the user
adds. `format_observation(observation)`, if there is one, writes the observations of both as text.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from threading import Thread
from typing import Any, NamedTuple

from lean_ft.data.chats import check_text
from lean_ft.system.user_functions import load_function
from lean_ft.training.bad_steps import TrainingFailed


class Reply(NamedTuple):
    """What an environment answers to a turn."""

    observation: str
    reward: float | None = None
    done: bool = False
    failed: bool = False
    """Whether the turn was no action, and the observation says so."""


class Environment:
    """An environment's class or factory, `my_env.py:Env`. Its objects are used again in later rounds, after a reset."""

    def __init__(self, name: str, awaited: Callable[[Any], Any]) -> None:
        """awaited: returns the value of an awaitable, and other values unchanged.

        Raises ValueError if it cannot be loaded, or its objects lack `reset`, or `step` and methods.
        """
        self.name, self.make, self._awaited = name, load_function(name), awaited
        with failing(name, "cannot be made", ValueError):
            self.objects = [probe] = [self.make()]
        if not callable(getattr(probe, "reset", None)):
            raise ValueError(f"environment={name} has no reset. Add reset(self, row), or reset(self, **row).")
        kinds = {name: one.kind for name, one in inspect.signature(probe.reset).parameters.items()}
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
        is_openenv = all(hasattr(probe, one) for one in ("step", "state", "close"))
        if not self.has_steps and (is_openenv or not self.methods_of(probe)):
            raise ValueError(
                f"environment={name} has neither step(self, action) and reset(self, row), nor public methods, which would be "
                "tools. Add them. An environment of OpenEnv needs parse_action(self, text), which returns its action."
            )
        if self._form == "gymnasium" and not hasattr(probe, "parse_action"):
            space = probe.action_space
            if not isinstance(space.sample(), str | Integral):
                raise ValueError(
                    f"environment={name} has the action space {space}, and a turn can be a text or a whole number. Add "
                    "parse_action(self, text), which returns the action, to a wrapper of it."
                )

    def methods_of(self, environment: Any) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        found = inspect.getmembers(type(environment), inspect.isfunction)
        private = ("reset", "get_reward", "state_dict", "load_state_dict")
        names = [name for name, _ in found if name not in private and not name.startswith("_")]
        return [] if self.has_steps else [getattr(environment, name) for name in names]

    def object(self, number: int) -> Any:
        """The environment of this number."""
        while len(self.objects) <= number:
            self.objects.append(self.make())
        return self.objects[number]

    def replace(self, number: int) -> None:
        """Make a new environment in place of one that hangs, and close that one without waiting."""
        left, self.objects[number] = self.objects[number], self.make()
        Thread(target=self._close, args=(left,), daemon=True).start()

    def _close(self, left: Any) -> None:
        with suppress(Exception):
            self._awaited(left.close())

    def reset(self, environment: Any, row: dict[str, Any], seed: int) -> Any:
        """Return the first observation: a text, messages or None. A row's own `seed` replaces the seed."""
        seeded = {"seed": seed, **row}
        match self._form:
            case "row":
                return self._awaited(environment.reset(row))
            case "methods":
                return self._awaited(environment.reset(**row))
            case "gymnasium":
                seen, _ = self._awaited(environment.reset(seed=seeded["seed"], options=row))
            case _:
                given = {name: value for name, value in seeded.items() if self._names is None or name in self._names}
                found = self._awaited(environment.reset(**given))
                seen = getattr(found, "observation", found)
        text = _written(environment, seen)
        return f"\n{text}" if text else None

    def step(self, environment: Any, text: str) -> Reply:
        """Act, and return what follows."""
        if self._form == "row":
            seen, reward, done = self._awaited(environment.step(text))
            seen = "" if seen is None else check_text(seen, "the observation")
        else:
            try:
                action = _action(environment, text)
            except ValueError as error:
                return Reply(f"error: {error}", failed=True)
            found = self._awaited(environment.step(action))
            if self._form == "gymnasium":
                seen, reward, is_terminal, is_late, _ = found
                done = is_terminal or is_late
            else:
                seen, reward, done = getattr(found, "observation", found), found.reward, found.done
            seen = _written(environment, seen)
        return Reply(seen, None if reward is None else float(reward), bool(done))

    def reward(self, environment: Any) -> float | None:
        """The reward of an environment whose methods are tools, if it has one."""
        return float(self._awaited(environment.get_reward())) if hasattr(environment, "get_reward") else None


def _action(environment: Any, text: str) -> Any:
    """Raises ValueError for a text that is no action; the model reads it."""
    if hasattr(environment, "parse_action"):
        return environment.parse_action(text)
    space = environment.action_space
    numbers = [int(number) for number in re.findall(r"-?\d+", text)[-1:]]
    for action in (text, *numbers):
        if space.contains(action):
            return action
    raise ValueError(f"this is no action. Actions: {space}.")


def _written(environment: Any, seen: Any) -> str:
    """An observation as text."""
    if hasattr(environment, "format_observation"):
        seen = environment.format_observation(seen)
    return seen if isinstance(seen, str) else json.dumps(seen, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """An array as lists, and an OpenEnv observation as its own fields."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude={"done", "reward", "metadata"})
    return value.tolist()


@contextmanager
def failing(name: str, what: str, kind: type[Exception] = TrainingFailed) -> Iterator[None]:
    """Raise the errors of an environment's code with its name."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise kind(f"environment={name} {what}: {type(error).__name__}: {error}") from error
