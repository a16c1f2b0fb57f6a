"""`leanft data stats --duplicates` and `--contamination`: what is printed of rows, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # one case of each runs in continuous integration

TEXTS = [
    "The mill of Anu was built by two brothers beside the wide river in the year of the long flood.",
    "No one in Bela has counted the birds that sleep under the iron bridge when the winter is mild.",
    "In spring the children of Celo carry baskets of red apples up to the house with the green door.",
    "A train leaves Doro at night and reaches the coast before the fishermen push their boats out.",
]
TASK = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["a", "b"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Training rows whose last two repeat a training row and a held-out row, held-out rows, and a task."""

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    chats = [f"Question {i} is short." for i in range(3)]
    trained = [*TEXTS[:2], TEXTS[0].upper() + " And so on.", TEXTS[3], *chats]
    write("train.jsonl", [{"text": text} for text in trained])
    write("held_out.jsonl", [{"text": text} for text in (TEXTS[2], TEXTS[3], TEXTS[2])])
    write("one.jsonl", [{"text": TEXTS[0]}])
    questions = ["Which city is the largest one of the whole country today?", f"True or false: {TEXTS[1][:60]}", "Who?"]
    write("questions.jsonl", [{"question": question} for question in questions])
    (tmp_path / "task.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    return tmp_path


def test_near_duplicates_inside_and_between(leanft, folder: Path) -> None:
    held_out = f"data.validation_source={folder}/held_out.jsonl"
    lines = leanft.ok("data", "stats", f"{folder}/train.jsonl", held_out, "--duplicates").out.splitlines()
    assert lines[:4] == [
        "compared 7 training rows and 3 held-out rows",
        "  1 training row nearly repeats an earlier one",
        "  1 training row nearly repeats a held-out row (1 word for word)",
        "  1 held-out row nearly repeats an earlier one (1 word for word)",
    ]
    rows, held_out = f"{folder}/train.jsonl, line", f"{folder}/held_out.jsonl, line"
    assert [line for line in lines if "~" in line] == [
        f'{rows} 3 ~ {rows} 1: similarity 0.84; with "and so on"',
        f"{rows} 4 ~ {held_out} 2: similarity 1.00; the same words",
        f"{held_out} 3 ~ {held_out} 1: similarity 1.00; the same words",
    ]
    assert lines[-1] == "data.near_duplicates=drop leaves out 2 training rows and 1 held-out row"


def test_no_near_duplicates(leanft, folder: Path) -> None:
    lines = leanft.ok("data", "stats", f"{folder}/held_out.jsonl", "data.split=train[:2]", "--duplicates").out
    assert lines.splitlines()[:2] == ["compared 2 training rows", "  0 training rows nearly repeat an earlier one"]
    assert "leaves out" not in lines


@pytest.mark.long
def test_contamination(leanft, folder: Path) -> None:
    out = leanft.ok("data", "stats", f"{folder}/train.jsonl", "--contamination", f"{folder}/task.yaml").out
    lines = out.splitlines()
    assert lines[0] == "7 training rows compared with the questions of evaluation tasks"
    assert lines[2].split() == ["ours", "3", "2", "8", "1", "(50.0%)", "0"]
    assert lines[-1].startswith(f"ours, question 2 ~ {folder}/train.jsonl, line 2: 56% of its runs; ")
    assert lines[-1].endswith('"no one in bela has counted the birds that sleep under the"')


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["one.jsonl", "--duplicates"], "one.jsonl has 1 row. Pass a file with more rows"),
        (["train.jsonl", "--duplicates", "--peak"], "--peak predicts the memory of lengths"),
        (["train.jsonl", "--contamination", " "], "--contamination=' ' names no task"),
        (["train.jsonl", "--contamination", "a,"], "--contamination='a,' names no task"),
        (["train.jsonl", "--contamination", "none.yaml"], "tasks: no such file: none.yaml"),
        (["none.jsonl", "--duplicates"], "none.jsonl does not exist"),
    ],
)
def test_what_cannot_be_compared(leanft, folder: Path, words: list[str], error: str, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    message = leanft.refused("data", "stats", *words)
    assert error in message
    assert message.count("error: ") == 1
    assert "Traceback" not in message
