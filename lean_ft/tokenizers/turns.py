"""Find the characters of a rendered chat that the assistant wrote.

`{% generation %}` blocks mark them if the template has any. Otherwise the turn of message i is the text that the whole chat
has beyond messages[:i] rendered with the generation prompt. The turn ends with the control token that the template writes
after it. That token is trained; line breaks after it are not. A turn without such a token (plain-text templates) is trained
up to the next message.

A template may write a turn differently once other messages follow: Qwen3 drops its reasoning, and gpt-oss ends it with
`<|end|>` instead of `<|return|>`. The generation prompt may also contain text that a recorded turn lacks (DeepSeek-R1's
`<think>`). A turn that cannot be located without doubt raises ValueError.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from lean_ft.tokenizers.chat_template import LITERAL_END, LITERAL_START, REASONING
from lean_ft.tokenizers.vocabulary import Span, any_of

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""Messages and add_generation_prompt to text."""

REMEDY = (
    "In the chat template, put the assistant's text between {% generation %} and {% endgeneration %}, "
    "or set data.train_on=last or data.train_on=all."
)


@dataclass(frozen=True)
class Turns:
    """Finds the assistant's turns in one rendered chat.

    `full` is the rendering of all `messages`, followed by a generation prompt if `ends_with_prompt`. `render` renders other
    messages. `added` matches the tokenizer's added tokens outside literal markers; `control` has the control tokens.
    """

    full: str
    ends_with_prompt: bool
    messages: Messages
    render: Render
    added: re.Pattern[str]
    control: frozenset[str]

    def span(self, i: int) -> tuple[Span, bool]:
        """Return the span in `full` of the assistant's message `i`, and whether it ends with the model's own end token.

        If not, the span stops before the token that ends the turn. Raises ValueError if the span cannot be found.
        """
        errors: list[ValueError] = []
        for messages in _as_template_keeps(self.messages[: i + 1]):
            try:
                return self._span(messages)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _span(self, messages: Messages) -> tuple[Span, bool]:
        start = self._start(messages)
        is_full = len(messages) == len(self.messages) and not self.ends_with_prompt
        turn = as_last = self.full if is_full else self.render(messages, False)
        if not self.full.startswith(turn) or len(turn) < start:
            turn = self._as_history(messages) or ""
        if not self.full.startswith(turn) or len(turn) < start:
            raise ValueError(
                f"cannot find the end of the assistant's message {len(messages) - 1}: the chat template writes the message "
                f"differently when other messages follow. {REMEDY}"
            )
        closing = self._closing(turn, start)
        if not closing:
            # The turn has no end token: the first token of the next turn ends it, as in GLM-4.
            following = self.added.match(self.full, len(turn))
            ended_by_next = following is not None and following.group(1) in self.control
            return (start, following.end() if following is not None and ended_by_next else len(turn)), True
        last, begins_alike = closing[-1], as_last.startswith(self.full[:start])
        own_end = {token.group(1) for token in self._closing(as_last, start if begins_alike else 0)}
        return ((start, last.end()), True) if last.group(1) in own_end else ((start, last.start()), False)

    def _as_history(self, messages: Messages) -> str | None:
        """Render `messages` as the template writes them before another user message; None if that cannot be separated."""
        first = next((i for i, message in enumerate(self.messages) if message.get("role") == "user"), None)
        if first is None:
            return None
        asked = self.messages[: first + 1]
        try:
            before, twice = self.render(asked, False), self.render([*asked, asked[-1]], False)
            followed = self.render([*messages, asked[-1]], False)
        except ValueError:  # a template may reject two user messages in a row
            return None
        pieces = zip(self._cut(before), self._cut(twice), strict=False)  # Phi-3 ends a chat with a token
        shared = "".join(piece for (piece, _), _ in takewhile(lambda pair: pair[0] == pair[1], pieces))
        again = twice.removeprefix(before if twice.startswith(before) else shared)
        return followed.removesuffix(again) if followed.endswith(again) else None

    def _start(self, messages: Messages) -> int:
        """Return the start in `full` of the last message: after the generation prompt, or the part of it in `full`."""
        try:
            prompt = self.render(messages[:-1], True)
        except ValueError as error:
            raise ValueError(
                f"cannot find the start of the assistant's message {len(messages) - 1}: rendering the messages before it failed "
                f"({error}). {REMEDY}"
            ) from None
        if self.full.startswith(prompt):
            return len(prompt)
        first = len(messages) - 1
        while first and messages[first - 1].get("role") == "assistant":
            first -= 1
        asked = self.render(messages[:first], False)
        opening = self.render(messages[:first], True).removeprefix(asked)
        for before in (asked if first == len(messages) - 1 else None, self._as_history(messages[:-1])):
            if before is None or not self.full.startswith(before):
                continue
            position = len(before)
            after_token = False
            for piece, is_token in self._cut(opening):
                if self.full.startswith(piece, position):
                    position += len(piece)
                elif position > len(before) and (is_token or (after_token and piece.isspace())):
                    # A recorded turn that lacks the end of the prompt, such as `<think>` or `<think>\n`.
                    return position
                else:
                    break
                after_token = is_token
            else:
                return position
        raise ValueError(
            f"cannot find the start of the assistant's message {len(messages) - 1}: the chat template writes the messages "
            f"before it differently when it follows. {REMEDY}"
        )

    def _tokens(self, text: str, start: int) -> list[re.Match[str]]:
        return [match for match in self.added.finditer(text, start) if match.group(1)]

    def _closing(self, text: str, start: int) -> list[re.Match[str]]:
        """Return the control tokens that end text[start:], with only whitespace between and after them."""
        closing: list[re.Match[str]] = []
        followed_by = len(text)
        for match in reversed(self._tokens(text, start)):
            if text[match.end() : followed_by].strip():
                break
            closing.insert(0, match)
            followed_by = match.start()
        # Plain added tokens such as `</tool_call>` are content, unless the turn has no other end.
        while len(closing) > 1 and closing[0].group(1) not in self.control:
            del closing[0]
        return closing

    def _cut(self, text: str) -> list[tuple[str, bool]]:
        parts: list[tuple[str, bool]] = []
        position = 0
        for match in self._tokens(text, 0):
            parts += [(text[position : match.start()], False), (match.group(1), True)]
            position = match.end()
        parts.append((text[position:], False))
        return [(piece, is_token) for piece, is_token in parts if piece]


def _as_template_keeps(messages: Messages) -> Iterator[Messages]:
    """Yield `messages`, then without their reasoning, then without the text of tool calls: templates may drop both when other
    messages follow."""
    yield messages
    plain = [{k: v for k, v in message.items() if k not in REASONING} for message in messages]
    yield plain
    yield [{**message, "content": ""} if message.get("tool_calls") else message for message in plain]


def outside_literals(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose group 1 matches one of `tokens` that the template wrote. Literal spans match without it."""
    return re.compile(f"{LITERAL_START}.*?{LITERAL_END}|({any_of(tokens).pattern})", re.DOTALL)
