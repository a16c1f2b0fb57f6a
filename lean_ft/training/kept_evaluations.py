"""evaluation.json: the results of `leanft evaluate`, and beside it the answers, one JSON line for each question.

    {"step_00000100": {"answers": [{"data": ..., "pattern": ..., "limit": ..., "exact_match": 0.8, ...}],
                       "tasks": [{"task": ..., "limit": ..., ..., "metrics": {...}}]}}

A result replaces an earlier one of the same checkpoint, questions and settings only.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lean_ft.system.foreign_values import JSON
from lean_ft.system.redaction import redact_values
from lean_ft.system.whole_files import read_json, write_json, write_whole
from lean_ft.training.answers import AnswerReport

Kind = Literal["answers", "tasks"]


def keep_answers(
    file: Path, model: str, asked: Mapping[str, JSON], results: Mapping[str, JSON], report: AnswerReport | None
) -> Path | None:
    """Add the results of questions to the file, and write each question and answer into a file beside it, which is
    returned. asked: the settings that choose and compare the questions; report: None if no question was asked."""
    settings = redact_values(dict(asked))
    if report is None:
        _keep(file, model, "answers", settings, results)
        return None
    pairs = [[answer.question, answer.expected] for answer in report.answers]
    settings["questions_digest"] = _digest(pairs)
    beside = file.with_name(f"{file.stem}_{_digest([model, settings])}.jsonl")
    with write_whole(beside) as part, part.open("w", encoding="utf-8") as lines:
        for answer in report.answers:
            line = {"question": answer.asked, "expected": answer.expected, "given": answer.given}
            line |= {"right": answer.right, "ended": answer.ended, "answer": answer.whole, "prompt": answer.question}
            lines.write(json.dumps(redact_values(line), ensure_ascii=False) + "\n")
    _keep(file, model, "answers", settings, {**results, "answers_file": beside.name})
    return beside


def keep_tasks(file: Path, model: str, asked: Mapping[str, JSON], results: Mapping[str, Mapping[str, float]]) -> None:
    """Add the metrics of tasks to the file. asked: the settings of the tasks."""
    for task, metrics in results.items():
        _keep(file, model, "tasks", redact_values({"task": task, **asked}), {"metrics": {**metrics}})


def _keep(file: Path, model: str, kind: Kind, settings: dict[str, JSON], results: Mapping[str, JSON]) -> None:
    """Add results, or update those of the same settings."""
    content = read_json(file)
    kinds = content[model] if isinstance(content.get(model), dict) else {}
    entries = kinds.get(kind, [])
    entries = list(entries) if isinstance(entries, list) else [{"results": entries}]  # of an early version
    for i, entry in enumerate(entries):
        if isinstance(entry, dict) and settings.items() <= entry.items():
            entries[i] = {**entry, **results}
            break
    else:
        entries.append({**settings, **results})
    write_json(file, {**content, model: {**kinds, kind: entries}})


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
