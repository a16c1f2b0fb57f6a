"""Limits on a tokenizer.json, checked before the `tokenizers` library builds the tokenizer that it describes.

The library does whatever the file says: it multiplies a text by each replacement, allocates tables up to the largest
id, and panics on lengths that do not fit. A panic is not an `Exception`, and running out of memory ends the process, so
both are
prevented here. Largest published files: 900,000 tokens, 7,000 added tokens, 600,000 merges.
"""

import base64
import re
from collections.abc import Iterator
from typing import Any

from lean_ft.system.foreign_values import JSON

MAX_ID = 2**24  # the library allocates tables up to the largest id
MAX_TOKENS, MAX_ADDED, MAX_MERGES = 2**20, 2**16, 2**20
MAX_TOKEN_CHARACTERS, MAX_CHARACTERS = 2**15, 2**23  # of one token, and of all tokens or merges
MAX_PARTS = 20_000  # values in the normalizer, pre-tokenizer, post-processor and decoder
MAX_GROWTH = 1000  # characters that one character may become
_PIECE = re.compile(r"\\[pP]\{\w+\}|\\.|\(\?[a-z<=!:>]*|\{\d+\}|.", re.DOTALL)


def check_limits(spec: dict[str, Any]) -> None:
    """Raise ValueError for a tokenizer.json that needs unbounded time or memory."""
    model_part = spec.get("model")
    model: dict[str, Any] = model_part if isinstance(model_part, dict) else {}
    vocabulary, added, merges = model.get("vocab") or {}, spec.get("added_tokens") or [], model.get("merges") or []
    _at_most("tokens", len(vocabulary), MAX_TOKENS)
    _at_most("added tokens", len(added), MAX_ADDED)
    _at_most("merges", len(merges), MAX_MERGES)
    contents = [*vocabulary, *(token.get("content") for token in added)]
    tokens = [token[0] if isinstance(token, list) and token else token for token in contents]
    lengths = [len(token) for token in tokens if isinstance(token, str)]
    _at_most("characters in a token", max(lengths, default=0), MAX_TOKEN_CHARACTERS)
    _at_most("characters in all tokens", sum(lengths), MAX_CHARACTERS)
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added]
    _at_most("as the largest id", max((number for number in ids if isinstance(number, int)), default=0), MAX_ID)
    _at_most("characters in max_input_chars_per_word", model.get("max_input_chars_per_word") or 0, 10_000)
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _at_most(f"characters in {name}", len(str(model.get(name) or "")), 100)
    _check_merges(model.get("continuing_subword_prefix") or "", merges, vocabulary)

    growth = 1.0
    steps = [spec.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    for num_parts, part in enumerate(_parts(steps)):
        _at_most("values outside its model", num_parts, MAX_PARTS)
        if isinstance(part, dict):
            growth *= _growth(part)
            expression = pattern.get("Regex") if isinstance(pattern := part.get("pattern"), dict) else None
            if isinstance(expression, str) and may_backtrack(expression):
                raise ValueError(
                    f"the expression {expression[:100]!r} repeats a group that has repetitions or alternatives"
                )
    _at_most("times the length of a text after normalization, splitting or decoding", growth, MAX_GROWTH)


def _at_most(what: str, number: float, most: int) -> None:
    if number > most:
        raise ValueError(f"it has {f'{number:,.0f}'[:30]} {what}; expected at most {most:,}")


def _parts(value: JSON) -> Iterator[JSON]:
    """Yield every value inside a JSON value."""
    remaining = [value]
    while remaining:
        yield (part := remaining.pop())
        remaining += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _growth(part: dict[str, Any]) -> float:
    """Return how many characters a step can make of one character."""
    step, content = part.get("type"), part.get("content")
    if step == "Replace" and isinstance(content, str):
        replaced = part.get("pattern")
        literal = replaced.get("String") if isinstance(replaced, dict) else None
        return max(1.0, len(content) / max(1, len(literal) if isinstance(literal, str) else 1))
    if step == "Prepend":
        return 1.0 + len(str(part.get("prepend")))
    if step == "ByteLevel":
        return 2.0
    if step == "Precompiled":  # length of a table, the table, then zero-terminated replacements
        blob = base64.b64decode(part.get("precompiled_charsmap") or "")
        return float(max(map(len, blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")), default=1) or 1)
    return 1.0


def _check_merges(prefix: Any, merges: list[Any], vocabulary: Any) -> None:
    """Raise ValueError for a merge that makes no token, or lacks the prefix that the library cuts off: it panics on
    them."""
    characters = 0
    for merge in merges:
        first, second = merge if isinstance(merge, list) else str(merge).split(" ", 1)
        characters += len(first) + len(second)
        if prefix and not (prefix.isascii() and second.startswith(prefix)):
            raise ValueError(f"the merge {str(merge)[:100]} lacks the continuing_subword_prefix {prefix!r}")
        if first + second[len(prefix) :] not in vocabulary:
            raise ValueError(f"the merge {str(merge)[:100]} makes no token of the vocabulary")
    _at_most("characters in all merges", characters, 2 * MAX_CHARACTERS)


def may_backtrack(expression: str) -> bool:
    """Return whether a regular expression repeats a group that has repetitions or alternatives: such patterns can take
    exponential time."""
    groups, depth_in_class = [False], 0
    pieces = _PIECE.findall(expression)
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
        if piece in "[]" or depth_in_class:
            depth_in_class += {"[": 1, "]": -1}.get(piece, 0)
        elif piece[0] == "(":
            groups.append(False)
        elif piece == ")" and len(groups) > 1:
            repeats = groups.pop()
            if repeats and following[:1] in ("*", "+", "{"):
                return True
            groups[-1] |= repeats
        elif piece in "*+?{|":
            groups[-1] = True
    return False
