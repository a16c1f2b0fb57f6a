"""Results of tools and environments in a file of the run's folder, which a run that was killed reads again."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

from lean_ft.system.foreign_values import JSON
from lean_ft.system.log import say
from lean_ft.system.run_directory import TOOL_RESULTS_FILE, checkpoint_step, list_checkpoints, read_training_state
from lean_ft.system.user_functions import PASSED, file_digest
from lean_ft.system.whole_files import open_in_place, write_whole

PRIVATE = 0o600  # results may hold secrets, which are not redacted here


class RecordedResults:
    """The results of finished calls, in the run's folder: a run that was killed does not request them again.

    Of an environment with `state_dict`, they are its resets and turns, with the state after each. A key depends on
    everything that
    leads to a call: the tools' files, the seed, the prompt, the sample number, and all ids. Lines of rounds that are in
    a checkpoint are removed.
    """

    def __init__(self, folder: Path, rank: int, files: Sequence[str]) -> None:
        self._folder, self._path = folder, folder / (f"{rank}_{TOOL_RESULTS_FILE}" if rank else TOOL_RESULTS_FILE)
        self._lock, self._known, self.round = Lock(), defaultdict[str, list[dict[str, Any]]](list), 0
        self._digests = "".join(name if name in PASSED else file_digest(name) for name in files).encode()
        self._seen: Path | None = None  # the newest checkpoint
        if rows := self._rows():
            self._keep(rows)  # a kill can leave a part of a line at the end
        for row in rows:
            self._known[row["key"]].append(row)

    def key(self, *parts: object) -> str:
        return blake2b(repr(parts).encode() + self._digests, digest_size=16).hexdigest()

    def take(self, key: str) -> dict[str, Any] | None:
        """What was added, if it is known. Each is returned once."""
        with self._lock:
            return self._known[key].pop(0) if self._known.get(key) else None

    def add(self, key: str, **values: JSON) -> None:
        line = _with_sum({"round": self.round, "key": key, **values})
        with self._lock, open_in_place(self._path, "a", PRIVATE) as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def begin(self, number: int) -> None:
        """Begin the round of this number."""
        self.round = number
        newest = max(list_checkpoints(self._folder), key=checkpoint_step, default=None)
        if newest is not None and newest != self._seen and self._path.exists():
            self._seen, saved = newest, read_training_state(newest)["batches"]["round"]
            self._keep([row for row in self._rows() if row["round"] >= saved])

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        with write_whole(self._path, on_disk=True) as file:
            file.touch(PRIVATE)
            file.write_text("".join(map(_with_sum, rows)))

    def _rows(self) -> list[dict[str, Any]]:
        """The lines that are as they were written. Others are left out with a remark: their calls are made again."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        rows = [row for line in lines if (row := _row(line)) is not None]
        if other := len(lines) - len(rows):
            say("tools", f"{self._path}: {other} of {len(lines)} lines are cut or changed. Their calls are made again")
        return rows


def _with_sum(row: dict[str, Any]) -> str:
    """A line of the file, which ends with a checksum of the rest."""
    return json.dumps({**row, "sum": blake2b(json.dumps(row).encode(), digest_size=8).hexdigest()}) + "\n"


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line that `_with_sum` wrote; None for any other."""
    try:
        row = json.loads(line)
        del row["sum"]
        return row if _with_sum(row).encode() == line else None
    except (ValueError, KeyError, TypeError, RecursionError):  # it was cut, or is not ours
        return None
