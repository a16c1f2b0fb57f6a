"""An objective of the user's own, in a copied recipe or a module beside it, and parameters that a checkpoint cannot
hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lean_ft.data.documents import Parts, renderer_of
from lean_ft.data.objective import own_files
from lean_ft.settings.text import load_config
from lean_ft.system.catalog import load_recipe, recipes
from lean_ft.tokenizers import load_tokenizer

OWN = '''
from lean_ft.data.formats import Fields, RowReader, plain
from lean_ft.data.objective import Objective
from lean_ft.settings import DataConfig


class QuestionReader(RowReader):
    known = {"question": Fields(("question", "answer"), prompts=(("question",),), completion="answer")}

    def passages(self, row):
        fields = self.fields_of(row)
        return [plain(self.config.before + fields["question"], fields["answer"], " ")]

    def fit(self, documents, place, report):
        kept = self.truncated(documents[0], place, report)
        return [] if kept is None else [kept]


class Questions(Objective):
    reader = QuestionReader
    unit = "questions"


class QuestionData(DataConfig):
    objective = Questions()
    before: str = "Question: "
    """Text before each question."""


'''
ROWS = [{"question": f"{i} plus 1?", "answer": f"{i + 1}."} for i in range(20)]
SETTINGS = ("model.path=tiny", "model.dtype=float32", "data.shuffle=false", "batch_size=4", "device=cpu", "plan=false")


def copied(folder: Path, *changes: tuple[str, str], own: str = "") -> Path:
    """Write a copy of `finetune` with texts replaced, and `own` before its `Config`."""
    text = recipes()["finetune"].read_text()
    for old, new in (("class Config(", f"{own}class Config("), *changes):
        assert old in text
        text = text.replace(old, new)
    file = folder / "mine.py"
    file.write_text(text)
    return file


def written(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(recipe: Path, *settings: str, output: str = "run", rows: list[Any] = ROWS) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        module, source = load_recipe(recipe), written(tmp_path / f"rows_of_{output}.jsonl", rows)
        given = (f"data.source={source}", f"data.cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/{output}")
        module.main(load_config(module.Config, None, [*SETTINGS, *given, "max_steps=2", *settings]))
        return [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]

    return run


DATA = ("data: SFTDataConfig", "data: QuestionData")


def test_an_objective_in_a_copied_recipe_trains_as_rows_of_its_texts_do(train: Any, tmp_path: Path, capsys: Any):
    lines = train(copied(tmp_path, DATA, own=OWN), "data.before='Q: '")
    assert "20 questions" in capsys.readouterr().out
    rows = [{"prompt": f"Q: {row['question']}", "completion": row["answer"]} for row in ROWS]
    plain = train(recipes()["finetune"], "data.chat=false", "data.separator=' '", output="plain", rows=rows)
    assert len(lines) == 2
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.long)])  # a recipe imports torch
def test_processes_that_tokenize_read_it_from_its_file(
    beside: bool, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = train(copied(tmp_path, DATA, own=OWN), output="alone")
    monkeypatch.setattr("lean_ft.data.documents.FEW_ROWS", 2)
    monkeypatch.setattr("lean_ft.data.documents.ROWS_AT_A_TIME", 5)
    if beside:
        (tmp_path / "own_questions.py").write_text(OWN)
    own = "from own_questions import QuestionData\n\n\n" if beside else OWN
    lines = train(copied(tmp_path, DATA, own=own), "data.num_processes=2", f"data.cache_dir={tmp_path}/other")
    assert [line["loss"] for line in lines] == [line["loss"] for line in alone]


def test_a_run_resumes_with_another_loop_and_not_with_other_documents(train: Any, tmp_path: Path):
    train(copied(tmp_path, DATA, own=OWN))
    loop = ("run.log(", "run.log(twice=2.0, ")
    lines = train(copied(tmp_path, DATA, loop, own=OWN), "max_steps=3")
    assert [line.get("twice") for line in lines] == [None, None, 2.0]
    other = OWN.replace('["answer"], " ")', '["answer"], " A: ")')
    with pytest.raises(ValueError, match="was trained on other data"):
        train(copied(tmp_path, DATA, own=other), "max_steps=4")


def test_an_objective_of_a_notebook_is_read_by_one_process(tmp_path: Path):
    module: dict[str, Any] = {"__name__": "__main__"}
    exec(OWN, module)
    data = module["QuestionData"](source=written(tmp_path / "rows.jsonl", ROWS), num_processes=1)
    tokenizer = load_tokenizer("tiny")
    assert own_files(data) == {"__main__": ""}
    parts = Parts(renderer_of(data, tokenizer))
    assert (sum(len(part) for part in parts), parts.report.kept) == (20, 20)
    with pytest.raises(ValueError, match=r"data.num_processes=2: other processes cannot import QuestionData"):
        list(Parts(renderer_of(data.model_copy(update={"num_processes": 2}), tokenizer)))


def test_its_format_is_named_as_the_run_names_it(tmp_path: Path, train: Any, capsys: Any):
    train(copied(tmp_path, DATA, own=OWN), "data.format=question")
    assert "20 rows (question)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="data.format"):
        train(copied(tmp_path, DATA, own=OWN), "data.format=questoin")


def test_an_objective_is_an_instance(tmp_path: Path, train: Any):
    with pytest.raises(ValueError, match=r"QuestionData.objective is <class .*expected an instance of a subclass"):
        train(copied(tmp_path, DATA, own=OWN.replace("Questions()", "Questions")))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            False,
            r"the model's parameters differ from those of its config.json: extra.bias, extra.weight\..*carried=module",
        ),
        (True, r"trains parameters that are not its adapter's, .*: extra.bias, extra.weight\. Freeze them"),
    ],
)
def test_parameters_that_a_checkpoint_cannot_hold_are_refused_before_the_first_step(
    lora: bool, message: str, train: Any, tmp_path: Path
):
    added = "import torch; model.extra = torch.nn.Linear(4, 4)"
    recipe = copied(tmp_path, ("    apply_regularization(", f"    {added}\n    apply_regularization("))
    rows = [{"prompt": "a", "completion": "b"}] * 8
    with pytest.raises(ValueError, match=message):
        train(recipe, *(["lora={}"] if lora else []), rows=rows)
    assert not list(tmp_path.glob("run/step_*")) and not (tmp_path / "run" / "metrics.jsonl").exists()
