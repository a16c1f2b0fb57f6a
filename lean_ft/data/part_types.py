"""What a type of content parts that are not text does while rows are read.

Each type has one object (`lean_ft.data.parts`), also in runs that read texts alone: they refuse its parts. What parts
add to documents is the work of a kind of columns (`lean_ft.data.kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from lean_ft.data.kinds import Kind
    from lean_ft.settings import RowsConfig
    from lean_ft.tokenizers import Tokenizer

Messages = list[dict[str, Any]]


class UnreadablePartError(ValueError):
    """The content of a part is missing, broken or refused. Its row is a bad row."""

    unit: ClassVar[str]


class PartType:
    """How rows hold the parts of one type, and how they are read."""

    unit: ClassVar[str]
    """The name of the type in messages and reports. A part that was read has it as its `type`, and its content under
    this key."""
    with_article: ClassVar[str]
    """The unit with its article, for messages."""
    fields: ClassVar[tuple[str, ...]]
    """Fields of a row that may hold the contents of parts."""
    mark: ClassVar[str]
    """Marks the place of a part in a text."""
    not_read: ClassVar[str]
    """The error for a row that shows such a part in a run that reads none."""
    remedy_of_prompt: ClassVar[str]
    """What to do about a prompt that shows such a part, if the model reads none."""
    embedded_model: ClassVar[tuple[str, ...]] = ()
    """Settings of the embedded model that reads such parts; empty if there is none."""
    feature: ClassVar[str]
    """The type of columns of `datasets` that decode such contents."""

    def claims(self, part: Mapping[str, Any]) -> bool:
        """Whether a content part is of this type."""
        raise NotImplementedError

    def read(self, part: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a part as {"type": unit, unit: content}; the content is None if the part only marks a place.

        Raises ValueError, which names `where`, for a part that must not be dropped or contradicts itself.
        """
        raise NotImplementedError

    def further_keys(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a part that are not read, with their values."""
        raise NotImplementedError

    def is_content(self, start: bytes) -> bool:
        """Whether a file that starts so is such a content."""
        raise NotImplementedError

    def take(self, messages: Messages, fields: Mapping[str, Any]) -> tuple[Messages, list[Any]]:
        """Return messages with a part for each content of a row, and the contents in order. fields: the row's `fields`.

        Raises ValueError if the contents do not fit the places for them.
        """
        raise NotImplementedError

    def kinds(self, tokenizer: Tokenizer, config: RowsConfig | None) -> list[Kind]:
        """The kind of columns that such parts add to documents; [] for a tokenizer that reads none. config: the
        settings of rows, which may limit the parts.

        Raises ValueError for limits that cannot be met.
        """
        raise NotImplementedError
