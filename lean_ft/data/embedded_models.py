"""Choose the embedded model that reads given rows. `leanft data` shows rows with it if no model is named."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lean_ft.data.chats import read_chat
from lean_ft.data.foreign_fields import CALLS, OTHER_NAMES, is_given
from lean_ft.data.parts import TYPES, units_shown


class EmbeddedModel(NamedTuple):
    """Settings of an embedded model, and the reason to choose it."""

    settings: tuple[str, ...]
    because: str = ""

    @property
    def path(self) -> str:
        return self.settings[0].removeprefix("model.path=")


FOR_TEXTS = EmbeddedModel(("model.path=tiny",))
FOR_TOOLS = EmbeddedModel(("model.path=tiny-tools",), "the rows have tools")
FOR_TURNS = FOR_TOOLS._replace(because="the run has tools or an environment")


def embedded_model(rows: Iterable[Mapping[str, Any]]) -> EmbeddedModel:
    """Return the embedded model for rows with these fields. The first row with parts or tools decides."""
    for fields in rows:
        shown = units_shown(fields)
        for part_type in TYPES:
            if part_type.unit in shown and part_type.embedded_model:
                return EmbeddedModel(part_type.embedded_model, f"the rows have {part_type.unit}s")
        if _has_tools(fields):
            return FOR_TOOLS
    return FOR_TEXTS


def _has_tools(fields: Mapping[str, Any]) -> bool:
    names = ["tools", *(theirs for theirs, ours in OTHER_NAMES.items() if ours == "tools")]
    if any(is_given(fields.get(name)) for name in names):
        return True
    for field, value in fields.items():
        with suppress(ValueError):  # no chat, or a bad one, which the reader of the rows reports
            for message in read_chat(value, field).messages:
                if message["role"] in ("tool", "function") or any(is_given(message.get(name)) for name in CALLS):
                    return True
    return False
