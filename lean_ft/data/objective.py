"""Data interface of an objective: how it renders rows, and which fields it adds to batches.

Each objective has one file in this package, such as sft.py or pairs.py. The file defines a subclass of `RowReader`, a
subclass of `Batch` if needed, and `OBJECTIVE`, an instance of a subclass of `Objective`. A subclass of `DataConfig` in
the file has the instance as its `objective`; the classes of `lean_ft.settings` name the file instead. There is no other
registry. Tokenizing processes load these files, so they return NumPy arrays and do not import torch at module level.

An objective of a user's own is in a recipe's file or a module beside it, in the same way.

Legend: B rows of a batch, T positions of a row, P rows of data in a batch, M their sequences, N labels.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lean_ft.data.batch import Batch
from lean_ft.data.columns import OF_LOSS, Columns, Document
from lean_ft.data.formats import RowReader
from lean_ft.settings import DataConfig

if TYPE_CHECKING:
    from lean_ft.data.batches import Batches
    from lean_ft.data.collate import Placed
    from lean_ft.tokenizers import Tokenizer


class Objective:
    """Data of an objective. The base class describes plain batches, with one sequence per row of data."""

    reader: type[RowReader]
    batch_type: type[Batch] = Batch
    unit: ClassVar[str] = "sequences"
    """Unit in reports."""
    judged: ClassVar[str] = ""
    """Unit of which an evaluation counts those that are right, such as words; empty: `unit`."""
    shown_metrics: ClassVar[Mapping[str, str]] = {}
    """Metrics of an evaluation that its log line shows after the loss, with their formats, in order."""
    scored_by: ClassVar[str | None] = "score"
    """Command that gives such rows the scores of a model with an output layer for them; None if there is none."""
    recipe: ClassVar[str] = ""
    """Recipe that `leanft data` shows a file of such rows with."""
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of fields. Rows that have all fields of one group are such rows."""
    worse: ClassVar[tuple[str, ...]] = ()
    """Names of rejected or undesirable sequences, colored in previews."""
    of_loss: ClassVar[tuple[str, ...]] = OF_LOSS
    """Columns that the model does not read."""
    sequences: ClassVar[str] = "completions"
    """What follows a prompt that is computed once, in the log."""
    shares_prompts: ClassVar[bool] = False
    """Whether the sequences of a row can share their prompt."""

    def of(self, config: Any) -> Objective:
        """Return the objective of these settings, for an objective whose settings choose between several."""
        return self

    def check(self, config: DataConfig, share_prompts: bool) -> None:
        """Raise ValueError for settings that the recipe does not support."""

    def shared(self, columns: Columns, config: DataConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
        """Return what N documents share if prompts are computed once, by the names of `arrange`'s arguments: `shared`
        (N,) tokens, and `groups` (N,) unless each document continues the one before it."""
        raise ValueError(f"{self.unit} share no prompts: call prepare_batches without `share_prompts`.")

    def why_not_shared(self, config: DataConfig) -> str:
        """Return why these settings do not allow prompts that are computed once; empty if they do."""
        return ""

    def row_fields(self, columns: Columns, placed: Placed) -> dict[str, Any]:
        """Return the batch fields that need no tokens, so that they are available before the batch is built."""
        return {}

    def token_fields(self, columns: Columns, placed: Placed, epoch: int) -> dict[str, Any]:
        """Return the other batch fields, for subclasses with a `batch_type`."""
        return {}

    def counted_documents(self, placed: Placed) -> np.ndarray:
        """Return the document of each thing over which an evaluation averages the loss, such as pairs, if that is not
        the labels of tokens: the first document of each row of data."""
        return placed.documents[:: placed.sides]

    def is_of_file(self, fields: Set[str], format_name: str) -> bool:
        """Whether the rows of a file with these fields, or with the format that `data.format` names, are for this
        objective."""
        return bool(self.marks) and (format_name in self.reader.known or any(fields >= {*mark} for mark in self.marks))

    def settings_of_file(self, fields: Set[str]) -> list[str]:
        """Return settings that `recipe` needs to show a file of rows with these fields, as `key=value`."""
        return []

    def full(self, document: Document) -> Document:
        """Return a document of a plan with the columns that the reader adds to those of data, of the same shapes and
        dtypes. Its tokens are all trained."""
        return document

    def beside(self, document: Document) -> dict[str, Document]:
        """Return the sequences that are computed beside a document, by their names in previews."""
        return {}

    def lengths_beside(self, columns: Columns) -> dict[str, np.ndarray]:
        """Return the lengths (N,) of the sequences that are computed beside each document, by name."""
        return {}

    def answered(self, prompt: Document, ids: Sequence[int], trained: Sequence[bool]) -> Document:
        """Return a prompt of `Batch.questions` with a sampled completion."""
        return prompt.continued(ids, trained)

    def room(self, prompt: Document, config: DataConfig) -> int:
        """Return the most tokens of a completion of a prompt of `Batch.questions`."""
        return max(0, config.max_length - len(prompt))

    def completed(self, config: Any) -> DataConfig:
        """Return the settings with what all rows say, such as the labels. `leanft validate` reads the first rows with
        settings that are not completed."""
        return config

    def words_to_try(self, config: Any, run: Path) -> list[str] | None:
        """Return the words after `leanft` of the command that tries the model of a run, in the run's folder; None if
        the model writes text, or scores of rows (`scored_by`)."""
        return None

    def describe(self, values: np.ndarray) -> list[str]:
        """Return remarks for the report; values: (N, V), from `RowReader.values`, of all N sequences."""
        return []

    def fitted(self, config: DataConfig, batches: Batches) -> dict[str, Any]:
        """Return settings that make the largest batch as large as the largest of `batches`, for the planner."""
        longest = batches.longest if config.longest is None else min(config.longest, batches.longest)
        update: dict[str, Any] = {"max_length": longest}
        if config.batch_tokens is not None:
            update["batch_tokens"] = min(config.batch_tokens, batches.num_rows * longest * len(config.sides))
        return update

    def remarks(self, lengths: np.ndarray, num_targets: np.ndarray) -> list[str]:
        """Return extra lines for `leanft data stats`; lengths, num_targets: (N,) for all N sequences before
        truncation."""
        return []


PLAIN = Objective()
_NOT_OWN = ("lean_ft", "pydantic", "builtins", "abc", "typing")


def objectives() -> list[Objective]:
    """Return the objectives of all files of this package that define one, by name."""
    files = sorted(Path(__file__).parent.glob("*.py"))  # read as text, because some other modules import torch
    names = [file.stem for file in files if "\nOBJECTIVE = " in file.read_text(encoding="utf-8")]
    return [import_module(f"lean_ft.data.{name}").OBJECTIVE for name in names]


def objective_of(config: DataConfig) -> Objective:
    """Return the objective of the class of `config`. Raises ValueError if there is none."""
    if isinstance(config.objective, Objective):
        return config.objective.of(config)
    if not isinstance(config.objective, str):
        raise ValueError(
            f"{type(config).__name__}.objective is {config.objective!r}; expected an instance of a subclass of "
            "lean_ft.data.objective.Objective, such as `objective = MyObjective()`."
        )
    if not config.objective:
        raise ValueError(
            f"data settings of the class {type(config).__name__} do not say how rows are rendered; expected a subclass "
            "of SFTDataConfig, PreferenceDataConfig or another class of lean_ft.settings that has an objective."
        )
    return import_module(f"lean_ft.data.{config.objective}").OBJECTIVE.of(config)


def own_files(config: DataConfig) -> dict[str, str]:
    """The modules of the user that define the objective, its reader and its settings, with their files; an empty name
    where a notebook or a script defines them, which other processes cannot import."""
    if isinstance(config.objective, str):
        return {}
    bases = [base for kind in (type(config), type(config.objective), config.objective.reader) for base in kind.__mro__]
    names = dict.fromkeys(base.__module__ for base in bases if base.__module__.partition(".")[0] not in _NOT_OWN)
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return files | {name: "" for name in names if name == "__main__"}
