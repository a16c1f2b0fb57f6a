"""The built-in calculator computes what Python computes, and nothing else."""

import ast
import random
from pathlib import Path

import pytest

from lean_ft.settings import ToolsConfig
from lean_ft.tools import Call, Tools
from lean_ft.tools.calculator import calculator


def expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice([str(rng.randint(0, 9999)), f"{rng.uniform(0, 9):.3f}"])
    left, right = expression(rng, depth - 1), expression(rng, rng.randrange(depth))
    form = rng.choice(["{} + {}", "{} - {}", "({} * {})", "({})/({})", "-({} - {})", "({}) // ({})", "({}) % ({})"])
    return form.format(left, right)


def test_random_expressions_equal_pythons() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = expression(rng, rng.randrange(4))
        try:
            expected = eval(compile(ast.parse(text, mode="eval"), "", "eval"), {"__builtins__": {}})
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                calculator(text)
        else:
            assert calculator(f" {text} ") == expected, text
    assert (calculator("2 ** 10"), calculator("-3 ** 2"), calculator("4 ** -0.5")) == (1024, -9, 0.5)


@pytest.mark.first
@pytest.mark.parametrize("process", [False, True])
def test_results_in_any_folder(process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a text as its result at once: what computes too much or is no arithmetic, an error."""
    monkeypatch.chdir(tmp_path)
    tools = Tools(
        ToolsConfig.model_validate({"functions": ["calculator"], "process": process, "seconds": 20, "parallel": 9})
    )
    cases = {
        "382 * 517": "197494",
        "7 / 2": "3.5",
        "9 ** 9 ** 9": "error: ValueError: 9 ** 9 ** 9 is too large",
        "(-8) ** 0.5": "is not a real number",
        "1 / 0": "error: ZeroDivisionError",
        "2 *": "error: SyntaxError",
        "__import__('os').getpid()": "is not supported; expected numbers with",
        "'a' * 9": "error: ValueError: 'a' is not supported",
        "1 << 9": "error: ValueError: 1 << 9 is not supported",
    }
    asked = list(cases)[: 3 if process else None]  # each starts Python
    calls = [Call("calculator", {"expression": text}) for text in asked]
    for text, (result, _) in zip(asked, tools.results(calls), strict=True):
        assert cases[text] in result, text
