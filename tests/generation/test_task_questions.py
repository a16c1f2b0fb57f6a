"""Questions of evaluation tasks: what the harness would ask, without a network."""

import json
from pathlib import Path

import pytest

from lean_ft.generation.task_questions import questions_of
from tests.embedding.test_mteb import PASSAGES, TOPICS, own_task

pytestmark = pytest.mark.long  # imports the harness
TASK = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: TEXT
doc_to_choice: "{{choices}}"
doc_to_target: 0
MORE
metric_list: [{metric: acc}]
"""
CASES = {
    "asked": ('"Question: {{question}}"', "", "Question: Who is it?"),
    "named": (
        '"Question: {{question}}"',
        'should_decontaminate: true\ndoc_to_decontamination_query: "{{question}}"',
        "Who is it?",
    ),
    "one_of_several": ('"{{index}}"', "", "No"),
}


@pytest.mark.parametrize("name", CASES)
def test_questions_of_a_yaml_file(name: str, tmp_path: Path) -> None:
    text, more, expected = CASES[name]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "Who is it?", "choices": ["Yes", "No"], "index": 1}) + "\n")
    task = TASK.replace("NAME", name).replace("FILE", str(rows)).replace("TEXT", text).replace("MORE", more)
    (tmp_path / "task.yaml").write_text(task)
    assert [*questions_of([str(tmp_path / "task.yaml")])] == [(name, expected)]


def test_texts_of_mteb(monkeypatch: pytest.MonkeyPatch) -> None:
    import mteb

    monkeypatch.setattr(mteb, "get_task", lambda name: own_task(name.removeprefix("Own")))
    assert [*questions_of(["mteb:OwnRetrieval"])] == [("mteb:OwnRetrieval", topic) for topic in TOPICS]
    assert {text for _, text in questions_of(["mteb:OwnSTS"])} == {*TOPICS, *PASSAGES[: len(TOPICS) + 8]}


@pytest.mark.parametrize(
    ("task", "error"),
    [("no_such.yaml", "no such file"), ("no_such_task", "no such task"), ("mteb:NoSuchTask", "MTEB has no task")],
)
def test_a_task_that_does_not_exist(task: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        list(questions_of([task]))


def test_a_data_file_that_does_not_exist(tmp_path: Path) -> None:
    task = TASK.replace("NAME", "lost").replace("FILE", str(tmp_path / "none.jsonl"))
    (tmp_path / "task.yaml").write_text(task.replace("TEXT", '"{{question}}"').replace("MORE", ""))
    with pytest.raises(ValueError, match=r"the data of .*task\.yaml cannot be read"):
        list(questions_of([str(tmp_path / "task.yaml")]))
