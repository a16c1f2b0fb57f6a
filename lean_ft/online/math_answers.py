"""The reward `math_answer`: whether the final answer of a completion equals that of the row, as a number or as a text.

The final answer is the content of the last `\\boxed{}`, else the text after the last `####` (GSM8K), else after the
last "answer is" or "answer:", else the whole completion. Text up to `</think>` is left out.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

_THOUGHT = re.compile(r"<think>|</think>")
_MARKS = (re.compile(r"####"), re.compile(r"\banswer(?:\s+is\b\s*:?|\s*[:=])", re.IGNORECASE))
_LAYOUT = re.compile(r"\\[()\[\],;:! ]|\\(?:left|right|displaystyle)(?![a-zA-Z])|\^\\circ|\^\{\\circ\}|\*\*|\\?[$€£°]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(-?[\d.,]+)\}\s*\{([\d.,]+)\}|(\d)\s*(\d))")
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<digits>\d{1,3}(?:,\d{3})+|\d*)(?P<decimals>\.\d*)?(?P<exponent>[eE][+-]?\d{1,3})?"
    r"(?:\s*/\s*(?P<divisor>\d+(?:\.\d+)?))?\s*%?(?P<words>(?:\s+[a-zA-Z]{2,})*)",
    re.ASCII,
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_LONGEST_NUMBER = 300  # characters; a longer one is compared as text


def math_answer(pattern: str | None, completions: Sequence[str], answer: Sequence[Any], **_: object) -> list[float]:
    """1 if the final answer of the completion equals that of the column `answer`, which may be a number, a text, or a
    whole solution with a marked answer."""
    return [
        float(_is_equal(final_answer(said), final_answer(str(expected))))
        for said, expected in zip(completions, answer, strict=True)
    ]


def final_answer(text: str) -> str | None:
    """Return the final answer in a text, or None if there is none: the reasoning has no end, or the braces of the last
    `\\boxed{}` do not close."""
    thoughts = [*_THOUGHT.finditer(text)]
    if thoughts and thoughts[-1][0] == "<think>":
        return None
    text = text[thoughts[-1].end() :] if thoughts else text
    if (start := text.rfind("\\boxed")) >= 0:
        return _in_braces(text[start + len("\\boxed") :].lstrip())
    for mark in _MARKS:
        if found := [*mark.finditer(text)]:
            return text[found[-1].end() :].strip().partition("\n")[0].strip() or None
    return text.strip() or None


def _in_braces(text: str) -> str | None:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:i].strip() or None
    return None


def _is_equal(said: str | None, expected: str | None) -> bool:
    if said is None or expected is None:
        return False
    said, expected = _plain(said), _plain(expected)
    value = _number(expected)
    return _number(said) == value if value is not None else said.replace(" ", "") == expected.replace(" ", "")


def _plain(answer: str) -> str:
    """Return an answer without layout, such as dollar signs, and without `x =` before it."""
    answer = _LAYOUT.sub("", _TEXT.sub(r" \1", answer).replace("{,}", ",").replace("\\%", "%").replace("−", "-"))
    answer = _FRACTION.sub(lambda found: f"{found[1] or found[3]}/{found[2] or found[4]}", answer)
    answer = re.sub(r"^[a-zA-Z]\s*=", "", answer.strip())
    return " ".join(answer.lower().split()).rstrip(".").rstrip()


def _number(text: str) -> Fraction | None:
    """Return the value of a number, perhaps with `%`, a word such as `million`, and a unit; None for another text."""
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if found is None or not any(character.isdigit() for character in found["digits"] + (found["decimals"] or "")):
        return None
    number = f"{found['sign']}{found['digits'].replace(',', '') or '0'}{found['decimals'] or ''}"
    value, divisor = Fraction(number.rstrip(".") + (found["exponent"] or "")), Fraction(found["divisor"] or 1)
    scale = 1
    for word in found["words"].split():
        scale *= _SCALES.get(word, 1)
    return value / divisor * scale if divisor else None
