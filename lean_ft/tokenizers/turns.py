"""Find the characters of a rendered chat that the assistant wrote, and the token that ends each of its turns.

`{% generation %}` blocks mark the characters if the template has any. Otherwise the turn of message i begins where
messages[:i] with the generation prompt end, and ends with the control token that the template writes after
messages[: i + 1]. That token is trained; line breaks after it are not. Some templates write no such token: the next
turn's first token ends the turn (GLM-4.5), or only the last turn stays open.

A template may write a message differently once others follow: Qwen3 drops its reasoning, gpt-oss ends the turn with
`<|end|>` instead of `<|return|>`, and Mistral's moves the system message to the last user message. Then a beginning of
the chat is no prefix of the whole. In that case, the chat is rendered with an anchor in each string of a message
(`anchored`), and texts are compared from the last anchor that they share. The generation prompt may also contain text
that a recorded turn lacks (DeepSeek-R1's `<think>`).

A turn that cannot be located without doubt raises ValueError, and so does a span with an anchor of another message.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from lean_ft.system.foreign_values import JSON
from lean_ft.tokenizers.chat_template import ANCHOR, LITERAL_END, LITERAL_START, NUMBER, REASONING, TURN
from lean_ft.tokenizers.vocabulary import Span, any_of

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""Messages and add_generation_prompt to text."""

REMEDY = (
    "In the chat template, put the assistant's text between {% generation %} and {% endgeneration %}, "
    "or set data.train_on=last or data.train_on=all."
)
_ANCHORED = {"content", "text", "name", "arguments", *REASONING}  # keys of the strings that templates write
ANCHORS = re.compile(f"{ANCHOR}([{''.join(map(chr, TURN.values()))}]+)")
# An anchor is after the last character of a string or, if the template looks for tags there, between two letters of it.
_BETWEEN_LETTERS = rf"{LITERAL_START}.*?{LITERAL_END}|<[^<>]*>|\[[^\[\]]*\]|(?<=\w)(?=\w)"
ANCHOR_PLACES = (re.compile(r"(?<=\S)(?=\s*\Z)"), re.compile(_BETWEEN_LETTERS, re.DOTALL))


