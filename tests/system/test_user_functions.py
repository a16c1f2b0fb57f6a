"""User functions are loaded from files, again after an edit, and identified by the content of their file."""

import os
from pathlib import Path

import pytest

from lean_ft.system.user_functions import check_function, file_digest, is_function_path, load_function


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
