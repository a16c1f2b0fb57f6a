"""Reward functions: the run continues with their numbers, or ends with one error message."""

import os
import sys
import time
from pathlib import Path

import pytest

from lean_ft.cli.run import run_recipe
from lean_ft.data import Prompt
from lean_ft.generation import Sample
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
    "one value": ("[1]", "returned 1 values for 2 answers"),
    "not a number": ("[1, float('nan')]", r"returned nan at row 2"),
    "text": ("[1, '1']", r"returned 1 at row 2"),
    "a tensor of two": ("[1, torch.ones(2)]", r"at row 2; expected a finite number"),
    "an exit": ("sys.exit(0)", r"the reward .*rewards\.py:f failed at row 1: SystemExit: 0"),
    "a group": ("throw(BaseExceptionGroup('g', [KeyboardInterrupt()]))", r"failed at row 1: BaseExceptionGroup: g"),
    "changed ids": ("[ids.__setitem__(0, 10**9) or 1 for ids in completion_ids]", [1.0, 1.0]),
    "emptied lists": ("[1, 2] if not completion_ids[0].clear() and not completions.clear() else 0", [1.0, 2.0]),
    "another folder": ("[os.chdir('/') or 1, 2]", [1.0, 2.0]),
}


@pytest.mark.parametrize("case", BODIES)
def test_what_a_function_may_do(tmp_path: Path, case: str) -> None:
    body, expected = BODIES[case]
    (tmp_path / "rewards.py").write_text(
        "import os, sys\nimport numpy as np\nimport torch\n"
        "def throw(error):\n    raise error\n"
        f"def f(completions, completion_ids):\n    return {body}\n"
    )
    prompts = [Prompt([1], "a", {}, f"row {i}") for i in (1, 2)]
    samples = [Sample([5, 6], [0.0, 0.0], True) for _ in prompts]
    here = os.getcwd()
    score = rewards.Rewards([f"{tmp_path}/rewards.py:f"], load_tokenizer("tiny"))
    if isinstance(expected, str):
        with pytest.raises(TrainingFailed, match=expected):
            score(prompts, samples)
    else:
        assert score(prompts, samples).totals == expected
    assert os.getcwd() == here
    assert [sample.ids for sample in samples] == [[5, 6], [5, 6]]


def test_a_slow_function_is_reported(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(log, "SLOW_SECONDS", 0.1)
    (tmp_path / "slow.py").write_text("import time\ndef f(completions):\n    time.sleep(0.3)\n    return [1.0]\n")
    rewards.Rewards([f"{tmp_path}/slow.py:f"], load_tokenizer("tiny"))([Prompt([1], "a", {}, "row 1")], [Sample([5])])
    said = capsys.readouterr().out
    assert f"waiting     the reward {tmp_path}/slow.py:f has run for 0 s" in said
    time.sleep(0.5)
    assert capsys.readouterr().out == ""


def test_a_file_that_exits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\ndef f(completions): ...\n")
    with pytest.raises(ValueError, match=r"exits\.py, line 2 cannot be run: SystemExit: 0"):
        rewards.Rewards([f"{tmp_path}/exits.py:f"], load_tokenizer("tiny"))


def test_a_shipped_recipe_that_somebody_exits_has_failed(monkeypatch) -> None:
    recipe = load_recipe(find_recipe("finetune"))
    monkeypatch.setattr(recipe, "main", lambda cfg: sys.exit(0))
    with pytest.raises(RuntimeError, match=r"ended the run by sys\.exit\(0\)"):
        run_recipe(recipe, [])
    monkeypatch.setattr(recipe, "main", lambda cfg: sys.exit(130))
    with pytest.raises(SystemExit):
        run_recipe(recipe, [])
