"""Find the last user message in the text of a prompt, by what the chat template writes around user messages.

The template renders a few short chats. What it writes before and after a user message in all of them is the message's
header and closing. A template that writes the system message into the user's turn (Gemma, Llama 2) is recognized too.
"""

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Self

from lean_ft.tokenizers.tokenizer import Tokenizer

_SYSTEM, _ASKED, _ANSWER, _NEXT = "First text", "Second text", "Third text", "Fourth text"


@dataclass(frozen=True)
class UserTurns:
    """What a chat template writes around a user message."""

    start: str
    """Before the first message of a chat without a system message."""
    header: str
    """Before any user message."""
    closing: str
    after_system: str = ""
    """Between a system message and the user's text, if both are in the user's turn."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return None if there is no chat template, or it writes nothing around user messages."""
        user, answer = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWER}
        try:
            chat = _rendered(tokenizer, [user, answer, {"role": "user", "content": _NEXT}])
            start, between = chat.split(_ASKED)
            closing, following = between.split(_ANSWER)
            header, last_closing = following.split(_NEXT)
        except ValueError:  # no template, it rejects the chat, or it does not write each text once
            return None
        header = _common_start(start[::-1], header[::-1])[::-1]
        turns = cls(start, header, _common_start(closing, last_closing))
        if not turns.header or not turns.closing:
            return None
        try:
            asked = turns.last(_rendered(tokenizer, [{"role": "system", "content": _SYSTEM}, user]))
        except ValueError:  # the template has no system message
            return turns
        return replace(turns, after_system=asked.partition(_SYSTEM)[2].partition(_ASKED)[0])

    def last(self, text: str) -> str:
        """Return the last user message of a prompt's text, which has the special tokens; or an empty text."""
        _, header, message = text.rpartition(self.header)
        if not header:  # the first message, or the header was cut off
            message = text.removeprefix(self.start)
        message, closing, _ = message.partition(self.closing)
        if not header and not closing:
            return ""
        return message.rpartition(self.after_system)[2] if self.after_system else message


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    """The text of a chat and of the prompt for the next answer, as decoded ids have it."""
    return tokenizer.decode(tokenizer.render(messages, add_generation_prompt=True)[0])


def _common_start(one: str, other: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
