"""Patterns of layers' names in an adapter's config, matched as PEFT does: `re.match(rf"(.*\\.)?({pattern})$", name)`.

A pattern is a regular expression for a name or its last parts. A dot matches any character. The first pattern that
matches counts.

Adapter files are untrusted, and `re` can take exponential time. So matching keeps the set of positions that a pattern
can have reached, as the bits of one number (Thompson 1968, https://doi.org/10.1145/363347.363387), and counts its
steps. Patterns without repetitions and choices, of which there may be one per layer, are looked up in tables.

Supported are characters, dots, escapes, classes, groups, choices, repetitions, and the anchors ^ and $.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NoReturn, TypeVar

ValueT = TypeVar("ValueT")

_ATOM = re.compile(r"\\[dDwWsS]|\\[^A-Za-z0-9\s]|\[\^?(?:\w-\w|[\w.]|\\[dw.-])+-?\]|[^\\\[\](){}*+?|^$]")
_REPETITION = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<least>\d{1,3})(?P<comma>,(?P<most>\d{0,3}))?\})\??(?![*+?{])")
_MAX_CHARACTERS = 2**22  # of all patterns: one for each of the most layers that a file can have
_MAX_DEPTH = 10  # of nested groups
_MAX_STEPS = 2**23  # of all matches: about 10 seconds


@dataclass(frozen=True)
class _Atom:
    """One character, by a regular expression for it."""

    text: str

    def mask(self, name: str) -> int:
        """The positions of the characters of `name` that match, as bits."""
        return int("".join("01"[_is_match(self.text, char)] for char in reversed(name)) or "0", 2)


@dataclass(frozen=True)
class _Anchor:
    at_start: bool


@dataclass(frozen=True)
class _Choice:
    """Alternative sequences: a group, or a whole pattern."""

    sequences: "tuple[tuple[_Node, ...], ...]"


@dataclass(frozen=True)
class _Repeat:
    node: "_Atom | _Choice"
    least: int
    most: int | None


_Node = _Atom | _Anchor | _Choice | _Repeat


@lru_cache(2**14)
def _is_match(atom: str, char: str) -> bool:
    return re.fullmatch(atom, char) is not None


class NamePatterns(Generic[ValueT]):
    """Values by patterns of names. Raises ValueError for a pattern that is not supported."""

    def __init__(self, patterns: Mapping[str, ValueT]) -> None:
        if sum(map(len, patterns)) > _MAX_CHARACTERS:
            raise ValueError(f"its patterns have more than {_MAX_CHARACTERS:,} characters.")
        self._steps = 0
        self._values = list(patterns.values())
        self._general: list[tuple[int, _Choice]] = []
        # The places of a pattern's dots, its length and whether it is a whole name -> its text -> its number.
        self._fixed: dict[tuple[tuple[int, ...], int, bool], dict[str, int]] = {}
        for number, pattern in enumerate(patterns):
            parsed = _Parser(pattern).whole()
            if (fixed := _fixed(parsed)) is None:
                self._general.append((number, parsed))
            else:
                text, dots, is_whole = fixed
                self._fixed.setdefault((dots, len(text), is_whole), {}).setdefault(text, number)

    def find(self, name: str, default: ValueT) -> ValueT:
        """The value of the first pattern that matches the name. Raises ValueError if matching takes too long."""
        self._count(len(self._fixed))
        numbers = [len(self._values)]
        for (dots, length, is_whole), by_text in self._fixed.items():
            begin = len(name) - length
            if begin < 0 or (begin > 0 and (is_whole or name[begin - 1] != ".")):
                continue
            self._count(length)
            end = list(name[begin:])
            for dot in dots:
                end[dot] = "." if end[dot] != "\n" else "\n"
            numbers.append(by_text.get("".join(end), len(self._values)))
        first, masks = min(numbers), dict[str, int]()
        for number, pattern in self._general:
            if number > first:
                break
            starts = 1 | sum(1 << i + 1 for i, char in enumerate(name) if char == ".")
            if self._after(pattern, starts, name, masks) >> len(name):
                first = number
        return default if first == len(self._values) else self._values[first]

    def _after(self, node: _Node, reached: int, name: str, masks: dict[str, int]) -> int:
        """The positions after the node, from those before it, as bits."""
        self._count(1)
        match node:
            case _Atom():
                return (reached & self._mask(node, name, masks)) << 1
            case _Anchor(at_start):
                return reached & (1 if at_start else 1 << len(name))
            case _Choice(sequences):
                ends = 0
                for sequence in sequences:
                    here = reached
                    for part in sequence:
                        here = here and self._after(part, here, name, masks)
                    ends |= here
                return ends
            case _Repeat(inner, least, most):
                for _ in range(least):
                    reached = reached and self._after(inner, reached, name, masks)
                if isinstance(inner, _Atom) and most is None:
                    # A sum carries each position to the end of its run of matches.
                    mask = self._mask(inner, name, masks)
                    return reached | (((reached & mask) + mask) ^ mask)
                left, before = most, -1
                while reached != before and left != least:
                    before, left = reached, None if left is None else left - 1
                    reached |= self._after(inner, reached, name, masks)
                return reached

    def _mask(self, atom: _Atom, name: str, masks: dict[str, int]) -> int:
        if atom.text not in masks:
            self._count(len(name) // 8)
            masks[atom.text] = atom.mask(name)
        return masks[atom.text]

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise ValueError("its patterns take too long to match.")


def _fixed(pattern: _Choice) -> tuple[str, tuple[int, ...], bool] | None:
    """Return a pattern's text, the places of its dots and whether it is a whole name; None unless it is only a row of
    characters."""
    first, *alternatives = pattern.sequences
    if alternatives:
        return None
    nodes = list(first)
    is_whole = nodes[:1] == [_Anchor(at_start=True)]
    nodes = nodes[1:] if is_whole else nodes
    nodes = nodes[:-1] if nodes[-1:] == [_Anchor(at_start=False)] else nodes
    texts = [node.text for node in nodes if isinstance(node, _Atom)]
    chars = [text.removeprefix("\\") for text in texts]
    if len(texts) < len(nodes) or any(
        len(char) > 1 or (char != text and char.isalpha()) for char, text in zip(chars, texts, strict=True)
    ):
        return None
    return "".join(chars), tuple(i for i, text in enumerate(texts) if text == "."), is_whole


class _Parser:
    """Reads one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0

    def whole(self) -> _Choice:
        choice = self._choice()
        if self._place < len(self._pattern):
            self._fail()
        return choice

    def _choice(self) -> _Choice:
        sequences = [self._sequence()]
        while self._take("|"):
            sequences.append(self._sequence())
        return _Choice(tuple(sequences))

    def _sequence(self) -> tuple[_Node, ...]:
        nodes: list[_Node] = []
        while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
            if self._take("^") or self._take("$"):
                nodes.append(_Anchor(self._pattern[self._place - 1] == "^"))
                continue
            node = self._group() if self._take("(") else self._atom()
            repetition = _REPETITION.match(self._pattern, self._place)
            nodes.append(node if repetition is None else self._repeated(node, repetition))
        return tuple(nodes)

    def _group(self) -> _Choice:
        self._take("?:")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail()
        choice = self._choice()
        self._depth -= 1
        if not self._take(")"):
            self._fail()
        return choice

    def _atom(self) -> _Atom:
        atom = _ATOM.match(self._pattern, self._place)
        if atom is None:
            self._fail()
        if atom[0].startswith("["):
            try:
                re.compile(atom[0])
            except re.error:
                self._fail()
        self._place = atom.end()
        return _Atom(atom[0])

    def _repeated(self, node: _Atom | _Choice, repetition: re.Match[str]) -> _Repeat:
        self._place = repetition.end()
        if repetition["sign"] is not None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[repetition["sign"]]
        else:
            least = int(repetition["least"])
            most = least if repetition["comma"] is None else int(repetition["most"]) if repetition["most"] else None
        if most is not None and most < least:
            self._fail()
        return _Repeat(node, least, most)

    def _take(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._place):
            return False
        self._place += len(text)
        return True

    def _fail(self) -> NoReturn:
        raise ValueError(
            f"{self._pattern!r}: cannot be read as a regular expression from character {self._place + 1} on. Supported "
            "are characters, dots, escapes, classes such as [0-9], groups, |, *, +, ?, {m,n}, ^ and $."
        )
