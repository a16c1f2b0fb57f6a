"""Reward functions: the run continues with their numbers, or ends with one error message."""

import asyncio
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import create_model

from lean_ft.cli.run import run_recipe
from lean_ft.data import Prompt
from lean_ft.generation import Completion
from lean_ft.online import rewards
from lean_ft.system import log
from lean_ft.system.catalog import find_recipe, load_recipe
from lean_ft.tokenizers import load_tokenizer
from lean_ft.training.bad_steps import TrainingFailed

BODIES = {
    "numbers of numpy": ("[np.float32(1.0), np.int64(2)]", [1.0, 2.0]),
    "tensors": ("[torch.tensor(1.0), torch.tensor(2)]", [1.0, 2.0]),
    "one tensor": ("torch.ones(2, requires_grad=True)", [1.0, 1.0]),
    "true and none": ("[True, None]", [1.0, None]),
    "a huge number": ("[1, 10**400]", r"returned 10000.* at row 2; expected a finite number"),
    "one value": ("[1]", "returned 1 value for 2 answers"),
    "not a number": ("[1, float('nan')]", r"returned nan at row 2"),
    "text": ("[1, '1']", r"returned 1 at row 2"),
    "a tensor of two": ("[1, torch.ones(2)]", r"at row 2; expected a finite number"),
    "an exit": ("sys.exit(0)", r"the reward .*rewards\.py:f failed at row 1: SystemExit: 0"),
    "a group": ("throw(BaseExceptionGroup('g', [KeyboardInterrupt()]))", r"failed at row 1: BaseExceptionGroup: g"),
    "changed ids": ("[ids.__setitem__(0, 10**9) or 1 for ids in completion_ids]", [1.0, 1.0]),
    "emptied lists": ("[1, 2] if not completion_ids[0].clear() and not completions.clear() else 0", [1.0, 2.0]),
    "another folder": ("[os.chdir('/') or 1, 2]", [1.0, 2.0]),
    "a generator": ("(len(ids) for ids in completion_ids)", [2.0, 2.0]),
    "a failing generator": ("(throw(KeyError(9)) for ids in completion_ids)", r"failed at row 1: KeyError: 9"),
    "an event loop": ("asyncio.run(asyncio.sleep(0, [1, 2]))", [1.0, 2.0]),
    "os._exit": (
        "os._exit(0)",
        r"the reward .*rewards\.py:f failed at row 1: SystemExit: your function called os\._exit\(0\)",
    ),
    "os._exit of a child": ("[float(os.waitpid(os.fork() or os._exit(3), 0)[1] >> 8), 0]", [3.0, 0.0]),
}


@pytest.mark.parametrize("case", BODIES)
def test_what_a_function_may_do(tmp_path: Path, case: str) -> None:
    body, expected = BODIES[case]
    (tmp_path / "rewards.py").write_text(
        "import asyncio, os, sys\nimport numpy as np\nimport torch\n"
        "def throw(error):\n    raise error\n"
        f"def f(completions, completion_ids):\n    return {body}\n"
    )
    prompts = [Prompt([1], "a", {}, f"row {i}") for i in (1, 2)]
    samples = [Completion([5, 6], [0.0, 0.0], True) for _ in prompts]
    here = os.getcwd()
    score = rewards.Rewards([f"{tmp_path}/rewards.py:f"], load_tokenizer("tiny"))
    if isinstance(expected, str):
        with pytest.raises(TrainingFailed, match=expected):
            score(prompts, samples)
    else:
        assert score(prompts, samples).totals == expected
    assert os.getcwd() == here
    assert [sample.ids for sample in samples] == [[5, 6], [5, 6]]


CHANGES = {  # a statement -> what it changes; None: nothing that needs a warning
    "torch.set_grad_enabled(False)": "torch's gradient mode",
    "torch.set_default_dtype(torch.float64)": "torch's default dtype",
    "torch.set_default_device('meta')": "torch's default device",
    "os.chdir('/')": "the current folder",
    "random.seed(0); np.random.seed(0); torch.manual_seed(0)": None,
    "random.random(); np.random.rand(); torch.rand(1)": None,
}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_process_is_as_before_and_the_function_is_named(tmp_path: Path, change: str, kind: str, capsys) -> None:
    def state() -> list[Any]:
        modes = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), os.getcwd()]
        modes.append(
            torch.overrides._get_current_function_mode_stack()
        )  # a default device is one, and stops torch.compile
        return [
            *modes,
            random.getstate(),
            torch.get_rng_state().tolist(),
            [one.tolist() if isinstance(one, np.ndarray) else one for one in np.random.get_state()],
        ]

    (tmp_path / "changing.py").write_text(
        f"import os, random\nimport numpy as np\nimport torch\n{kind} f(completions):\n    {change}\n    return [1.0]\n"
    )
    score, before = rewards.Rewards([f"{tmp_path}/changing.py:f"], load_tokenizer("tiny")), state()
    for _ in range(2):
        assert score([Prompt([1], "a", {}, "row 1")], [Completion([5])]).totals == [1.0]
        assert state() == before
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    found = [
        f"WARNING     the reward {tmp_path}/changing.py:f changes {CHANGES[change]}, which is undone after each call."
    ]
    assert said == found * (CHANGES[change] is not None)


