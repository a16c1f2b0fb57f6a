"""Load user code: a recipe's file, or a function that a setting names as FILE.py:FUNCTION.

A function that is passed from Python becomes such a text too, `functions/NAME-HASH.py:NAME`, because settings are text in
files and in other processes. The run directory gets its source, and this process keeps the function.
"""

import dis
import inspect
import json
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from symtable import symtable
from types import CodeType, ModuleType
from typing import Any, NoReturn, TypeGuard

from lean_ft.system.shapes_only import stage

PASSED: dict[str, Callable[..., Any]] = {}
"""Functions that were passed from Python, by the texts that stand for them."""


def is_function_path(value: Any) -> TypeGuard[str]:
    """Whether a setting's value has the form FILE.py:FUNCTION."""
    return isinstance(value, str) and value.rpartition(":")[0].endswith(".py")


def check_function(value: str) -> str:
    """Return `value`. Raises ValueError if it is FILE.py:FUNCTION without such a function; does not run the file."""
    if is_function_path(value) and value not in PASSED:
        file, name = _file_and_name(value)
        source = file.read_text(encoding="utf-8", errors="replace")
        try:
            symbols = symtable(source, str(file), "exec").get_symbols()
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}") from None
        if "import *" not in source and not any(one.get_name() == name and one.is_local() for one in symbols):
            raise ValueError(_lacks(file, name, [one.get_name() for one in symbols if one.is_namespace()]))
    return value


