"""Text that is shown to a person: what cannot be seen, or would act on a terminal, gets a sign."""

import re
import unicodedata

NEWLINE = "↵\n"
_OTHERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` with a sign at each line's end, and a picture or a code in place of control characters, of characters
    without width and of those that reverse the direction of a line."""
    return _OTHERS.sub(_sign, text).replace("\n", NEWLINE)


def _sign(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # ␛ for escape
    if unicodedata.category(match.group()) == "Cs":
        return "\ufffd"
    return f"⟨U+{code:04X}⟩"
