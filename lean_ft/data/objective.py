"""What an objective makes of data: the sequences of a row, and the fields of its batches beside the tokens.

Each objective has one file here (sft.py, pairs.py, unpaired.py) with a subclass of `RowReader`, a subclass of `Batch`
if it needs one, and `OBJECTIVE`, an instance of a subclass of `Objective`. The settings class names the file
(`DataConfig.objective`); nothing else lists the objectives. Processes that tokenize load these files, so they return
NumPy arrays and do not import torch.

Legend: B rows of a batch, T positions of a row, P rows of data in a batch, M their sequences, N labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lean_ft.data.batch import Batch
from lean_ft.data.formats import RowReader
from lean_ft.settings import DataConfig

if TYPE_CHECKING:
    from torch import Tensor

    from lean_ft.data.batches import Batches, Layout


@dataclass(frozen=True)
class Placed:
    """Where the sequences of a batch stand in its B * T flattened positions."""

    documents: np.ndarray  # (M,) their numbers in the layout
    num_labels: np.ndarray  # (M,)
    index: np.ndarray  # (N,) the position that predicts each label, sequence after sequence
    label: np.ndarray  # (N,)
    last: np.ndarray  # (M,) the position of each sequence's last token


class Objective:
    """One objective's data. The base class describes plain batches, in which a row of data is a sequence."""

    reader: type[RowReader]
    batch_type: type[Batch] = Batch
    unit: str = "sequences"
    """What reports count."""
    worse: ClassVar[tuple[str, ...]] = ()
    """Names of sequences that the model learns to avoid; previews color them."""
    shares_prompts: ClassVar[bool] = False
    """Whether the sequences of a row can share their prompt."""

    def check(self, config: Any, share_prompts: bool) -> None:
        """Raise ValueError for settings that the recipe does not honor."""

    def row_fields(self, layout: Layout, documents: np.ndarray, num_labels: np.ndarray) -> dict[str, Any]:
        """Fields of a batch that need no tokens, so they are known before the batch is built.

        documents: (M,) their numbers in the layout; num_labels: (M,).
        """
        return {}

    def token_fields(self, layout: Layout, placed: Placed, epoch: int) -> dict[str, Any]:
        """The other fields of a batch, for subclasses with a `batch_type`."""
        return {}

    def longest(self, config: Any, batch_size: int, share_prompts: bool = False) -> Batch:
        """The largest batch, without contents: each row has `max_length` tokens, and each token is a label."""
        sides = len(config.sides)
        number = batch_size if config.batch_tokens is None else config.batch_tokens // (config.max_length * sides)
        num_documents = None if config.packing == "none" else number * sides
        return empty_batch((number * sides, config.max_length), num_documents)

    def names(self, config: Any, values: Sequence[Any]) -> Sequence[str]:
        """A name for each sequence of a row, for previews; values: as `RowReader.values` returns them."""
        return config.sides

    def fitted(self, config: Any, batches: Batches) -> dict[str, Any]:
        """Settings under which `longest` is as large as the largest of `batches`, for the planner."""
        longest = batches.longest if config.longest is None else min(config.longest, batches.longest)
        update: dict[str, Any] = {"max_length": longest}
        if config.batch_tokens is not None:
            update["batch_tokens"] = min(config.batch_tokens, batches.num_rows * longest * len(config.sides))
        return update

    def remarks(self, lengths: np.ndarray, num_targets: np.ndarray) -> list[str]:
        """Lines for `leanft data stats`; lengths, num_targets: of all sequences, before truncation."""
        return []


PLAIN = Objective()


def objective_of(config: DataConfig) -> Objective:
    """The objective that the class of `config` names. Raises ValueError if it names none."""
    if not config.objective:
        raise ValueError(
            f"data settings of the class {type(config).__name__} do not say how rows are rendered; expected a subclass of "
            "SFTDataConfig, PreferenceDataConfig or another class of lean_ft.settings that has an objective."
        )
    return import_module(f"lean_ft.data.{config.objective}").OBJECTIVE


def settings_class(config: DataConfig) -> type[DataConfig]:
    """The class of lean_ft.settings that a recipe's own class of settings extends."""
    return next(kind for kind in type(config).__mro__ if kind.__module__ == DataConfig.__module__)


def empty_batch(shape: tuple[int, int], num_documents: int | None, num_targets: int | None = None) -> Batch:
    """A batch of `shape` (B, T) without contents; num_documents: None if rows are padded; num_targets: B * T if None."""
    num_tokens = shape[0] * shape[1]
    return Batch(
        input_ids=zeros(*shape),
        labels=zeros(*shape),
        positions=zeros(*shape),
        cu_seqlens=None if num_documents is None else zeros(num_documents + 1, dtype="int32"),
        num_targets=num_tokens if num_targets is None else num_targets,
        num_tokens=num_tokens,
    )


def zeros(*shape: int, dtype: str = "int64") -> Tensor:
    """A tensor for `Objective.longest`."""
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype))
