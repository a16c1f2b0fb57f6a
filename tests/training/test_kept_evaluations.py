"""evaluation.json and the answers beside it."""

import json
from pathlib import Path

from lean_ft.training.answers import AnsweredQuestion, AnswerReport
from lean_ft.training.kept_evaluations import keep_answers, keep_tasks


def report(*given: str) -> AnswerReport:
    return AnswerReport(
        [AnsweredQuestion(f"Be kind. {i}?", f"{i}?", "yes", text, text, True) for i, text in enumerate(given)]
    )


def test_a_result_replaces_only_one_of_the_same_questions_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps({"step_00000001": {"answers": {"num_right": 9}, "tasks": {"arc": {"acc": 0.5}}}}))
    asked = {"data": {"source": "a.jsonl"}, "pattern": None, "limit": None}
    named = [
        keep_answers(file, "step_00000001", settings, {"num_right": right}, report(*given))
        for settings, right, given in [
            (asked, 1, ("yes", "no")),
            (asked, 2, ("yes", "yes")),  # replaces the first
            (asked, 0, ("no",)),  # the file has other rows now
            (asked | {"pattern": "(.)"}, 3, ("yes", "no")),
            (asked | {"data": {"source": "b.jsonl"}}, 4, ("yes", "no")),
        ]
    ]
    keep_answers(file, "step_00000002", asked, {"num_right": 5}, report("yes", "no"))
    for limit, accuracy in ((1, 0.0), (2, 0.25), (2, 0.75)):
        keep_tasks(file, "step_00000001", {"limit": limit}, {"arc": {"acc": accuracy}})
    kept = json.loads(file.read_text())
    answers, tasks = kept["step_00000001"]["answers"], kept["step_00000001"]["tasks"]
    assert answers[0] == {"results": {"num_right": 9}} and tasks[0] == {"results": {"arc": {"acc": 0.5}}}
    assert [entry["num_right"] for entry in answers[1:]] == [2, 0, 3, 4]
    assert [tmp_path / entry["answers_file"] for entry in answers[1:]] == named[1:] and len({*named}) == 4
    assert [entry["metrics"]["acc"] for entry in tasks[1:]] == [0.0, 0.75]
    lines = [json.loads(line) for line in named[2].read_text().splitlines()]
    line = {"question": "0?", "expected": "yes", "given": "no", "right": False, "ended": True}
    assert lines == [{**line, "answer": "no", "prompt": "Be kind. 0?"}]
