"""Which characters of a rendered chat the assistant wrote.

A template with `{% generation %}` blocks says so itself. For any other template, the turn of message i is
what the rendering of the whole chat has beyond the rendering of messages[:i] with the generation prompt. It
ends with the control token that the template writes behind the turn; that token is trained, line breaks that
follow it are not. A turn that no control token ends (plain-text templates) is trained up to where the next
message begins.

Templates may write a turn differently once it is history (Qwen3 drops its thoughts) or prompt for what a
recorded turn lacks (DeepSeek-R1's `<think>`); both are followed where the text leaves no doubt and refused
where it does.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from lean_ft.tokenizers.chat_template import LITERAL_END, LITERAL_START, REASONING
from lean_ft.tokenizers.vocabulary import Span, any_of

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Messages and add_generation_prompt to text."""

REMEDY = (
    "Put the assistant's text in the chat template between {% generation %} and {% endgeneration %}, "
    "or set data.train_on=last or data.train_on=all."
)


class WrittenDifferentlyError(ValueError):
    """A turn has another end as history than as the last message, so its text there is not what the model would write."""


@dataclass(frozen=True)
class Turns:
    """Finds the assistant's turns in one rendered chat.

    `full` is the rendering of all `messages`, with a generation prompt behind it if `ends_with_prompt`;
    `render` makes others; `added` are the tokenizer's added tokens and `control` the control tokens among
    them. What stands between literal markers is text, whatever it spells.
    """

    full: str
    ends_with_prompt: bool
    messages: Sequence[dict[str, Any]]
    render: Render
    added: re.Pattern[str]
    control: frozenset[str]

    def span(self, i: int) -> Span:
        """Span in `full` of the assistant's message `i`. Raises ValueError where it cannot be told."""
        prompt = self._prompt(i)
        is_whole = i == len(self.messages) - 1 and not self.ends_with_prompt
        start = self._start(self.full, i, prompt)
        as_last = self.full if is_whole else self.render(self.messages[: i + 1], False)
        if self.full.startswith(as_last) and len(as_last) >= start:
            closing = self._closing(as_last, start)
            if closing:
                return start, closing[-1].end()
            # Nothing of its own ends the turn: the token of the next one does, as in GLM-4.
            following = self.added.match(self.full, len(as_last))
            ended_by_next = following is not None and following.group(1) in self.control
            return start, following.end() if following is not None and ended_by_next else len(as_last)

        # As history the turn reads differently than as the last message: find what closed it there.
        end = self._end_as_history(i, prompt, start, as_last[self._start(as_last, i, prompt) :])
        if end is None:
            raise WrittenDifferentlyError(
                f"cannot tell where the assistant's message {i} ends: the chat template writes it differently "
                f"once other messages follow. {REMEDY}"
            )
        return start, end

    def _prompt(self, i: int) -> str:
        """What comes before turn i, the generation prompt included."""
        try:
            prompt = self.render(self.messages[:i], True)
        except ValueError as error:
            raise ValueError(
                f"cannot tell where the assistant's message {i} begins: rendering what comes before it "
                f"failed ({error}). {REMEDY}"
            ) from None
        if not self.full.startswith(prompt):
            # gpt-oss forgets the thoughts before its tool calls once there is an answer, also what it said with them.
            forgetful = [{k: v for k, v in message.items() if k not in REASONING} for message in self.messages[:i]]
            forgetful = [{**message, "content": ""} if message.get("tool_calls") else message for message in forgetful]
            with suppress(ValueError):
                if forgetful != self.messages[:i] and self.full.startswith(shorter := self.render(forgetful, True)):
                    return shorter
        return prompt

    def _end_as_history(self, i: int, prompt: str, start: int, as_last: str) -> int | None:
        """Where turn i ends that starts at `start` and reads `as_last` as the last message; None if it ends otherwise."""
        closing = [match.group(1) for match in self._closing(as_last, 0)]
        if not closing:
            return None
        nth = self._names(as_last).count(closing[0])
        same = [match for match in self._tokens(self.full, start) if match.group(1) == closing[0]]
        if len(same) < nth:
            return None
        end, num_closed = same[nth - 1].end(), 1
        for token in closing[1:]:
            behind = self.full[end:].lstrip()
            if not behind.startswith(token):
                break
            end, num_closed = len(self.full) - len(behind) + len(token), num_closed + 1
        if num_closed < len(closing) and self._closing_before_prompt(i, prompt, num_closed) != closing[:num_closed]:
            return None  # what is not there ended the turn, not the whole chat as Phi-3's last token does
        there = iter(self._names(as_last))
        here = [name for name in self._names(self.full[start:end]) if name in self.control]
        # In this order (`in` advances the iterator): it does not run on into another turn.
        return end if all(name in there for name in here) else None

    def _closing_before_prompt(self, i: int, prompt: str, count: int) -> list[str]:
        """The last `count` tokens of turn i where a generation prompt follows it."""
        followed = self.render(self.messages[: i + 1], True)
        turn = self._names(followed[self._start(followed, i, prompt) :])
        asked, before = self._names(prompt), self._names(self.render(self.messages[:i], False))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(asked, before, strict=False))
        num_opening = len(asked) - len(list(same))
        return turn[: len(turn) - num_opening][-count:]

    def _start(self, text: str, i: int, prompt: str) -> int:
        """Where turn i begins in `text`: behind the generation prompt, or the part of it that is there."""
        if text.startswith(prompt):
            return len(prompt)
        before = self.render(self.messages[:i], False)
        if text.startswith(before) and prompt.startswith(before):
            position = len(before)
            behind_token = False
            for piece, is_token in self._cut(prompt[len(before) :]):
                if text.startswith(piece, position):
                    position += len(piece)
                elif position > len(before) and (is_token or (behind_token and piece.isspace())):
                    # A recorded turn without, say, the `<think>` or `<think>\n` that the prompt opens.
                    return position
                else:
                    break
                behind_token = is_token
        raise ValueError(
            f"cannot tell where the assistant's message {i} begins: the chat template writes the messages "
            f"before it differently once it follows. {REMEDY}"
        )

    def _tokens(self, text: str, start: int) -> list[re.Match[str]]:
        return [match for match in self.added.finditer(text, start) if match.group(1)]

    def _names(self, text: str) -> list[str]:
        return [match.group(1) for match in self._tokens(text, 0)]

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


def outside_literals(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern whose group 1 is one of `tokens` written by the template; literal stretches match without a
    group."""
    return re.compile(f"{LITERAL_START}.*?{LITERAL_END}|({any_of(tokens).pattern})", re.DOTALL)
