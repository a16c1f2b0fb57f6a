"""Find the characters of a rendered chat that the assistant wrote.

A template with `{% generation %}` blocks marks them. For any other template, the turn of message i is the text that
the whole chat has beyond messages[:i] rendered with the generation prompt. The turn ends with the control token that
the template writes behind it. That token is trained; line breaks that follow it are not. A turn without such a token
(plain-text templates) is trained up to the next message.

A template may write a turn differently once it is history: Qwen3 drops its thoughts, and gpt-oss ends it with `<|end|>`
in place of `<|return|>`. A template may also prompt for text that a recorded turn lacks (DeepSeek-R1's `<think>`). Turns
are found where the text leaves no doubt, and refused elsewhere.
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
    "Put the assistant's text in the chat template between {% generation %} and {% endgeneration %}, "
    "or set data.train_on=last or data.train_on=all."
)


@dataclass(frozen=True)
class Turns:
    """Finds the assistant's turns in one rendered chat.

    `full` is the rendering of all `messages`, with a generation prompt behind it if `ends_with_prompt`;
    `render` makes others; `added` are the tokenizer's added tokens and `control` the control tokens among
    them. What stands between literal markers is text, whatever it spells.
    """

    full: str
    ends_with_prompt: bool
    messages: Messages
    render: Render
    added: re.Pattern[str]
    control: frozenset[str]

    def span(self, i: int) -> tuple[Span, bool]:
        """Span in `full` of the assistant's message `i`, and whether it ends as the model would end it.

        Where it does not, the span stops before the token that ends the turn in the history. Raises ValueError if the
        span cannot be found.
        """
        errors: list[ValueError] = []
        for messages in _forgetting(self.messages[: i + 1]):
            try:
                return self._span(messages)
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def _span(self, messages: Messages) -> tuple[Span, bool]:
        """The same for the last of `messages`."""
        start = self._start(messages)
        is_whole = len(messages) == len(self.messages) and not self.ends_with_prompt
        turn = as_last = self.full if is_whole else self.render(messages, False)
        if not self.full.startswith(turn) or len(turn) < start:
            turn = self._as_history(messages) or ""
        if not self.full.startswith(turn) or len(turn) < start:
            raise ValueError(
                f"cannot tell where the assistant's message {len(messages) - 1} ends: the chat template writes it "
                f"differently once other messages follow. {REMEDY}"
            )
        closing = self._closing(turn, start)
        if not closing:
            # Nothing of its own ends the turn: the token of the next one does, as in GLM-4.
            following = self.added.match(self.full, len(turn))
            ended_by_next = following is not None and following.group(1) in self.control
            return (start, following.end() if following is not None and ended_by_next else len(turn)), True
        last, begins_alike = closing[-1], as_last.startswith(self.full[:start])
        own_end = {token.group(1) for token in self._closing(as_last, start if begins_alike else 0)}
        return ((start, last.end()), True) if last.group(1) in own_end else ((start, last.start()), False)

    def _as_history(self, messages: Messages) -> str | None:
        """`messages` as the template writes them when a user's message follows; None if that cannot be told."""
        first = next((i for i, message in enumerate(self.messages) if message.get("role") == "user"), None)
        if first is None:
            return None
        asked = self.messages[: first + 1]
        try:
            before, twice = self.render(asked, False), self.render([*asked, asked[-1]], False)
            followed = self.render([*messages, asked[-1]], False)
        except ValueError:  # a template may refuse two questions in a row
            return None
        pieces = zip(self._cut(before), self._cut(twice), strict=False)  # Phi-3 ends the chat itself with a token
        shared = "".join(piece for (piece, _), _ in takewhile(lambda pair: pair[0] == pair[1], pieces))
        again = twice.removeprefix(before if twice.startswith(before) else shared)
        return followed.removesuffix(again) if followed.endswith(again) else None

    def _start(self, messages: Messages) -> int:
        """Start in `full` of the last message: behind the generation prompt, or the part of it that is there."""
        try:
            prompt = self.render(messages[:-1], True)
        except ValueError as error:
            raise ValueError(
                f"cannot tell where the assistant's message {len(messages) - 1} begins: rendering what comes before it "
                f"failed ({error}). {REMEDY}"
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
            behind_token = False
            for piece, is_token in self._cut(opening):
                if self.full.startswith(piece, position):
                    position += len(piece)
                elif position > len(before) and (is_token or (behind_token and piece.isspace())):
                    # A recorded turn without, say, the `<think>` or `<think>\n` that the prompt opens.
                    return position
                else:
                    break
                behind_token = is_token
            else:
                return position
        raise ValueError(
            f"cannot tell where the assistant's message {len(messages) - 1} begins: the chat template writes the messages "
            f"before it differently once it follows. {REMEDY}"
        )

    def _tokens(self, text: str, start: int) -> list[re.Match[str]]:
        return [match for match in self.added.finditer(text, start) if match.group(1)]

    def _closing(self, text: str, start: int) -> list[re.Match[str]]:
        """The control tokens that end text[start:], with nothing but space between and behind them."""
        closing: list[re.Match[str]] = []
        followed_by = len(text)
        for match in reversed(self._tokens(text, start)):
            if text[match.end() : followed_by].strip():
                break
            closing.insert(0, match)
            followed_by = match.start()
        # Plain added tokens such as `</tool_call>` are what was said, unless nothing else closes the turn.
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


def _forgetting(messages: Messages) -> Iterator[Messages]:
    """`messages`, then what templates keep of them once others follow: no thoughts, and no text beside a tool call."""
    yield messages
    plain = [{k: v for k, v in message.items() if k not in REASONING} for message in messages]
    yield plain
    yield [{**message, "content": ""} if message.get("tool_calls") else message for message in plain]


def outside_literals(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern whose group 1 is one of `tokens` written by the template; literal stretches match without a
    group."""
    return re.compile(f"{LITERAL_START}.*?{LITERAL_END}|({any_of(tokens).pattern})", re.DOTALL)