@dataclass(frozen=True)
class RenderedTurn:
    """The assistant's text in a rendered chat."""

    span: Span
    is_ended: bool = True
    """Whether the span includes a token that ends the model's turn; if not, the template ends it with another token."""
    is_open: bool = False
    """Whether the chat ends with this turn, and no token ends it."""
    follows_prompt: bool = True
    """Whether the text before the span is the text that generation starts from."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text, in which `turn` finds the assistant's turns.

    `full` is the rendering of all `messages`, followed by a generation prompt if `ends_with_prompt`. `render` renders
    other messages. `added` matches the tokenizer's added tokens outside literal markers; `control` has the control
    tokens. The messages may have anchors.
    """

    full: str
    ends_with_prompt: bool
    messages: Messages
    render: Render
    added: re.Pattern[str]
    control: frozenset[str]
    unread: tuple[str, ...] = ()
    """What the template does not write."""
    developer_as_system: bool = False

    def turn(self, i: int) -> RenderedTurn:
        """Return the turn of message `i`. Raises ValueError if it cannot be located."""
        start, follows_prompt = self._start(self.full, i)
        is_last = i == len(self.messages) - 1 and not self.ends_with_prompt
        alone = self.full if is_last else self.render(self.messages[: i + 1], False)
        here, there = self._same_place(i, start, alone)
        rest, tail = self.full[here:], alone[there:]
        closing = self._own_closing(i, tail)
        num_content = closing[0].start() if closing else len(tail.rstrip())
        if not rest.startswith(tail[:num_content]) and self._is_dropped(i):
            tail, num_content = tail[num_content:], 0
            closing = self._closing(tail)
        differing = (n for n, (left, right) in enumerate(zip(tail, rest, strict=False)) if left != right)
        num_equal = len(tail) if rest.startswith(tail) else next(differing, len(rest))
        if num_equal < num_content:
            raise ValueError(
                f"cannot find the end of the assistant's message {i + 1}: the chat template writes the message "
                f"differently when other messages follow. {REMEDY}"
            )
        end, is_ended, is_open = num_equal, True, False
        if closing:
            ends = [token.end() for token in closing if token.end() <= num_equal]
            end, is_ended = max(ends, default=num_content), bool(ends)
        elif is_last:
            is_open = True
        else:
            following = self.added.search(rest, num_equal)
            if following and following.group(1) in self.control and not rest[num_equal : following.start()].strip():
                end = following.end()
        span = (start, here + end)
        owners = {_owner(anchor) for anchor in ANCHORS.finditer(self.full)}
        if {_owner(anchor) for anchor in ANCHORS.finditer(self.full, *span)} != owners & {i}:
            raise ValueError(
                f"cannot separate the assistant's message {i + 1} from others in the text that the chat template "
                f"writes. {REMEDY}"
            )
        return RenderedTurn(span, is_ended, is_open, follows_prompt)

    def turns(self, indices: Sequence[int]) -> tuple["RenderedChat", list[RenderedTurn]]:
        """Return the turns of the messages `indices` and the chat that they are in, with anchors only if these are
        needed.

        Raises ValueError if a turn cannot be located.
        """
        errors = list[ValueError]()
        for place in (None, *ANCHOR_PLACES):
            chat = self
            try:
                if place is not None:
                    messages = anchored(self.messages, place)
                    chat = replace(self, messages=messages, full=self.render(messages, self.ends_with_prompt))
                    if ANCHORS.sub("", chat.full) != self.full:  # the template looks at this place of a message
                        continue
                return chat, [chat.turn(i) for i in indices]
            except ValueError as error:
                errors.append(error)
        raise errors[0]

    def is_open(self, last: RenderedTurn | None = None) -> bool:
        """Return whether no token ends the chat's last turn; `last` is that turn, if it is known."""
        try:
            return (last or self.turns([len(self.messages) - 1])[1][0]).is_open
        except ValueError:
            return False

    def next_token(self) -> str:
        """Return the first control token that the template writes between the last message and a next one, or ''."""
        calls = self.messages[-1].get("tool_calls")
        said = {"role": "assistant", "content": "1"} | ({"tool_calls": calls} if calls else {})
        messages = [{"role": "user", "content": "1"}, said, {"role": "tool" if calls else "user", "content": "1"}]
        try:
            chat = replace(self, messages=messages, full=self.render(messages, False), ends_with_prompt=False)
            chat, [turn] = chat.turns([1])
        except ValueError:  # a template may reject such a chat
            return ""
        start, end = turn.span
        tokens = [token.group(1) for token in self._tokens(chat.full[:end], start) if token.end() == end]
        return tokens[0] if tokens and tokens[0] in self.control else ""

    def _start(self, text: str, i: int) -> tuple[int, bool]:
        """Return where message `i` starts in `text`, and whether the whole generation prompt is in front of it.

        That is after the generation prompt, or after the part of it that a recorded turn has.
        """
        try:
            prompt = self.render(self.messages[:i], True)
        except ValueError as error:
            raise ValueError(
                f"cannot find the start of the assistant's message {i + 1}: rendering the messages before it failed "
                f"({error}). {REMEDY}"
            ) from None
        if text.startswith(prompt):
            return len(prompt), True
        bound = min((anchor.start() for anchor in ANCHORS.finditer(text) if _owner(anchor) >= i), default=len(text))
        anchor, before = _last_anchor(text[:bound])
        anchor_of_prompt, after = _last_anchor(prompt)
        if anchor and anchor == anchor_of_prompt and text.startswith(prompt[after:], before):
            return before + len(prompt) - after, False
        closed, opening = self._prompt_parts(i)
        anchor_of_closed, after = _last_anchor(closed)
        closed = closed[after:]
        pieces = self._pieces(opening) if anchor == anchor_of_closed else []
        begin = before + len(closed) if text.startswith(closed, before) else -1
        match = ANCHORS.fullmatch(anchor)
        if match and _owner(match) == i - 1 and pieces and not (begin >= 0 and text.startswith(pieces[0][0], begin)):
            # The template ends the message in front differently, or the prompt's first piece is missing.
            begin = max(begin, text.find(pieces[0][0], before, bound))
        position, after_token = begin, False
        for piece, is_token in pieces if begin >= 0 else []:
            if text.startswith(piece, position):
                position += len(piece)
            elif (position > begin or piece not in self.control) and (is_token or (after_token and piece.isspace())):
                return position, False  # a recorded turn that lacks the prompt's end, such as `<think>` or `<think>\n`
            else:
                position = -1
                break
            after_token = is_token
        if position <= begin:
            raise ValueError(
                f"cannot find the start of the assistant's message {i + 1}: the chat template writes the messages "
                f"before it differently when it follows. {REMEDY}"
            )
        return position, False

    def _prompt_parts(self, i: int) -> tuple[str, str]:
        """Return messages[:i] without a generation prompt, and the generation prompt."""
        first = i
        while first and self.messages[first - 1].get("role") == "assistant":  # some templates open no further turn
            first -= 1
        question = self.render(self.messages[:first], False)
        closed = question if first == i else self.render(self.messages[:i], False)
        prompt = self.render(self.messages[:first], True)
        return closed, prompt.removeprefix(question) if prompt.startswith(question) else ""

    def _same_place(self, i: int, start: int, alone: str) -> tuple[int, int]:
        """Return the last place of message `i` that `full` and `alone`, which ends with the message, have in common."""
        if alone is self.full:
            return start, start
        start_elsewhere = start if alone.startswith(self.full[:start]) else self._start(alone, i)[0]
        here, there = (
            [(anchor[0], anchor.end()) for anchor in ANCHORS.finditer(text, begin) if _owner(anchor) == i]
            for text, begin in ((self.full, start), (alone, start_elsewhere))
        )
        for n in reversed(range(len(there))):
            anchor, place = there[n]
            earlier = [name for name, _ in there[:n]].count(anchor)
            places = [end for name, end in here if name == anchor]
            if earlier < len(places):
                return places[earlier], place
        return start, start_elsewhere

    def _tokens(self, text: str, start: int = 0) -> list[re.Match[str]]:
        return [match for match in self.added.finditer(text, start) if match.group(1)]

    def _own_closing(self, i: int, tail: str) -> list[re.Match[str]]:
        """Return the tokens that end `tail`, the end of message `i`, and do not belong to what it says."""
        message, closing = self.messages[i], self._closing(tail)
        if message.get("tool_calls"):
            # A plain added token such as `</tool_call>` ends the call, not the turn.
            return closing if any(token.group(1) in self.control for token in closing) else []
        if closing and not message.get("content"):  # tokens that open an empty turn do not end it
            filled = self.render([*self.messages[:i], {**message, "content": "1"}], False)
            return closing[max(0, len(closing) - len(self._closing(filled))) :]
        return closing

    def _is_dropped(self, i: int) -> bool:
        """Return whether `full` may have nothing of message `i`: the message has no content, and no anchor is left of
        it."""
        anchors = [_owner(anchor) for anchor in ANCHORS.finditer(self.full)]
        says_more = any(self.messages[i].get(key) for key in (*REASONING, "tool_calls"))
        return not self.messages[i].get("content") and i not in anchors and bool(anchors or not says_more)

    def _closing(self, text: str) -> list[re.Match[str]]:
        """Return the control tokens that end `text`, with only whitespace between and after them."""
        closing: list[re.Match[str]] = []
        followed_by = len(text)
        for match in reversed(self._tokens(text)):
            if text[match.end() : followed_by].strip():
                break
            closing.insert(0, match)
            followed_by = match.start()
        # Plain added tokens such as `</think>` are content, unless the turn has no other end.
        while len(closing) > 1 and closing[0].group(1) not in self.control:
            del closing[0]
        return closing

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        parts: list[tuple[str, bool]] = []
        position = 0
        for match in self._tokens(text):
            parts += [(text[position : match.start()], False), (match.group(1), True)]
            position = match.end()
        parts.append((text[position:], False))
        return [(piece, is_token) for piece, is_token in parts if piece]


