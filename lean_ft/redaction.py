"""What does not belong into a log or a file that is passed on: access tokens, and where somebody's home is.

A home is written `~`, which every setting that names a path takes; a token becomes `[token]`.
"""

import os
import re

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "LEANFT_TOKEN")
MIN_TOKEN_CHARACTERS = 8  # a shorter value is no token, and may be part of any word
# The hub's tokens, and the password of an address.
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def redact(text: str) -> str:
    """`text` without tokens, and with `~` for the user's home."""
    for variable in TOKEN_VARIABLES:
        token = os.environ.get(variable, "")
        if len(token) >= MIN_TOKEN_CHARACTERS:
            text = text.replace(token, "[token]")
    return shorten_home(_TOKEN.sub("[token]", text))


def shorten_home(text: str) -> str:
    """`text` with `~` where a path begins with the user's home."""
    home = os.path.expanduser("~").rstrip("/")
    if not home or home == "~":
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?=/|\b(?![\w.-]))", "~", text)
