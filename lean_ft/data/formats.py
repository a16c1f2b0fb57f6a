"""How a row is read: its fields, whatever they are called, become a chat, a text, or ids as they are.

`lean_ft.data.detection` has the table of formats.

Without a chat template, prompt_completion becomes bos + prompt + completion + eos with nothing put between,
tokenised as one text: a token that straddles the boundary is trained. alpaca's parts are then separated by an
empty line. Control tokens spelled in such plain texts are control tokens, since a text may be a chat that was
rendered elsewhere; inside messages they are ordinary text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lean_ft.data.chats import Chat, check_text, read_chat, read_tools
from lean_ft.data.detection import RowFormat, formats_of
from lean_ft.data.rows import Document, Row
from lean_ft.data.token_rows import read_token_row
from lean_ft.settings import SFTDataConfig, Sources
from lean_ft.tokenizers import Passage, Tokenizer, TrainOn


@dataclass(frozen=True)
class RowReader:
    """Turns rows into passages of text, or into the ids that they hold."""

    formats: dict[int, RowFormat]
    """Of every source."""
    train_on: TrainOn
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls, config: SFTDataConfig, first_rows: Sequence[Row], tokenizer: Tokenizer, source: Sources | None = None
    ) -> "RowReader":
        """A reader for `config`, with the formats told from the first rows of every source where it is `auto`.

        They are the rows of `source`, or of the source that is trained on.
        """
        formats = formats_of(config, first_rows, source)
        if any(format.name == "preference" for format in formats.values()):
            raise ValueError(
                f"{first_rows[0].place}: the rows are preference pairs (chosen, rejected), and this recipe learns from "
                "single answers. To train on the chosen ones: data.format=prompt_completion "
                "data.columns.completion=chosen, or data.format=messages data.columns.messages=chosen."
            )
        return cls(formats, config.train_on, tokenizer)

    @property
    def format(self) -> str:
        """The formats, for people to read."""
        return " + ".join(dict.fromkeys(format.name for format in self.formats.values()))

    def passage(self, row: Row) -> Passage | Document:
        """The text of `row` and what of it is trained, or its ids. Raises ValueError with the row's place."""
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            format = self.formats[row.source]
            return self._read(format.name, format.fields_of(row))
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
        except RecursionError:
            raise ValueError(f"{row.place}: its objects are nested too deeply to be written as text.") from None

    def _read(self, format: str, fields: dict[str, Any]) -> Passage | Document:
        tools = read_tools(fields.get("tools"))
        if format == "messages":
            return self._chat(read_chat(fields["messages"], "messages"), tools)
        if format == "sharegpt":
            return self._chat(_with_system(read_chat(fields["conversations"], "conversations"), fields), tools)
        if format == "tokens":
            return read_token_row(fields, self.tokenizer.vocab_size)
        if format == "text":
            text = check_text(fields["text"], "the field `text`")
            return Passage(text, [(0, len(text))], add_bos=True, add_eos=True)
        if format == "alpaca":
            asked = [check_text(fields.get(name) or "", f"the field `{name}`") for name in ("instruction", "input")]
            fields = {"prompt": "\n\n".join(filter(None, asked)), "completion": fields["output"]}
        if self.tokenizer.chat_template is None and not isinstance(fields["prompt"], list):
            return self._plain(fields, between="\n\n" if format == "alpaca" else "")
        prompt, completion = as_chat(fields["prompt"], "prompt"), as_chat(fields["completion"], "completion")
        return self._chat(join(prompt, completion, train_prompt=self.train_on != "completion"), tools)

    def _chat(self, chat: Chat, tools: list[dict[str, Any]] | None) -> Passage:
        if self.train_on == "all":
            others = [i for i in chat.untrained if chat.messages[i]["role"] != "assistant"]
            if others:
                raise ValueError(
                    f"message {others[0]} is the {chat.messages[others[0]]['role']}'s, and says that it is not to be "
                    "trained; data.train_on=all can leave out messages of the assistant alone."
                )
        return self.tokenizer.passage(chat.messages, tools, train_on=self.train_on, untrained=chat.untrained)

    def _plain(self, fields: dict[str, Any], between: str) -> Passage:
        prompt, completion = (check_text(fields[name], f"the field `{name}`") for name in ("prompt", "completion"))
        prompt += between
        text = prompt + completion
        start = 0 if self.train_on == "all" else len(prompt)
        return Passage(text, [(start, len(text))], add_bos=True, add_eos=True)


def as_chat(value: Any, field: str) -> Chat:
    """A prompt or a completion as messages: its own, or one of the user or of the assistant."""
    if isinstance(value, list):
        return read_chat(value, field)
    role = "user" if field == "prompt" else "assistant"
    return Chat([{"role": role, "content": check_text(value, f"the field `{field}`")}])


def join(prompt: Chat, completion: Chat, *, train_prompt: bool) -> Chat:
    """Both as one chat; without `train_prompt` no answer in the prompt carries a label."""
    count = len(prompt.messages)
    answers = {i for i, message in enumerate(prompt.messages) if message["role"] == "assistant"}
    untrained = prompt.untrained | (frozenset() if train_prompt else answers)
    return Chat(prompt.messages + completion.messages, untrained | {i + count for i in completion.untrained})


def _with_system(chat: Chat, fields: dict[str, Any]) -> Chat:
    system = check_text(fields.get("system") or "", "the field `system`")
    return join(Chat([{"role": "system", "content": system}]), chat, train_prompt=True) if system else chat