def anchored(messages: Messages, place: re.Pattern[str]) -> list[dict[str, Any]]:
    """Return a copy of `messages` in which each string that templates write has an anchor with the number of its
    message.

    The anchor is at the last empty match of `place`. A string without such a match has none.
    """
    count = 0

    def copy(value: JSON, key: str, i: int) -> JSON:
        nonlocal count
        if isinstance(value, dict):
            return {name: copy(inner, name if key != "arguments" else key, i) for name, inner in value.items()}
        if isinstance(value, list):
            return [copy(inner, key, i) for inner in value]
        if not isinstance(value, str) or key not in _ANCHORED:
            return value
        spots = [match.end() for match in place.finditer(value) if not match[0]]
        if not spots:
            return value
        count += 1
        return f"{value[: spots[-1]]}{ANCHOR}{f'{i},{count}'.translate(TURN)}{value[spots[-1] :]}"

    return [{name: copy(inner, name, i) for name, inner in message.items()} for i, message in enumerate(messages)]


def _owner(anchor: re.Match[str]) -> int:
    """Return the number of the anchor's message."""
    return int(anchor[1].translate(NUMBER).partition(",")[0])


def _last_anchor(text: str) -> tuple[str, int]:
    """Return the last anchor and the position after it; an empty string and 0 if there is none."""
    return max(((anchor[0], anchor.end()) for anchor in ANCHORS.finditer(text)), key=itemgetter(1), default=("", 0))


def outside_literals(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose group 1 matches one of `tokens` that the template wrote. Literal spans match without
    it."""
    return re.compile(f"{LITERAL_START}.*?{LITERAL_END}|({any_of(tokens).pattern})", re.DOTALL)
