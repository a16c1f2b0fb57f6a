"""Calls of users' functions: whatever a tool does, its call has a result."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lean_ft.settings import ToolsConfig
from lean_ft.tools import Call, Tools


def texts(tools: Tools, *calls: Call) -> list[str]:
    """The results of the calls of a turn."""
    with tools.unchanged_process(0):
        return [text for text, _ in tools.results(calls)]


FILE = '''
import asyncio, ctypes, os, sys, threading, time
from dataclasses import dataclass
from datetime import date

class Broken(Exception):
    def __str__(self):
        raise ValueError("no text")

class Silent:
    def __repr__(self):
        raise RuntimeError("no text")

@dataclass
class Found:
    place: str
    when: date

def act(kind: str, seconds: float = 0.0) -> str:
    """Do it.

    Args:
        kind: What.
        seconds: To wait.
    """
    time.sleep(seconds)
    print("not a result")
    match kind:
        case "text": return "text"
        case "list": return [1, {"é": None}]
        case "none": return None
        case "set": return {3, 1}
        case "bytes": return b"a"
        case "nan": return float("nan")
        case "long": return "ab" * 10_000_000
        case "silent": return Silent()
        case "image": from PIL import Image; return Image.new("RGB", (4, 4))
        case "generator": return (i for i in range(3))
        case "objects": return [1, {"a": Silent()}]
        case "found": return [Found("é", date(2025, 1, 2))]
        case "array": import numpy as np; return {"x": np.arange(3), "y": float("inf")}
        case "names": return {1.5: 1, None: 2, True: 3}
        case "halves": return ["\\ud800", {"\\udfff": "\\ufdd0"}]
        case "half": return "a\\ud800"
        case "raises half": raise ValueError("\\ud800")
        case "forks": return os.fork() and "parent"
        case "raises": raise KeyError("gone")
        case "broken": raise Broken
        case "exits": sys.exit("bye")
        case "os": os._exit(0)
        case "interrupts": raise KeyboardInterrupt
        case "crashes": ctypes.string_at(0)
        case "hangs": time.sleep(60)
        case "kills": os.kill(os.getpid(), 9)
        case "child": os.system("sleep 60")

async def wait(kind: str, seconds: float = 0.0) -> str:
    """Wait.

    Args:
        kind: What.
        seconds: To wait.
    """
    await asyncio.sleep(seconds)
    if kind == "blocks":
        time.sleep(60)
    if kind == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    return f"{id(asyncio.get_running_loop())}" if kind == "loop" else act(kind)
'''


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., Tools]:
    (tmp_path / "my_tools.py").write_text(FILE, encoding="utf-8")

    def make(*names: str, **settings: object) -> Tools:
        functions = [f"{tmp_path}/my_tools.py:{name}" for name in names or ("act", "wait")]
        return Tools(ToolsConfig.model_validate({"functions": functions} | settings))

    return make


RESULTS = {
    "text": "text",
    "list": '[1, {"é": null}]',
    "none": "null",
    "set": "[1, 3]",
    "bytes": "error: the tool {} returned a bytes, which is neither text nor JSON",
    "nan": "NaN",
    "image": "error: the tool {} returned a PIL.Image.Image, which is neither text nor JSON",
    "generator": "error: the tool {} returned a generator, which is neither text nor JSON",
    "objects": "error: the tool {} returned a list with a user_functions.my_tools.Silent, which is neither text nor JSON",  # noqa: E501
    "found": '[{"place": "é", "when": "2025-01-02"}]',
    "array": '{"x": [0, 1, 2], "y": "Infinity"}',
    "names": '{"1.5": 1, "null": 2, "true": 3}',
    "halves": '["\ufffd", {"\ufffd": "\ufffd"}]',
    "half": "a\ufffd",
    "raises half": "error: ValueError: \ufffd",
    "forks": "parent",
    "long": f"{'ab' * 100}\n[cut after 200 of 20,000,000 characters]",
    "silent": "error: the tool {} returned a user_functions.my_tools.Silent, which is neither text nor JSON",
    "raises": "error: KeyError: 'gone'",
    "broken": "error: user_functions.my_tools.Broken: <exception str() failed>",
    "exits": "error: SystemExit: bye",
}


@pytest.mark.first
@pytest.mark.parametrize(
    ("process", "kinds"),
    [(False, [*RESULTS]), (True, ["list", "bytes", "raises"]), pytest.param(True, [*RESULTS], marks=pytest.mark.long)],
    ids=["here", "some in a process", "all in a process"],
)
def test_every_kind_of_result(process: bool, kinds: list[str], tools: Callable[..., Tools]) -> None:
    """Equal in this process and in another one. The child of a fork that returns ends, and its result is not read."""
    made = tools(process=process, result_characters=200, parallel=99)
    calls = [Call(name, {"kind": kind}) for kind in kinds for name in ("act", "wait")]
    texts = [(RESULTS[kind], name) for kind in kinds for name in ("act", "wait")]
    expected = [text.format(name) if "tool {}" in text else text for text, name in texts]
    with made.unchanged_process(0):
        assert made.results(calls) == [(text, text.startswith("error:")) for text in expected]


def test_a_process_that_dies_or_hangs_is_a_result(tools: Callable[..., Tools]) -> None:
    kinds = ["os", "crashes", "kills", "hangs", "child", "interrupts", "text"]
    began = time.monotonic()
    found = texts(tools(process=True, seconds=3.0), *(Call("act", {"kind": kind}) for kind in kinds))
    late = "error: the call took longer than 3 s."
    assert found == [
        "error: the tool ended its process with exit code 0.",
        "error: the tool ended its process with signal 11.",
        "error: the tool ended its process with signal 9.",
        *(late, late),
        "error: KeyboardInterrupt",
        "text",
    ]
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", ["act", "wait"])
def test_os_exit_and_interrupts_of_a_thread(name: str, tools: Callable[..., Tools]) -> None:
    exits, *found = texts(
        tools(), Call(name, {"kind": "os"}), Call(name, {"kind": "interrupts"}), Call("act", {"kind": "text"})
    )
    assert exits.startswith("error: SystemExit: your function called os._exit(0)")
    assert found == ["error: KeyboardInterrupt", "text"]


def test_calls_run_side_by_side_and_in_order(tools: Callable[..., Tools]) -> None:
    made, began = tools(parallel=40), time.monotonic()
    calls = [Call(name, {"kind": kind, "seconds": 0.5}) for kind in ("text", "list") for name in ("wait", "act")] * 10
    assert texts(made, *calls) == ["text", "text", RESULTS["list"], RESULTS["list"]] * 10
    assert time.monotonic() - began < 3  # 20 s one after another
    loops = [text for _ in range(2) for text in texts(made, *[Call("wait", {"kind": "loop"})] * 2)]
    assert len(set(loops)) == 1  # connections stay open


def test_a_hanging_call_is_left_behind_and_reported_once(
    tools: Callable[..., Tools], capsys: pytest.CaptureFixture[str]
) -> None:
    made = tools(seconds=0.3)
    for _ in range(2):
        hanging = [Call("act", {"kind": "hangs"}), Call("wait", {"kind": "text", "seconds": 60.0})]
        late = ["error: the call took longer than 0.3 s."] * 2
        assert texts(made, *hanging, Call("act", {"kind": "text"})) == [*late, "text"]
    assert capsys.readouterr().out.count("WARNING") == 1
    assert texts(made, Call("wait", {"kind": "stubborn"}), Call("wait", {"kind": "blocks"})) == late
    assert texts(made, Call("wait", {"kind": "text"})) == ["text"]  # on a new loop


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call("", {}, "error: malformed"), "error: malformed"),
        (Call("akt", {"kind": "text"}), "error: unknown tool 'akt'. Did you mean 'act'? Tools: act, wait."),
        (Call("act", {"kid": "a"}), "error: TypeError: act() got an unexpected keyword argument 'kid'"),
        (Call("act", {"seconds": 1}), "error: TypeError: act() missing 1 required positional argument: 'kind'"),
        (
            Call("act", {"kind": "text", "seconds": "1"}),
            "error: TypeError: 'str' object cannot be interpreted as an integer",
        ),
    ],
)
def test_arguments_that_the_schema_does_not_allow(call: Call, expected: str, tools: Callable[..., Tools]) -> None:
    with (made := tools()).unchanged_process(0):
        assert made.results([call, Call("act", {"kind": "text"})]) == [(expected, True), ("text", False)]


def test_too_many_calls_of_a_turn(tools: Callable[..., Tools]) -> None:
    found = texts(tools(parallel=2), *[Call("act", {"kind": "text"})] * 3)
    assert found == ["text", "text", "error: this turn has too many tool calls. At most 2 are made."]


def change(step: int) -> int:
    """Change the process.

    Args:
        step: What the call gets.
    """
    random.random()
    torch.rand(1)
    os.chdir("/")
    return step


def test_a_tool_changes_neither_random_generators_nor_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    made = Tools(ToolsConfig.model_validate([change]))
    random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate(), torch.get_rng_state().tolist(), Path.cwd())
    with made.unchanged_process(0):
        for _ in range(2):
            assert made.results([Call("change", {"step": 3})]) == [("3", False)]
            assert Path.cwd() == before[2]  # also for what runs before the end of a round
    assert (random.getstate(), torch.get_rng_state().tolist(), Path.cwd()) == before
    assert capsys.readouterr().out.count("the tool change changes the current folder, which is undone") == 1


def test_functions_that_cannot_be_tools(tmp_path: Path, tools: Callable[..., Tools]) -> None:
    other = tmp_path / "other.py"
    other.write_text(f"{FILE}\ndef bare(x): ...\ndef hint(x):\n    'A.'\n", encoding="utf-8")
    file = tmp_path / "my_tools.py"
    cases = {
        f"{file}:atc": r"no function atc; it has .*act, wait. Did you mean 'act'\?",
        f"{tmp_path}/my_tool.py:act": r"no such file: .*my_tool.py.* Did you mean 'my_tools.py'\?",
        f"{other}:bare": "the function bare has no docstring, so a model cannot know what it does",
        f"{other}:hint": "hint: the parameter x has no type hint. Add one, as in `x: str`",
        f"{other}:act": "are both named act. Rename one",
    }
    tools()
    for text, message in cases.items():
        with pytest.raises(ValueError, match=message):
            Tools(ToolsConfig.model_validate([f"{file}:act", text]))
    with pytest.raises(ValueError, match="tools.process=true needs functions in files, and change was passed"):
        Tools(ToolsConfig.model_validate({"functions": [change], "process": True}))
