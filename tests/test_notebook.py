"""lean_ft from Python: the page that describes it, run as it stands, and settings that arrive as they were given."""

import json
import re
import subprocess
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import lean_ft
from lean_ft.data.documents import FEW_ROWS
from lean_ft.notebook import _overrides
from lean_ft.plan.beforehand import _rehearse_apart
from lean_ft.plan.devices import choose_device
from lean_ft.settings import DataSource, LoRAConfig, Reward
from lean_ft.settings.text import load_config
from lean_ft.system.user_functions import PASSED, as_setting
from lean_ft.training.bad_steps import TrainingFailed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
ROWS = [{"prompt": "a \"b\" 'c'\n", "completion": "日本 🙂"}]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks of the page ran, in a process of their own and without the command line."""
    folder = tmp_path_factory.mktemp("notebook")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 11
    assert max(map(len, "".join(blocks).splitlines())) <= 76, "the site's column"
    blocks.append(
        "json.dump({'answers': answers, 'drawn': drawn, 'shape': logits.shape, 'losses': losses, 'results': results}, "
        "open('out.json', 'w'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import json\n" + "\n".join(blocks)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.mark.long
def test_what_the_page_says_is_so(workplace: Path) -> None:
    said = (workplace / "stdout").read_text()
    assert "['It has 5.', 'It has 3.']" in said
    assert "optimizer.rl: no such setting. Did you mean 'optimizer.lr'?" in said
    assert "'weights':" in said and "to letters-merged: 885,888 parameters" in said
    assert "It has 7.<|end|>" in said
    out = json.loads((workplace / "out.json").read_text())
    assert out["answers"][1:] == ["It has 7."] * 2
    assert len(out["drawn"]) == 1
    assert out["results"] == {"answers": {"exact_match": 1.0, "num_right": 3, "num_questions": 3}}
    assert out["shape"][0] == 1 and len(out["shape"]) == 3
    assert [line["step"] for line in out["losses"]] == list(range(1, 61))
    assert (workplace / "letters.png").read_bytes().startswith(b"\x89PNG")
    for folder in ("runs/letters/step_00000060", "runs/loop/step_00000002", "mine"):
        assert (workplace / folder / "tokenizer.json").is_file()
    assert not (workplace / "runs" / "x").exists()


ROWS_IN_MEMORY = [{"prompt": f"{i}?", "completion": "é"} for i in range(3)]


def test_rows_in_memory_of_any_kind_are_the_same_file() -> None:
    rows = ROWS_IN_MEMORY
    given = [
        next(_overrides({"data": {"source": kind}})) for kind in (rows, tuple(rows), iter(rows), (x for x in rows))
    ]
    given += [next(_overrides({"data.validation_source": rows})).replace("validation_", "")]
    assert len({*given}) == 1
    assert [json.loads(line) for line in Path(given[0].removeprefix("data.source=")).read_text().splitlines()] == rows
    assert next(_overrides({"data": {"source": iter(rows[:2])}})) != given[0]


@pytest.mark.long
def test_rows_of_pandas_and_datasets_are_the_same_file() -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    data = datasets.Dataset.from_list(ROWS_IN_MEMORY)
    kinds = [ROWS_IN_MEMORY, pandas.DataFrame(ROWS_IN_MEMORY), data, data.to_iterable_dataset()]
    assert len({next(_overrides({"data": {"source": kind}})) for kind in kinds}) == 1
    with pytest.raises(ValueError, match=r"data.source is a DatasetDict; expected one of its splits: 'train'"):
        list(_overrides({"data": {"source": datasets.DatasetDict(train=data)}}))


@pytest.mark.first(6)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lora": LoRAConfig(targets=["l.[0-3].*", "'q'"])}, {"lora.targets": ["l.[0-3].*", "'q'"], "lora.rank": 16}),
        ({"optimizer": {"betas": numpy.array([0.5, 0.75])}}, {"optimizer.betas": (0.5, 0.75)}),
        ({"data": {"source": [{"path": "*", "weight": 2.0}]}}, {"data.source": [DataSource(path="*", weight=2.0)]}),
        ({"model": {"path": "null"}, "data": {"source": "1e-5"}}, {"model.path": "null", "data.source": "1e-5"}),
        ({"model.path": "[a]", "clip_grad_norm": None}, {"model.path": "[a]", "clip_grad_norm": None}),
        ({"epochs": 3, "compile": True, "optimizer.lr": 1e-05}, {"epochs": 3, "compile": True, "optimizer.lr": 1e-5}),
        ({"optimizer": {"betas": (0.5, 0.9)}}, {"optimizer.betas": (0.5, 0.9), "optimizer.lr": 2e-5}),
        ({"data.columns": {"prompt": "a: b", "text": "#"}}, {"data.columns": {"prompt": "a: b", "text": "#"}}),
        ({"model": {"path": "é 🙂 '"}, "lora": None}, {"model.path": "é 🙂 '", "lora": None}),
        ({"data": {"source": [Path("a b"), "x y\"'\\"]}}, {"data.source": ["a b", "x y\"'\\"]}),
        ({"lora": {}}, {"lora": LoRAConfig()}),
        ({"freeze": "a,b", "data": {"source": "a, b"}}, {"freeze": ["a,b"], "data.source": "a, b"}),
        ({"optimizer.lr": numpy.float32(0.5), "seed": numpy.int64(3)}, {"optimizer.lr": 0.5, "seed": 3}),
    ],
    ids=str,
)
def test_settings_arrive_as_they_were_given(settings: dict, expected: dict) -> None:
    needed = ["model.path=m", "data.source=d", "output_dir=o"]
    cfg = load_config(lean_ft.load_recipe("finetune").Config, None, [*needed, *_overrides(settings)])
    assert {key: attrgetter(key)(cfg) for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"source": [{"text": {1, 2}}]}}, "data.source: a row holds what JSON cannot"),
        ({"data.source": [{"text": float("nan")}]}, "data.source: a row holds what JSON cannot"),
        ({"data": {"source": []}}, "data.source is an empty list"),
        ({"data": {"source": [{"path": "x", "wieght": 2}]}}, "data.source: expected text or list"),
        ({"model": {"path": "tiny", "dtype": object()}}, "model.dtype: found an object of object, which is no value"),
        ({"batch_size": "3"}, "batch_size: expected whole number > 0, found '3'"),
    ],
)
def test_what_cannot_be_is_one_message(settings: dict, message: str, tmp_path: Path) -> None:
    given = {"model.path": "tiny", "data.source": ROWS, "output_dir": tmp_path / "run"} | settings
    if "data" in settings:
        del given["data.source"]
    with pytest.raises(ValueError, match=message):
        lean_ft.run("finetune", **given)


PROMPTS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
GRPO = {"data": {"source": PROMPTS}, "generation": {"num_answers": 2, "max_new_tokens": 4}, "batch_size": 4}


class Brief:
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [-self.weight * len(one) for one in completions]


def half_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [0.5 * said.strip().startswith(expected) for said, expected in zip(completions, answer, strict=True)]


def run_tiny(recipe: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    model = {"path": "tiny", "dtype": "float32"}
    return lean_ft.read_metrics(lean_ft.run(recipe, model=model, output_dir=folder, plan=False, **settings))


def test_rewards_are_functions_classes_and_objects(tmp_path: Path) -> None:
    number = 3.0
    several = [lambda completions, **_: [number] * len(completions), lambda completions, **_: [None] * len(completions)]
    several += [Brief, Brief(0.0), {"function": half_right, "weight": 0.0}, "length"]
    kept = {*PASSED}
    run_tiny("grpo", tmp_path / "a", rewards=several, max_steps=1, **GRPO)
    assert {*PASSED} == kept, "a run that is over holds no function"
    config, files = (tmp_path / "a" / "config.yaml").read_text(), sorted((tmp_path / "a" / "functions").iterdir())
    assert [file.name.partition("-")[0] for file in files] == ["Brief", "Brief", "half_right", "lambda", "lambda"]
    assert all(f"#   functions/{file.name}:" in config for file in files)
    source = (tmp_path / "a" / "functions" / files[2].name).read_text()
    assert source.startswith("def half_right(") and "0.5 * said" in source
    with pytest.raises(ValueError, match="no such file: functions/.*An earlier program passed"):
        run_tiny("grpo", tmp_path / "b", config=tmp_path / "a" / "config.yaml")
    with pytest.raises(ValueError, match="max_steps: expected whole number"):
        run_tiny("grpo", tmp_path / "b", rewards=Brief, max_steps=len, **GRPO)


class Doubled:
    """An environment that pays twice what it was made for, and counts its objects."""

    made = 0

    def __init__(self, pays: float = 1.0) -> None:
        self.pays, self.turns = pays, 0
        Doubled.made += 1

    def reset(self, row: dict[str, Any]) -> None:
        self.turns += 1

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 2 * self.pays / self.turns, True


@pytest.mark.long
def test_environments_are_classes_factories_and_objects(tmp_path: Path) -> None:
    settings = {**GRPO, "generation": {"num_answers": 2, "max_new_tokens": 4, "stop": ["."], "temperature": 0.01}}
    original, rewards = Doubled(), [Reward(function="environment")]
    for number, environment in enumerate([Doubled, lambda: Doubled(2.0), partial(Doubled, pays=3.0), original]):
        Doubled.made = 0
        line = run_tiny(
            "grpo", tmp_path / f"{number}", environment=environment, rewards=rewards, max_steps=1, **settings
        )[0]
        assert Doubled.made == (0 if environment is original else 4)
        assert line["reward"] == [2.0, 4.0, 6.0, 2.0][number], "each completion has its own object"
        config = (tmp_path / f"{number}" / "config.yaml").read_text()
        assert f"environment: functions/{'lambda' if number == 1 else 'Doubled'}-" in config
    assert original.turns == 0


def test_rewards_and_environments_of_trl_train_under_its_names(tmp_path: Path) -> None:
    """As in TRL's documentation: methods are tools, and reward functions get lists of messages and columns by name."""
    seen: list[dict[str, Any]] = []

    class Counter:
        def reset(self, **row: Any) -> str | None:
            self.counter = int(row["answer"])

        def increment(self, step: int) -> int:
            """
            Increment the counter.

            Args:
                step: Value to add.

            Returns:
                The new value.
            """
            self.counter += step
            return self.counter

    def counted(environments: list[Counter], **kwargs: Any) -> list[float]:
        return [float(one.counter) for one in environments]

    def judged(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **kwargs})
        return [sum(map(ord, completion[-1]["content"])) / 100 for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": f"Add {i}."}], "answer": f"{i}"} for i in range(8)]
    settings = {**GRPO, "data": {"source": rows}, "model": {"path": "tiny-tools", "dtype": "float32"}, "plan": False}
    settings |= {"environment_factory": Counter, "max_steps": 1}
    line = lean_ft.read_metrics(lean_ft.run("grpo", reward_funcs=counted, output_dir=tmp_path / "a", **settings))[0]
    assert 0 < line["reward"] < 8, "the environment's numbers are the rows' answers"
    settings |= {"environment_factory": lambda: Counter(), "optimizer": {"lr": 1e-3}}
    run = lean_ft.run("grpo", reward_funcs=[counted, judged], output_dir=tmp_path / "b", **settings)
    assert lean_ft.read_metrics(run)[0]["grad_norm"] > 0
    assert {"completion_ids", "answer", "environments", "trainer_state"} <= seen[0].keys()
    assert seen[0]["prompts"][0][-1]["role"] == "user" and seen[0]["completions"][0][0]["role"] == "assistant"


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("grpo", {"reward_funcs": half_right, "rewards": ["length"]}, "reward_funcs and rewards are one setting"),
        ("grpo", {"environment_factory": 3, "rewards": ["environment"]}, "environment: expected a class"),
        ("grpo", {"reward_funcs": "org/judge"}, r"A reward model of the Hub is 'rewards=\[\{model: org/judge\}\]'"),
        ("grpo", {"reward_funcs": [torch.nn.Linear(1, 1)]}, r"a Linear is a model.*'rewards=\[\{model: judge\}\]'"),
        ("finetune", {"reward_funcs": half_right}, "The recipe grpo has"),
    ],
)
def test_what_replaces_arguments_of_trl_is_shown(recipe: str, settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_tiny(recipe, tmp_path / "a", max_steps=1, **(GRPO if recipe == "grpo" else {}), **settings)


@pytest.mark.long
def test_an_edited_reward_resumes_and_other_settings_do_not(tmp_path: Path) -> None:
    def judge(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(TrainingFailed, match=r"the reward functions/judge-\w+\.py:judge failed at .*KeyError"):
        run_tiny("grpo", tmp_path / "a", rewards=judge, max_steps=2, **GRPO)

    def judge(completions: list[str], **_: Any) -> list[float]:
        return [float(len(one)) for one in completions]

    assert run_tiny("grpo", tmp_path / "a", rewards=judge, max_steps=1, **GRPO)[0]["reward"] > 0
    assert len(run_tiny("grpo", tmp_path / "a", rewards=judge, max_steps=2, **GRPO)) == 2
    with pytest.raises(ValueError, match="rewards"):
        run_tiny("grpo", tmp_path / "a", rewards=Brief, max_steps=3, **GRPO)


@pytest.fixture
def with_own_loss(tmp_path: Path) -> tuple[Any, Any, list[float]]:
    """A recipe, its settings with a loss from Python, and the arguments of the loss's calls."""
    calls = []

    def loss(pairs: Any, beta: float) -> Any:
        calls.append(beta)
        return -beta * (pairs.chosen - pairs.rejected)

    dpo = lean_ft.load_recipe("dpo")
    data = {"source": "tiny/pairs_validation.jsonl", "format": lambda row: row, "max_length": 96}
    small = {"batch_size": 2, "max_steps": 2, "output_dir": tmp_path / "a"}
    cfg = dpo.Config(model={"path": "tiny"}, data=data, loss={"name": loss}, **small)
    assert cfg.loss.name == as_setting(loss)
    return dpo, cfg, calls


@pytest.mark.long
def test_a_loss_from_python_is_called_in_each_step(with_own_loss) -> None:
    dpo, cfg, calls = with_own_loss
    dpo.main(cfg)
    assert calls == [0.1, 0.1]


@pytest.mark.long
def test_a_process_that_has_no_such_function_rehearses_a_loss_from_python(with_own_loss) -> None:
    dpo, cfg, _ = with_own_loss
    outlook = _rehearse_apart(dpo, cfg, choose_device(None, "cpu"), None)
    assert outlook is not None and outlook["peak_bytes"] > 2**20


@pytest.mark.long
def test_prepared_rows_are_those_that_the_function_returns_now(tmp_path: Path) -> None:
    rows, end, calls = [{"q": f"{i}?", "a": "one"} for i in range(FEW_ROWS + 1)], ".", []

    def convert(row: dict[str, str]) -> dict[str, str]:
        calls.append(row)
        return {"prompt": row["q"], "completion": row["a"] + end}

    def lengths(folder: str, convert: Any = convert) -> int:
        data = {"source": rows, "format": convert, "num_processes": 2, "cache_dir": tmp_path / "cache"}
        run_tiny("full_finetune_single_device", tmp_path / folder, data=data, max_steps=1)
        return len([*(tmp_path / "cache").glob("documents-*")])

    assert (lengths("a"), lengths("b")) == (1, 1), "the same rows are read from the cache"
    end = " and more."
    assert lengths("c") == 2
    with pytest.raises(ValueError, match=r"other data:\n  changed: what convert returns \(data.format\)\nRestore"):
        lengths("a")
    with pytest.raises(ValueError, match=r"data.format must return the same for the same row"):
        lengths("d", lambda row: {"text": f"{row} {len(calls)} {calls.append(row)}"})
    with pytest.raises(ValueError, match=r"line 1: data.format: .*test_notebook.py, line \d+: KeyError: 'no'"):
        lengths("d", lambda row: row["no"])


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_names_are_listed_without_torch_and_found() -> None:
    code = "import lean_ft, sys; print(*dir(lean_ft)); assert not {'torch', 'typer'} & sys.modules.keys()"
    names = run_python(code).split()
    assert {*lean_ft.__all__, "data", "generation", "losses"} <= {*names}
    assert all(callable(getattr(lean_ft, name)) for name in lean_ft.__all__ if name != "__version__")
    assert (Path(lean_ft.__file__).parent / "py.typed").is_file(), "type checkers read annotations"
    with pytest.raises(AttributeError, match="no attribute 'lode_model'"):
        _ = lean_ft.lode_model


@pytest.mark.long
def test_a_subpackage_with_torch_is_found() -> None:
    run_python(
        "import lean_ft; lean_ft.generation.sample, lean_ft.system.units; assert 'prepare_batches' in dir(lean_ft.data)"
    )


# A cell that checks what a notebook's other cells have computed.
CHECKS = {
    "sft_lora": "before, after = (results[one]['answers']['num_right'] for one in results)\nassert before == 0 and after > 60",  # noqa: E501
    "dpo": "assert abs(float(values[1]) - 0.1 * (after - before)) < 0.006 and float(values[0]) > 0.7",
    "grpo": "rewards = [line['eval_reward'] for line in lines if 'eval_reward' in line]\nassert rewards[0] + 0.4 < "
    "rewards[-1]",
}


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def shape_of(output: Any) -> set[str]:
    """The log lines of an output, and the keys of a value, without amounts, and without answers, progress and
    checkpoints, in which machines differ."""
    text = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
    lines = re.findall(
        r"^(?!saved|removed|.*->|[a-z]+ +\d+ of \d+$)(?=.{12}\S)(?:[a-z]+ {2,}| {12}).*", text, re.MULTILINE
    )
    for pattern, stands_for in {
        r"(?<=_)([0-9a-f]{8}|\d+)\b": "N",
        r"(\b|[+-])\d[\d,.]*(e-?\d+)?( ([KMG]i)?B)?\b": "N",
        r"(N (h|min) )*N s\b": "N s",
        r"N thread\b": "N threads",
    }.items():
        lines = [re.sub(pattern, stands_for, line) for line in lines]
    return {*lines, *re.findall(r"'([a-z_ ,]+)': ", text)}


def test_the_shape_of_an_output_has_no_amounts() -> None:
    kept = "time        1 min 38 s for 171 steps\nmemory      peak 0.68 GiB resident; +4.1 MiB\nbefore:  58 + 7 = 65."
    kept += "\n            runs/a/evaluation_ecff4c90.jsonl: each answer\nresults     a->b"
    shape = {"time        N s for N steps", "memory      peak N resident; N"}
    assert shape_of({"text": kept}) == shape | {" " * 12 + "runs/a/evaluation_N.jsonl: each answer"}
    assert shape_of({"data": {"text/plain": "{'num_right': 100,\n 'role': 'user'}"}}) == {"num_right", "role"}


@pytest.mark.parametrize("name", CHECKS)
def test_a_notebook_is_kept_with_outputs_that_any_machine_has(name: str) -> None:
    nbformat = pytest.importorskip("nbformat")
    file = PAGE.parent / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(file, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run scripts/run_notebooks.py"
    assert "google.colab" in code[0].source and f"blob/main/docs/notebooks/{name}.ipynb" in notebook.cells[0].source
    assert max(map(len, "\n".join(cell.source for cell in code).splitlines())) <= 76
    kinds = [kind for output in outputs_of(notebook) for kind in output.get("data", {})]
    assert kinds.count("text/html") == 1 and kinds.count("image/png") in (1, 2)
    assert not re.search(r"/tmp/|/home/|/root|/work|site-packages|Traceback", file.read_text())
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs_of(notebook))


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_a_notebook_runs_and_the_model_learns(name: str, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(PAGE.parent / "notebooks" / f"{name}.ipynb", as_version=4)
    kept = [[shape_of(output) for output in cell.get("outputs", [])] for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    places = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=places, coalesce_streams=True).execute()
    again = [[shape_of(output) for output in cell.get("outputs", [])] for cell in notebook.cells[:-1]]
    assert again == kept, "run scripts/run_notebooks.py"
    (run,) = (cell.outputs for cell in notebook.cells if "lean_ft.run(" in cell.source and cell.cell_type == "code")
    shown = [sorted(output.data) for output in run if output.output_type == "display_data"]
    assert shown == [["text/html", "text/plain"], ["image/png", "text/plain"]], "one bar and one curve"
    total = re.search(r"(\d+)/(\d+)  ", run[-2].data["text/plain"])
    assert total is not None and total[1] == total[2]
