"""evaluation.json and the answers beside it."""

import json
from pathlib import Path

from lean_ft.training.answers import AnsweredQuestion, AnswerReport
from lean_ft.training.kept_evaluations import ResultsFile


def report(*given: str) -> AnswerReport:
    return AnswerReport(
        [AnsweredQuestion(f"Be kind. {i}?", f"{i}?", "yes", text, text, True) for i, text in enumerate(given)]
    )


def test_a_result_replaces_only_one_of_the_same_questions_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps({"step_00000001": {"answers": {"num_right": 9}, "tasks": {"arc": {"acc": 0.5}}}}))
    asked = {"data": {"source": "a.jsonl"}, "pattern": None, "limit": None}
    results = ResultsFile(file, "step_00000001")
    for settings, right, given in [
        (asked, 1, ("yes", "no")),
        (asked, 2, ("yes", "yes")),  # replaces the first
        (asked, 0, ("no",)),  # the file has other rows now
        (asked | {"pattern": "(.)"}, 3, ("yes", "no")),
        (asked | {"data": {"source": "b.jsonl"}}, 4, ("yes", "no")),
    ]:
        results.keep_answers(settings, {"num_right": right}, report(*given))
    results._replace(model="step_00000002").keep_answers(asked, {"num_right": 5}, report("yes", "no"))
    results._replace(adapters=("other",)).keep_answers(asked, {"num_right": 6}, report("yes", "no"))
    for limit, accuracy in ((1, 0.0), (2, 0.25), (2, 0.75)):
        results.keep_tasks({"limit": limit}, {"arc": {"acc": accuracy}})
    kept = json.loads(file.read_text())
    answers, tasks = kept["step_00000001"]["answers"], kept["step_00000001"]["tasks"]
    assert answers[0] == {"results": {"num_right": 9}} and tasks[0] == {"results": {"arc": {"acc": 0.5}}}
    assert [entry["num_right"] for entry in answers[1:]] == [2, 0, 3, 4, 6]
    files = [tmp_path / entry["answers_file"] for entry in answers[1:]]
    assert {*files} < {*tmp_path.glob("evaluation_*.jsonl")} and len({*files}) == 5
    assert [entry["metrics"]["acc"] for entry in tasks[1:]] == [0.0, 0.75]
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    line = {"question": "0?", "expected": "yes", "given": "no", "right": False, "ended": True}
    assert lines == [{**line, "answer": "no", "prompt": "Be kind. 0?"}]
