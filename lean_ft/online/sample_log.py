"""samples.jsonl: a few sampled completions every `sample_every` steps, also sent to the loggers and printed."""

import json
from functools import partial
from typing import Any

from lean_ft.data.parts import as_text
from lean_ft.online.rollouts import Rounds
from lean_ft.system.log import say
from lean_ft.system.redaction import redact_values
from lean_ft.system.units import number
from lean_ft.system.whole_files import open_in_place
from lean_ft.training.answers import one_line
from lean_ft.training.metrics import trim_metrics
from lean_ft.training.run import Run

FILE = "samples.jsonl"
WRITTEN, SHOWN = 8, 2  # completions per round, in the file and on the console
_shown = partial(one_line, most=60)


class SampleLog:
    """The samples.jsonl of an opened run. Lines after the step that the run resumes from are removed."""

    def __init__(self, run: Run, every: int) -> None:
        self._run, self._every, self._writes = run, every, run.writes
        if self._writes:
            self._path = run.directory / FILE
            trim_metrics(self._path, run.start_step, has_every_step=False)

    def write(self, step: int, rollouts: Rounds) -> None:
        """Write a few completions of the round after step `step` (from 0), if they are due."""
        if not self._writes or not self._every or step % self._every:
            return
        rows = redact_values(rollouts.shown(WRITTEN))  # prompts hold `data.system`
        with open_in_place(self._path, "a") as file:
            file.write("".join(json.dumps({"step": step + 1, **row}, ensure_ascii=False) + "\n" for row in rows))
        self._run.log_samples([{**row, "prompt": _asked(row)} for row in rows])
        for row in rows[:: max(1, len(rows) // SHOWN)][:SHOWN]:
            worth = "none" if row["reward"] is None else number(row["reward"])
            say("sample", f"{_shown(_asked(row))}  ->  {_shown(row['answer'])}  (reward {worth})")


def _asked(row: dict[str, Any]) -> str:
    return row["prompt"] if isinstance(row["prompt"], str) else as_text(row["prompt"][-1]["content"])
