"""evaluation.json: the results of `leanft evaluate`, and beside it the answers, one JSON line for each question.

    {"step_00000100": {"answers": [{"data": ..., "pattern": ..., "limit": ..., "exact_match": 0.8, ...}],
                       "tasks": [{"task": ..., "limit": ..., ..., "metrics": {...}}]}}

A result replaces an earlier one of the same checkpoint, questions and settings only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lean_ft.peft.finished_models import find_finished
from lean_ft.system.foreign_values import JSON
from lean_ft.system.log import say
from lean_ft.system.redaction import redact_values
from lean_ft.system.run_directory import METRICS_FILE
from lean_ft.system.whole_files import read_json, write_json, write_whole
from lean_ft.training.answers import AnswerReport

Kind = Literal["answers", "tasks"]
FILE = "evaluation.json"  # in a run directory


class ResultsFile(NamedTuple):
    """Where the results of one model are kept."""

    path: Path | None
    """None if there is no file: results are printed only."""
    model: str
    """The model's name in the file: its folder."""
    adapters: tuple[str, ...] = ()
    """Further adapters, which are added to the model of that name."""

    @classmethod
    def of(cls, models: Sequence[str], output: Path | None) -> "ResultsFile":
        """The file `output`, or else evaluation.json in the run of the first of `models`: a model and its adapters."""
        folder = find_finished(models[0])
        is_run = (folder.parent / METRICS_FILE).is_file()
        return cls(output or (folder.parent / FILE if is_run else None), folder.name, tuple(models[1:]))

    def keep_answers(self, asked: Mapping[str, JSON], results: Mapping[str, JSON], report: AnswerReport | None) -> None:
        """Add the results of questions, and write each question and answer into a file beside it. asked: the settings
        that choose and compare the questions; report: None if no question was asked."""
        if self.path is None:
            return
        settings = self._settings(asked)
        if report is None:
            return self._keep("answers", settings, results)
        pairs = [[answer.question, answer.expected] for answer in report.answers]
        settings["questions_digest"] = _digest(pairs)
        beside = self.path.with_name(f"{self.path.stem}_{_digest([self.model, settings])}.jsonl")
        with write_whole(beside) as part, part.open("w", encoding="utf-8") as lines:
            for answer in report.answers:
                line = {"question": answer.asked, "expected": answer.expected, "given": answer.given}
                line |= {"right": answer.right, "ended": answer.ended}
                line |= {"answer": answer.whole, "prompt": answer.question}
                lines.write(json.dumps(redact_values(line), ensure_ascii=False) + "\n")
        self._keep("answers", settings, {**results, "answers_file": beside.name})
        say("", f"{beside}: each answer")

    def keep_tasks(self, asked: Mapping[str, JSON], results: Mapping[str, Mapping[str, float]]) -> None:
        """Add the metrics of tasks. asked: the settings of the tasks."""
        for task, metrics in results.items():
            self._keep("tasks", self._settings({"task": task, **asked}), {"metrics": {**metrics}})

    def _settings(self, asked: Mapping[str, JSON]) -> dict[str, JSON]:
        return redact_values({**asked, **({"adapters": [*self.adapters]} if self.adapters else {})})

    def _keep(self, kind: Kind, settings: dict[str, JSON], results: Mapping[str, JSON]) -> None:
        """Add results, or update those of the same settings."""
        if self.path is None:
            return
        content = read_json(self.path)
        kinds = content[self.model] if isinstance(content.get(self.model), dict) else {}
        entries = kinds.get(kind, [])
        entries = list(entries) if isinstance(entries, list) else [{"results": entries}]  # of an early version
        for i, entry in enumerate(entries):
            if isinstance(entry, dict) and settings.items() <= entry.items():
                entries[i] = {**entry, **results}
                break
        else:
            entries.append({**settings, **results})
        write_json(self.path, {**content, self.model: {**kinds, kind: entries}})


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
