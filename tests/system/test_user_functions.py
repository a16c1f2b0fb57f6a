"""User functions are loaded from files, again after an edit, and identified by the content of their file. Functions
that are passed from Python become texts of the same form."""

import os
import subprocess
import sys
from functools import partial, wraps
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from lean_ft.system.user_functions import (
    PASSED,
    as_factory,
    as_setting,
    check_function,
    file_digest,
    is_function_path,
    load_factory,
    load_function,
    names_in,
    without_hashes,
)


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "beside_own.py").write_text("one = 1\n")
    (tmp_path / "own.py").write_text(
        "from beside_own import one\nfrom math import sqrt\ntwice = lambda x: 2 * x\ndef f(x): return x + one\n"
    )
    return f"{tmp_path / 'own.py'}:"


def test_a_function_that_is_there(own: str) -> None:
    assert [load_function(check_function(own + name))(4) for name in ("f", "twice", "sqrt")] == [5, 8, 2]
    assert [check_function(name) for name in ("auto", "org/name", "a:b")] == ["auto", "org/name", "a:b"]
    assert [is_function_path(one) for one in (own + "f", "auto", None, 3, "a.py")] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:x", r"own.py has no function x;"),  # only a parameter
        ("own.py:g", r"own.py has no function g; it has (twice, )?f\."),
        ("none.py:f", "no such file: .*none.py. Expected FILE.py:FUNCTION"),
    ],
)
def test_one_that_is_not_there(own: str, name: str, message: str) -> None:
    for act in (check_function, load_function):
        with pytest.raises(ValueError, match=message):
            act(str(Path(own).parent / name))


def test_the_names_in_a_file(own: str, tmp_path: Path) -> None:
    assert "f" in names_in(Path(own[:-1]))
    (tmp_path / "rule.py").write_text(
        "import math\n\nclass _Base: pass\n\nclass Rule(_Base):\n    def update(self): pass\n"
    )
    assert names_in(tmp_path / "rule.py") == ["Rule"]
    assert names_in(tmp_path / "none.py") == []


def test_an_edit_is_another_function(own: str) -> None:
    file, before = Path(own[:-1]), file_digest(own + "f")
    file.write_text("def f(x): return -x\n")
    os.utime(file, ns=(1, 1))
    assert load_function(own + "f")(4) == -4
    assert file_digest(own + "f") != before
    file.write_text("def f(x: return\n")
    with pytest.raises(ValueError, match="own.py cannot be run: SyntaxError"):
        load_function(own + "f")
    file.write_text("\nf = 1 / 0\n")
    with pytest.raises(ValueError, match="own.py, line 2 cannot be run: ZeroDivisionError"):
        load_function(own + "f")


class Adds:
    """Adds a number."""

    def __init__(self, number: int = 10) -> None:
        self.number = number

    def __call__(self, x: int) -> int:
        return x + self.number

    def method(self, x: int) -> int:
        return x - self.number


def plus(x: int, number: int = 1) -> int:
    return x + number


@wraps(plus)
def wrapped(x: int) -> int:
    return 2 * plus(x)


def test_functions_from_python_are_texts_that_lead_back_to_them() -> None:
    number = 5
    two = [lambda x: x * 2, lambda x: x * 3]  # of one line
    functions: list[Any] = [
        *two,
        lambda x: x + number,
        plus,
        wrapped,
        partial(plus, number=4),
        Adds,
        Adds(3),
        Adds(2).method,
        abs,
    ]
    texts = [as_setting(one) for one in functions]
    assert [load_function(check_function(text))(7) for text in texts] == [14, 21, 12, 8, 16, 11, 17, 10, 5, 7]
    assert all(map(is_function_path, texts)) and len({*texts}) == len(texts)
    assert [as_setting(one) for one in functions[:6]] == texts[:6], "the same object is the same text"
    names = ["lambda", "lambda", "lambda", "plus", "plus", "plus", "Adds", "Adds", "method", "abs"]
    assert without_hashes(texts) == [f"functions/{name}.py:{name}" for name in names]
    sources = [PASSED[text].source for text in texts]
    assert all(name in (source or "abs") for name, source in zip(names, sources, strict=True))
    assert sources[3] == "def plus(x: int, number: int = 1) -> int:\n    return x + number\n" and sources[-1] is None
    assert [as_setting(one) for one in ("a.py:b", 3, None, ["a"])] == ["a.py:b", 3, None, ["a"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            type("Needs", (Adds,), {"__init__": lambda self, a: None}),
            "Needs is a class that needs arguments .*Pass an object",
        ),
        (dict, "dict is a class whose objects cannot be called. Pass a function"),
    ],
)
def test_a_class_that_is_no_function(given: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_setting(given)


def test_what_makes_objects_stays_as_it_is() -> None:
    """A class is called for each object. Only an object that is no function is refused."""
    factories: list[Any] = [dict, Adds, partial(Adds, 4), lambda: Adds(5)]
    texts = [as_factory(one) for one in factories]
    assert [load_function(check_function(text)) for text in texts] == factories
    assert without_hashes(texts[1:]) == [f"functions/{name}.py:{name}" for name in ("Adds", "Adds", "lambda")]
    assert "def method" in (PASSED[texts[1]].source or "")
    assert [as_factory(one) for one in ("a.py:b", None)] == ["a.py:b", None]
    with pytest.raises(ValueError, match="expected a class, or a function that makes objects, found a list"):
        as_factory([])


class Game:
    """An environment that counts in place."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def reset(self, row: dict[str, Any]) -> None:
        self.seen.append(1)


def test_an_environment_that_is_an_object_is_copied_for_each_completion() -> None:
    game = Game()
    text = as_factory(game)
    assert text is not None and as_factory(game) == text and as_factory(Game()) != text
    make = load_factory(check_function(text))
    first, second = make(), make()
    first.reset({})
    assert (first.seen, second.seen, game.seen) == ([1], [], [])
    assert "def reset" in (PASSED[text].source or "")
    game.lock = Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Game cannot be copied .*Pass its class, or a function that makes it"):
        make()


def test_files_may_have_classes_and_objects(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Adds:\n    def __init__(self, n=2): self.n = n\n    def __call__(self, x): return x + self.n\n"
        "class Needs(Adds):\n    def __init__(self, n): self.n = n\n"
        "class Game:\n    def reset(self, row): self.row = row\n"
        "game, needs, number = Game(), Needs(5), 3\n"
    )
    mine = f"{tmp_path / 'mine.py'}:"
    assert [load_function(mine + name)(1) for name in ("Adds", "needs")] == [3, 6]
    assert load_function(mine + "Adds") is load_function(mine + "Adds"), "an object, as each function is one"
    with pytest.raises(ValueError, match="Needs is a class that needs arguments .*Pass an object of it"):
        load_function(mine + "Needs")
    made = [load_factory(mine + name)() for name in ("Game", "game", "game")]
    assert [type(one).__name__ for one in made] == ["Game"] * 3 and made[1] is not made[2]
    with pytest.raises(ValueError, match="has no function number"):
        load_factory(mine + "number")


def test_another_program_has_the_function() -> None:
    code = "from lean_ft.system.user_functions import as_setting as a; print(a(lambda x: x))"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    for act in (check_function, load_function):
        with pytest.raises(
            ValueError, match=r"no such file: functions/lambda.*passed lambda from Python. Pass it again"
        ):
            act(text)
