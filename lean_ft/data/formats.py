"""How a row is read: its fields, whatever they are called, become a chat or a plain text.

| format            | fields                            | becomes                                          |
|-------------------|-----------------------------------|--------------------------------------------------|
| messages          | messages; tools (optional)        | the chat as it is                                |
| prompt_completion | prompt, completion                | a user's and an assistant's message              |
| alpaca            | instruction, output; input (opt.) | the same; instruction and input are one message  |
| text              | text                              | bos + text + eos, all of it trained              |

Without a chat template, prompt_completion becomes bos + prompt + completion + eos with nothing put between,
tokenised as one text: a token that straddles the boundary is trained. alpaca's parts are then separated by an
empty line. Control tokens spelled in such plain texts are control tokens, since a text may be a chat that was
rendered elsewhere; inside messages they are ordinary text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lean_ft.data.sources import Row
from lean_ft.settings import SFTDataConfig
from lean_ft.spelling import did_you_mean
from lean_ft.tokenizers import Passage, Tokenizer, TrainOn

REQUIRED = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = {"messages": ("tools",), "prompt_completion": (), "alpaca": ("input",), "text": ()}
NUM_ROWS_TO_DETECT = 16


def detect_format(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """The first format in the table whose fields all of `rows` have. Raises ValueError if none."""
    known = sorted({name for names in (*REQUIRED.values(), *OPTIONAL.values()) for name in names})
    for ours in columns:
        if ours not in known:
            raise ValueError(
                f"data.columns.{ours}: no format has such a field; the fields are {', '.join(known)}. "
                f"data.columns.prompt=question reads `prompt` from `question`.{did_you_mean(ours, known)}"
            )
    for name, fields in REQUIRED.items():
        if all(columns.get(field, field) in row.fields for row in rows for field in fields):
            return name
    expected = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in REQUIRED.items())
    raise ValueError(
        f"{rows[0].place}: the format cannot be told from the fields {_names(rows[0].fields)}. Expected "
        f"those of one format ({expected}). {_hint(rows[0].fields)}"
    )


@dataclass(frozen=True)
class RowReader:
    """Turns rows of one format into passages of text."""

    format: str
    columns: dict[str, str]
    train_on: TrainOn
    tokenizer: Tokenizer

    @classmethod
    def of(cls, config: SFTDataConfig, first_rows: Sequence[Row], tokenizer: Tokenizer) -> "RowReader":
        """A reader for `config`, with the format told from `first_rows` where it is `auto`."""
        detected = detect_format(first_rows, config.columns) if config.format == "auto" else config.format
        return cls(detected, config.columns, config.train_on, tokenizer)

    def passage(self, row: Row) -> Passage:
        """The text of `row` and what of it is trained. Raises ValueError with the row's place."""
        fields = self._fields(row)
        try:
            if self.format == "messages":
                messages, tools = _messages(fields["messages"]), _tools(fields.get("tools"))
                return self.tokenizer.passage(messages, tools, train_on=self.train_on)
            if self.format == "text":
                text = _string(fields, "text")
                return Passage(text, [(0, len(text))], add_bos=True, add_eos=True)
            if self.format == "prompt_completion":
                prompt, completion, between = _string(fields, "prompt"), _string(fields, "completion"), ""
            else:
                asked = [
                    _string(fields, "instruction"),
                    _string(fields, "input") if fields.get("input") else "",
                ]
                prompt, completion, between = (
                    "\n\n".join(filter(None, asked)),
                    _string(fields, "output"),
                    "\n\n",
                )
            if self.tokenizer.chat_template is not None:
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
                return self.tokenizer.passage(messages, train_on=self.train_on)
            prompt += between
            text = prompt + completion
            start = 0 if self.train_on == "all" else len(prompt)
            return Passage(text, [(start, len(text))], add_bos=True, add_eos=True)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None

    def _fields(self, row: Row) -> dict[str, Any]:
        fields = {}
        for name in (*REQUIRED[self.format], *OPTIONAL[self.format]):
            theirs = self.columns.get(name, name)
            if theirs in row.fields:
                fields[name] = row.fields[theirs]
            elif name in REQUIRED[self.format]:
                renamed = f" (for `{name}`, by data.columns)" if theirs != name else ""
                raise ValueError(
                    f"{row.place}: no field `{theirs}`{renamed}. The format {self.format} needs "
                    f"{', '.join(REQUIRED[self.format])}; the row has {_names(row.fields)}. "
                    f"{_hint(row.fields)}"
                )
        return fields


def _names(fields: dict[str, Any]) -> str:
    return ", ".join(fields) or "no fields"


def _hint(fields: dict[str, Any]) -> str:
    if "conversations" in fields:
        return "Rename with data.columns.messages=conversations, if its messages have `role` and `content`."
    return "Rename with data.columns, ours to yours: data.columns.prompt=question."


def _string(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"the field `{name}` is a {type(value).__name__}; expected a string.")
    _check_unicode(value)
    return value


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"half a surrogate pair (\\u{ord(text[error.start]):04x}) stands at character {error.start} of a "
            "string, which is no text. Repair the row."
        ) from None


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"`messages` is {'empty' if value == [] else f'a {type(value).__name__}'}; expected a list of "
            '{"role": ..., "content": ...}.'
        )
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = _names(message) if isinstance(message, dict) else f"a {type(message).__name__}"
            hint = (
                " (`from` and `value` are ShareGPT's: rewrite them as `role` and `content`, human as user, "
                "gpt as assistant)"
                if isinstance(message, dict) and "from" in message
                else ""
            )
            raise ValueError(f"message {i} has {found}; expected `role` and `content`{hint}.")
        messages.append({**message, "content": _message_text(message, i)})
    return messages


def _message_text(message: dict[str, Any], i: int) -> str | None:
    content = message.get("content")
    if isinstance(content, list):  # the parts of the OpenAI format
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError(f"message {i} has parts that are not text; only text can be trained on.")
        content = "".join(part["text"] for part in content)
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return None
    if not isinstance(content, str):
        raise ValueError(f"message {i} has a `content` of type {type(content).__name__}; expected a string.")
    _check_unicode(content)
    return content


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):  # some data sets hold it as JSON in a string, which keeps their columns uniform
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"`tools` is a string that is not JSON: {error.msg}.") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("`tools` is not a list of objects; expected JSON schemas of functions.")
    return value