def load_function(value: str, planned: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the function FILE.py:FUNCTION, or one object of the class FILE.py:CLASS. The file runs once per version, and may
    import modules of its folder.

    A plan runs no user code: it gets `planned` instead, or None for a function that it never calls. Raises ValueError if
    the file is missing, fails or lacks the function.
    """
    if stage() is not None:
        check_function(value)
        return planned  # pyright: ignore[reportReturnType]
    if value in PASSED:
        return PASSED[value]
    file, name = _file_and_name(value)
    found = vars(_load(file.resolve(), file.stat().st_mtime_ns))
    if not callable(found.get(name)):
        raise ValueError(
            _lacks(file, name, [other for other, value in found.items() if type(value) is type(is_function_path)])
        )
    return _kept(found[name]) if isinstance(found[name], type) else found[name]


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


def function_digest(value: str) -> str | None:
    """Hex hash of the file in FILE.py:FUNCTION, or of everything that determines the results of a function from Python.

    None if such a function uses an object whose content cannot be hashed.
    """
    if value in PASSED:
        return _content_hash(PASSED[value])
    return blake2b(_file_and_name(value)[0].read_bytes(), digest_size=16).hexdigest()


def check_shape(value: str, returned: Any, shape: Any) -> Any:
    """Return `returned`, the function's result. Raises ValueError unless it is a tensor of that shape."""
    if tuple(getattr(returned, "shape", (None,))) != tuple(shape):
        found = f"shape {list(returned.shape)}" if hasattr(returned, "shape") else f"a {type(returned).__name__}"
        raise ValueError(f"{value} returned {found}; expected a tensor of shape {list(shape)}.")
    return returned


def run_file(file: Path, name: str) -> ModuleType:
    """Run a Python file as the module `name` and return it."""
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    # Registered before it runs, since pydantic and dataclasses look up the module to resolve annotations.
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_of(value: str, error: BaseException) -> str:
    """Return the last line of a user's function in the traceback of an error."""
    if value not in PASSED:
        return line_in(Path(value.rpartition(":")[0]).expanduser().resolve(), error)
    code = getattr(_owner(PASSED[value]), "__code__", None)
    return line_in(Path(code.co_filename if code else value), error)


def line_in(file: Path, error: BaseException) -> str:
    """Return the last line of `file` in the traceback of an error: `FILE, line 3`."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file}, line {frames[-1].lineno}" if frames else str(file)


def _file_and_name(value: str) -> tuple[Path, str]:
    path, _, name = value.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        passed = f" An earlier program passed {name} from Python. Pass it again." if _HASH.search(value) else ""
        raise ValueError(f"no such file: {file}. Expected FILE.py:FUNCTION, found {value}.{passed}")
    return file, name


def _lacks(file: Path, name: str, functions: list[str]) -> str:
    return f"{file} has no function {name}; it has {', '.join(functions) or 'none'}."


@cache
def _load(file: Path, _version: int) -> ModuleType:
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)  # last, so that its modules hide no library
    try:
        with without_os_exit():
            return run_file(file, f"user_functions.{file.stem}")
    except (Exception, SystemExit) as error:
        raise ValueError(f"{line_in(file, error)} cannot be run: {type(error).__name__}: {error}") from error


# Functions passed from Python -----------------------------------------------------------------------------------------

_HASH = re.compile(r"(?<=functions/)(\w+)-[0-9a-f]{8}(-\d+)?(?=\.py:)")


def as_setting(value: Any) -> Any:
    """Return the text that stands for a function, a callable object or a class in settings. Return other values unchanged.

    Raises ValueError for a class that needs arguments, or whose objects cannot be called.
    """
    if not callable(value):
        return value
    function = _made(value) if isinstance(value, type) else value
    owner = _owner(function)
    name = re.sub(r"\W+", "_", owner.__name__).strip("_")
    members = [owner] if inspect.isroutine(owner) else vars(owner).values()
    code = _hash_of([_content(one.__code__) for one in members if inspect.isfunction(one)])[:8]
    for number in count(1):
        text = f"functions/{name}-{code}{f'-{number}' if number > 1 else ''}.py:{name}"
        kept = PASSED.setdefault(text, function)
        if kept is function or (own := _content_hash(function)) is not None and own == _content_hash(kept):
            return text


@contextmanager
def forgotten_functions() -> Iterator[None]:
    """Context manager that at its end forgets the functions that were passed inside, which may hold models in memory."""
    before = set(PASSED)
    try:
        yield
    finally:
        for text in PASSED.keys() - before:
            del PASSED[text]


def source_of(value: str) -> str | None:
    """The source of a function that was passed from Python, or of its class; None if Python does not have it."""
    try:
        return textwrap.dedent(inspect.getsource(_owner(PASSED[value])))
    except (OSError, TypeError):
        return None


def without_hashes(value: Any) -> Any:
    """A setting's JSON value without the hashes of functions that were passed from Python."""
    return json.loads(_HASH.sub(r"\1", json.dumps(value)))


def _made(kind: type) -> Any:
    """An object of a class."""
    try:
        made = kind()
    except TypeError as error:
        raise ValueError(f"{kind.__name__} is a class that needs arguments ({error}). Pass an object of it.") from None
    if not callable(made):
        raise ValueError(f"{kind.__name__} is a class whose objects cannot be called. Pass a function, or add __call__.")
    return made


_kept = cache(_made)


def _owner(function: Any) -> Any:
    """The function or the class whose source a callable has."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return function if inspect.isroutine(function) else type(function)


def _content_hash(function: Any) -> str | None:
    try:
        return _hash_of(_content(function))
    except (TypeError, ValueError, RecursionError):
        return None


def _content(value: Any, known: tuple[Any, ...] = ()) -> Any:
    """What the results of a function follow from, as JSON: code, defaults, captured values, and globals that it reads.

    Raises TypeError for an object whose content is unknown, such as a model or a module that is no library.
    """
    kind, home = type(value), getattr(value, "__module__", None)
    if value is None or value is ... or kind in (bool, int, float, complex, str, bytes, slice):
        return repr(value)
    if kind in (list, tuple, dict, set, frozenset):
        parts = [_content(one, known) for one in (value.items() if kind is dict else value)]
        return [kind.__name__, sorted(parts, key=json.dumps) if kind in (set, frozenset) else parts]
    if kind is re.Pattern:
        return ["pattern", value.flags, _content(value.pattern)]
    if kind is CodeType:
        names = [value.co_names, value.co_varnames, value.co_cellvars, value.co_freevars]
        counts = [value.co_flags, value.co_argcount, value.co_kwonlyargcount]
        return [value.co_code.hex(), *names, *counts, _content(value.co_consts)]
    if kind is ModuleType and (version := _version(value.__name__)) is not None:
        return ["module", value.__name__, version]
    is_named = isinstance(value, type) or (inspect.isroutine(value) and not inspect.ismethod(value))
    if is_named and home and (version := _version(home)) is not None:
        return [home, value.__qualname__, version]
    if not inspect.isfunction(value):
        raise TypeError(f"a {kind.__name__} has unknown content")
    if value in known:  # a recursive function
        return ["known", known.index(value)]
    captured = [cell.cell_contents for cell in value.__closure__ or ()]
    read = {name: value.__globals__[name] for name in sorted(_reads(value.__code__)) if name in value.__globals__}
    return [_content(one, (*known, value)) for one in (value.__code__, value.__defaults__, value.__kwdefaults__, captured, read)]


def _reads(code: CodeType) -> set[str]:
    """Names of the globals that the code reads. Raises TypeError if it imports a module that is no library."""
    names = set[str]()
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME" and _version(one.argval) is None:
            raise TypeError(f"{one.argval} has unknown content")
        if one.opname.startswith("LOAD_") and ("GLOBAL" in one.opname or "NAME" in one.opname):
            names.add(one.argval)
    return names.union(*(_reads(one) for one in code.co_consts if isinstance(one, CodeType)))


def _version(module: str) -> str | None:
    """The version of the library that a module belongs to, "" if it has none; None if the module is no library's."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    if top not in sys.stdlib_module_names and not file.startswith(installed):
        return None
    return getattr(sys.modules.get(top), "__version__", "")


def _hash_of(content: Any) -> str:
    return blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
