"""Load user code: a recipe's file, or a function that a setting names as FILE.py:FUNCTION.

A function that is passed from Python becomes such a text too, `functions/NAME-HASH.py:NAME`, because settings are text
in files and in other processes. The run directory gets its source, and this process keeps the function.
"""

import copy
import inspect
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from symtable import symtable
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

from lean_ft.system.foreign_values import JSON
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.world import world


class Passed(NamedTuple):
    """A function that was passed from Python."""

    function: Callable[..., Any]
    source: str | None = None  # its own, or that of its class; None if Python does not have it
    file: str = ""  # its file or the notebook's cell; the name of a class


PASSED: dict[str, Passed] = {}
"""By the texts that stand for them."""
_BUILT_IN = Path(__file__).resolve().parents[1] / "tools"


@dataclass
class OwnRow:
    """A user's row of a model family."""

    setting: str  # FILE.py:NAME
    by_option: bool = False  # named by an option of the command, not in settings
    # None until a model is read with it. Later edits of the file do not change the models of a run.
    row: Any = None


Returned = TypeVar("Returned")
OWN_FAMILIES: dict[str, OwnRow] = {}
"""By NAME."""
_HASH = re.compile(r"(?<=functions/)(\w+)-[0-9a-f]{8}(-\d+)?(?=\.py:)")


@dataclass(frozen=True)
class Copies:
    """Makes deep copies of an object, which itself stays as it is."""

    original: object

    def __call__(self) -> Any:
        try:
            return copy.deepcopy(self.original)
        except Exception as error:
            raise ValueError(
                f"{type(self.original).__name__} cannot be copied ({type(error).__name__}: {error}), and each "
                "completion needs its own. Pass its class, or a function that makes it"
            ) from error


def as_setting(value: object) -> object:
    """Return the text that stands for a function, a callable object or a class in settings. Return other values
    unchanged.

    A class is called, and its object is used. Raises ValueError for a class that needs arguments, or whose objects
    cannot be called.
    """
    if isinstance(value, type):
        value = _object_of(value)
        if not callable(value):
            name = type(value).__name__
            raise ValueError(f"{name} is a class whose objects cannot be called. Pass a function, or add __call__.")
    return _as_text(value) if callable(value) else value


def as_factory(value: object) -> str | None:
    """Return the text for a class or a function that makes objects in settings, or for an object with `reset`, which is
    copied for each. Return text and None unchanged. Raises ValueError for other objects."""
    if value is None or isinstance(value, str):
        return value
    if (factory := _factory(value)) is None:
        found_type = type(value).__name__
        raise ValueError(f"expected a class, or a function that makes objects, found a {found_type}. Pass the class.")
    return _as_text(factory)


def _object_of(made: type) -> Any:
    try:
        return made()
    except TypeError as error:
        raise ValueError(f"{made.__name__} is a class that needs arguments ({error}). Pass an object of it.") from None


def _factory(value: object) -> Callable[..., Any] | None:
    """Return what makes objects like `value`, or None if it is no environment, no class and no function."""
    if hasattr(value, "reset") and not isinstance(value, type):
        return Copies(value)
    return value if callable(value) else None


def _as_text(value: Callable[..., Any]) -> str:
    owner: Any = value.original if isinstance(value, Copies) else value
    while isinstance(owner, partial):
        owner = owner.func
    owner = inspect.unwrap(getattr(owner, "__func__", owner))
    owner = owner if inspect.isroutine(owner) or isinstance(owner, type) else type(owner)
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        source = None
    code = getattr(owner, "__code__", None)
    passed = Passed(value, source, code.co_filename if code else owner.__name__)
    name = re.sub(r"\W+", "_", owner.__name__).strip("_")
    start = f"functions/{name}-{blake2b((source or '').encode(), digest_size=4).hexdigest()}"
    texts = (f"{start}-{number}.py:{name}" if number > 1 else f"{start}.py:{name}" for number in count(1))
    # Objects of a class and lambdas of a line have the same source.
    return next(text for text in texts if _is_same(PASSED.setdefault(text, passed).function, value))


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Copies) and isinstance(other, Copies):
        return one.original is other.original
    return one is other