def test_what_a_function_logs_is_a_copy_that_a_checkpoint_can_hold(tmp_path: Path) -> None:
    (tmp_path / "logs.py").write_text(
        "import numpy as np\nfrom pathlib import Path\nseen = {}\n"
        "def f(completions, trainer_state, log_extra, log_metric):\n"
        "    log_extra('\\ud800', [seen, np.float64('nan'), {'\\udfff': ['\\ud800', Path('a')]}])\n"
        "    log_metric('\\ud800', 1)\n"
        "    seen['later'] = trainer_state.global_step = 9\n"
        "    return [1.0] * 3\n"
        "def g(completions, trainer_state):\n    return [trainer_state.global_step] * 3\n"
        "def h(completions, log_extra):\n    log_extra('a', 3)\n"
    )
    prompts = [Prompt([1], "a", {}, f"row {i}") for i in (1, 2, 3)]
    score = rewards.Rewards([f"{tmp_path}/logs.py:f", f"{tmp_path}/logs.py:g"], load_tokenizer("tiny"))
    logged: list[Any] = []
    score.run = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        trainer_state=SimpleNamespace(global_step=4), log_metric=lambda *given: logged.append(given)
    )
    found = score(prompts, [Completion([5])] * 3)
    assert found.extras == {"\ufffd": [{}, "NaN", {"\ufffd": ["\ufffd", "a"]}]}
    assert found.totals == [5.0] * 3  # the second function sees the state as it was
    with pytest.raises(TrainingFailed, match=r"logs.py:h failed at row 1: TypeError: 'int' object is not iterable"):
        rewards.Rewards([f"{tmp_path}/logs.py:h"], load_tokenizer("tiny"))(prompts, [Completion([5])] * 3)


def test_draws_differ_by_round_and_repeat_with_the_round(tmp_path: Path) -> None:
    """A resumed run scores its round again."""
    body = "    return [random.random() + float(np.random.rand()) + float(torch.rand(1))]\n"
    (tmp_path / "drawing.py").write_text(
        f"import random\nimport numpy as np\nimport torch\ndef f(completions):\n{body}"
    )
    score = rewards.Rewards([f"{tmp_path}/drawing.py:f"], load_tokenizer("tiny"))
    first, second, again = (score([Prompt([1], "a", {}, "row 1")], [Completion([ids])]).totals for ids in (5, 6, 5))
    assert first == again != second


def test_async_functions_run_together_and_keep_their_connections(tmp_path: Path) -> None:
    """Each waits for the other, on one event loop in all rounds."""
    (tmp_path / "waiting.py").write_text(
        "import asyncio\nevents, loops = {}, set()\n"
        "async def meet(mine, other):\n"
        "    loops.add(id(asyncio.get_running_loop()))\n"
        "    events.setdefault(mine, asyncio.Event()).set()\n"
        "    await asyncio.wait_for(events.setdefault(other, asyncio.Event()).wait(), 20)\n"
        "    return [float(len(loops))]\n"
        "async def f(completions):\n    return await meet('f', 'g')\n"
        "class G:\n    async def __call__(self, completions, **kwargs):\n        return await meet('g', 'f')\n"
        "g = G()\n"
    )
    score = rewards.Rewards([f"{tmp_path}/waiting.py:{name}" for name in "fg"], load_tokenizer("tiny"))
    for _ in range(2):
        assert score([Prompt([1], "a", {}, "row 1")], [Completion([5])]).each == [[1.0, 1.0]]


def test_functions_run_in_a_notebook_whose_own_loop_runs() -> None:
    async def waits(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float("14" in said) for said in completions]

    async def cell() -> list[Any]:
        return score([Prompt([1], "a", {}, "row 1")], [Completion(tokenizer.encode("14"))]).each

    tokenizer = load_tokenizer("tiny")
    score = rewards.Rewards([waits, lambda completions: [2.0]], tokenizer)
    assert [asyncio.run(cell()) for _ in range(2)] == [[[1.0, 2.0]]] * 2


def test_a_slow_function_is_reported(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(log, "SLOW_SECONDS", 0.1)
    (tmp_path / "slow.py").write_text("import time\ndef f(completions):\n    time.sleep(0.3)\n    return [1.0]\n")
    rewards.Rewards([f"{tmp_path}/slow.py:f"], load_tokenizer("tiny"))(
        [Prompt([1], "a", {}, "row 1")], [Completion([5])]
    )
    said = capsys.readouterr().out
    assert f"waiting     the reward {tmp_path}/slow.py:f has run for 0 s" in said
    time.sleep(0.5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("leave", "reason"), [("sys.exit(0)", "0"), ("os._exit(0)", r"your function called os\._exit\(0\)")]
)
def test_a_file_that_exits_is_refused(tmp_path: Path, leave: str, reason: str) -> None:
    (tmp_path / "exits.py").write_text(f"import os, sys\n{leave}\ndef f(completions): ...\n")
    with pytest.raises(ValueError, match=rf"exits\.py, line 2 cannot be run: SystemExit: {reason}"):
        rewards.Rewards([f"{tmp_path}/exits.py:f"], load_tokenizer("tiny"))


def test_a_shipped_recipe_that_somebody_exits_has_failed(monkeypatch) -> None:
    recipe = load_recipe(find_recipe("finetune"))
    monkeypatch.setattr(recipe, "main", lambda cfg: sys.exit(0))
    with pytest.raises(RuntimeError, match=r"ended the run by sys\.exit\(0\)"):
        run_recipe(recipe, create_model("Config")())
    monkeypatch.setattr(recipe, "main", lambda cfg: sys.exit(130))
    with pytest.raises(SystemExit):
        run_recipe(recipe, create_model("Config")())


def test_an_unknown_reward_names_the_function_of_a_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def right(completions): ...\nasync def brief(completions): ...\n")
    with pytest.raises(ValueError, match="unknown reward 'brief'. Did you mean 'mine.py:brief'?"):
        rewards.check_rewards(["mine.py:right", "brief"])
    with pytest.raises(ValueError, match=r"mine.py has right, brief. Name one, such as mine.py:right\."):
        rewards.check_rewards(["mine.py"])