def without_hashes(value: JSON) -> Any:
    """A setting's JSON value without the hashes of functions that were passed from Python."""
    return json.loads(_HASH.sub(r"\1", json.dumps(value)))


def is_function_path(value: object) -> TypeGuard[str]:
    """Whether a setting's value has the form FILE.py:FUNCTION."""
    return isinstance(value, str) and value.rpartition(":")[0].endswith(".py")


def check_function(value: str, sort: str = "function") -> str:
    """Return `value`. Raises ValueError if it is FILE.py:FUNCTION without such a function; does not run the file."""
    if is_function_path(value) and value not in PASSED:
        file, name = _file_and_name(value)
        source = file.read_text(encoding="utf-8", errors="replace")
        try:
            symbols = symtable(source, str(file), "exec").get_symbols()
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}") from None
        if "import *" not in source and not any(symbol.get_name() == name and symbol.is_local() for symbol in symbols):
            named = [
                symbol.get_name()
                for symbol in symbols
                if symbol.is_namespace() or (sort == "row" and symbol.is_assigned())
            ]
            raise ValueError(_lacks(file, name, named, sort))
    return value


def check_factory(value: str) -> str:
    """`check_function` for FILE.py:CLASS, which may name a function that makes objects."""
    return check_function(value, "class or function")


def names_in(file: Path) -> list[str]:
    """The functions and classes that a file of Python defines, without running it; empty if there is no such file."""
    if file.suffix != ".py":
        return []
    try:
        symbols = symtable(file.read_text(encoding="utf-8", errors="replace"), str(file), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError):
        return []
    return [symbol.get_name() for symbol in symbols if symbol.is_namespace() and symbol.get_name()[:1] != "_"]


def name_one_of(path: str) -> str:
    """Return the end of a message for a Python file without the name of a function: which ones it has."""
    names = names_in(Path(path).expanduser())
    return f" {path} has {', '.join(names)}. Name one, such as {path}:{names[0]}." if names else ""


def load_function(value: str, planned: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the function FILE.py:FUNCTION, or an object of a class whose objects can be called. The file runs once per
    version, and may import modules of its folder.

    A plan runs no user code: it gets `planned` instead, or None for a function that it never calls. Raises ValueError
    if the file is missing, fails or lacks the function.
    """

    return _in_world(value, _function, planned)


def load_factory(value: str) -> Callable[..., Any]:
    """Return what makes the objects FILE.py:NAME: a class, a function, or copies of an object with `reset`. Raises
    ValueError as `load_function` does."""
    return _in_world(value, _factory, None)


def _in_world(
    value: str, read: Callable[[object], Callable[..., Any] | None], planned: Callable[..., Any] | None
) -> Callable[..., Any]:
    def checked() -> Any:
        check_function(value)
        return planned

    return world().read(lambda: _load(value, read), checked)


def load_code(value: str) -> Callable[..., Any]:
    """Return the class or function FILE.py:NAME, also in a plan. Raises ValueError as `load_function` does."""
    return _load(value, lambda code: code if callable(code) else None)


def _load(value: str, read: Callable[[object], Callable[..., Any] | None]) -> Callable[..., Any]:
    if value in PASSED:
        return PASSED[value].function
    file, name = _file_and_name(value)
    variables = vars(_module(file.resolve(), file.stat().st_mtime_ns))
    if name not in variables or (loaded := read(variables[name])) is None:
        raise ValueError(
            _lacks(file, name, [other for other, value in variables.items() if type(value) is type(is_function_path)])
        )
    return loaded


@cache
def _called(made: type) -> Any:
    """The object of a user's class. Each function of a file is one object, and so is this."""
    return _object_of(made)


def _function(value: object) -> Callable[..., Any] | None:
    if isinstance(value, type) and any("__call__" in vars(base) for base in value.__mro__):
        return _called(value)
    return value if callable(value) else None


def use_family(value: str | None, by_option: bool = False) -> str | None:
    """Return FILE.py:NAME. From now on, models of this family use that row in this process. Raises ValueError if the
    file lacks it."""
    if value is not None:
        if not is_function_path(value) or not value.rpartition(":")[2]:
            raise ValueError(
                f"expected FILE.py:NAME, a row in a file of yours, got {value!r}. A family that lean_ft reads needs no "
                "setting."
            )
        OWN_FAMILIES[value.rpartition(":")[2]] = OwnRow(check_function(value, "row"), by_option)
    return value


def load_value(value: str) -> Any:
    """Return the variable FILE.py:NAME, also in a plan. Raises ValueError as `load_function` does."""
    file, name = _file_and_name(value)
    variables = vars(_module(file.resolve(), file.stat().st_mtime_ns))
    if name not in variables:  # deleted by the file itself, or not part of its `import *`
        raise ValueError(_lacks(file, name, [], "row"))
    return variables[name]


@contextmanager
def without_os_exit() -> Iterator[None]:
    """Let `os._exit` raise SystemExit, except in forked processes. It would end the run with any exit code, even 0."""
    process, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        raise SystemExit(f"your function called os._exit({status}). Raise an exception or return a value instead.")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def file_digest(value: str) -> str:
    """Hex hash of the file in FILE.py:FUNCTION."""
    return blake2b(_file_and_name(value)[0].read_bytes(), digest_size=16).hexdigest()


def content_digest(value: str) -> str | None:
    """`file_digest`, or the hash of the source of a function that was passed from Python; None if it has no source."""
    if value not in PASSED:
        return file_digest(value)
    source = PASSED[value].source
    return None if source is None else blake2b(source.encode(), digest_size=16).hexdigest()


def check_shape(value: str, returned: Returned, shape: Sequence[int]) -> Returned:
    """Return `returned`, the function's result. Raises ValueError unless it is a tensor of that shape."""
    returned_shape: Sequence[int] | None = getattr(returned, "shape", None)
    if returned_shape is None or tuple(returned_shape) != tuple(shape):
        what = f"a {type(returned).__name__}" if returned_shape is None else f"shape {list(returned_shape)}"
        raise ValueError(f"{value} returned {what}; expected a tensor of shape {list(shape)}.")
    return returned


def run_file(file: Path, name: str) -> ModuleType:
    """Run a Python file as the module `name` and return it."""
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    # Registered before it runs, since pydantic and dataclasses look up the module to resolve annotations.
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_in(file: Path, error: BaseException) -> str:
    """Return the last line of `file` in the traceback of an error: `FILE, line 3`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file}, line {frames[-1].lineno}" if frames else str(file)


def _file_and_name(value: str) -> tuple[Path, str]:
    path, _, name = value.rpartition(":")
    if not path:  # a tool of lean_ft
        return _BUILT_IN / f"{name}.py", name
    file = Path(path).expanduser()
    if not file.is_file():
        passed = f" An earlier program passed {name} from Python. Pass it again." if _HASH.search(value) else ""
        meant = did_you_mean(file.name, (other.name for other in file.parent.glob("*.py")))
        raise ValueError(f"no such file: {file}. Expected FILE.py:FUNCTION, found {value}.{passed}{meant}")
    return file, name


def _lacks(file: Path, name: str, functions: list[str], sort: str = "function") -> str:
    return f"{file} has no {sort} {name}; it has {', '.join(functions) or 'none'}.{did_you_mean(name, functions)}"


@cache
def _module(file: Path, _version: int) -> ModuleType:
    if (folder := str(file.parent)) not in sys.path and file.parent != _BUILT_IN:
        sys.path.append(folder)  # last, so that its modules hide no library
    current = os.getcwd()
    try:
        with without_os_exit():
            return run_file(file, f"user_functions.{file.stem}")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{line_in(file, error)} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        os.chdir(current)  # other settings name files in it
