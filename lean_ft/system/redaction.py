"""Remove secrets and the user's home from text that a run prints or writes next to its data.

`redact` is called where such text leaves the process: log lines, error messages, tracebacks, config.yaml, run.json,
training_state.json, metrics.jsonl, samples.jsonl and all that a logger gets. A secret becomes `[token]`, and the home
`~`, which every path setting accepts. Secrets are values of environment variables with names like MY_KEY or
DB_PASSWORD, credentials and signatures in URLs, long values after names like `Authorization:` and `api_key=`, and
tokens of known formats. Old wandb keys look like git commits (40 hexadecimal digits), so only WANDB_API_KEY identifies
them.
Not redacted: bad batches and prepared data, which contain the user's own rows, and model files.
"""

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

MIN_SECRET_CHARACTERS = 8  # shorter values may occur inside words
MAX_MESSAGE_CHARACTERS = 2000
_SECRET_NAME = re.compile(
    r"(?=.*(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|CONNECTION_STRING|_(PASS|PWD|AUTH|SAS)$))(?!.*_(PATH|FILE|DIR)$)",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"(?<=://)[^/\s?#\"'<>]+(?=@)"  # user:password@ and token@
    r"|\b(hf_|api_org_|gh[opsur]_|github_pat_|glpat-|pypi-|sk-|sk_live_|xox[abeprs]-|wandb_v1_|dckr_pat_)[\w-]{16,}"
    # AWS, Google, JSON web tokens
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\bey[\w-]{10,400}\.ey[\w-]{10,}\.[\w-]+"
)
_KEY = r"(key|sig|pwd|pass|jwt|hmac|code|sid)([-_]?id)?"
_NAMED = re.compile(
    # In a URL's query or fragment, also one that is quoted inside another URL: ?token=, &X-Amz-Signature=
    rf"(([?&;#]|%3F|%26|%23)[\w.-]{{0,40}}((token|secret|signature|passw|credential|session|auth(?!ors?=))[\w.-]{{0,40}}|{_KEY})(=|%3D)"
    # In other text: Authorization: Bearer, 'x-api-key': '
    r"|\bauthorization[\"']?\s*[:=]\s*[\"']?((bearer|basic|token)\s+)?+(?=\S{8})|\bbearer\s+(?=\S{16})"
    r"|\b(api[-_]?key|(auth|access|security)[-_]?token|(client|api)[-_]?secret)[\"']?\s*[:=]\s*[\"']?(?=\S{16}))"
    r"(?!\[token\])((?!%26)[^&#;\s\"'<>\\)\]}])+",
    re.IGNORECASE,
)
_GIVEN: dict[str, str] = {}  # absolute path of a run's folder -> the path that was given
# Characters that move a terminal's cursor, end a line, reverse the order of letters, or are no text. Line feeds and
# tabs are not among them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROL_OR_BREAK = re.compile(_CONTROL.pattern + r"|[\t\n]")


def redact(text: str) -> str:
    """Return `text` without secrets, and with `~` for the user's home."""
    return _without(text, _secrets())


def redact_values(value: Any) -> Any:
    """Return a copy of JSON or YAML data with all strings redacted, names included."""
    secrets = _secrets()

    def redacted(value: Any) -> Any:
        if isinstance(value, dict):
            values: dict[Any, Any] = {}
            for name, inner in value.items():
                shown = once = redacted(name) if isinstance(name, str) else name
                while shown in values:  # two names may become equal
                    shown = f"{once} ({len(values)})"
                values[shown] = redacted(inner)
            return values
        if isinstance(value, list | tuple):
            return [redacted(inner) for inner in value]
        return _without(value, secrets) if isinstance(value, str) else value

    return redacted(value)


def _secrets() -> list[str]:
    """The secret values of environment variables, the longest first: one may contain another."""
    values = {value for name, value in os.environ.items() if _SECRET_NAME.match(name)}
    values = {value for value in values if len(value) >= MIN_SECRET_CHARACTERS}
    for value in values.copy():
        values |= {json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")}  # as errors and URLs spell it
    return sorted(values, key=len, reverse=True)


def _without(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "[token]")
    for folder, shown in _GIVEN.items():
        text = _replaced_folder(text, folder, shown)
    return shorten_home(_NAMED.sub(r"\1[token]", _SECRET.sub("[token]", text)))


def printable(text: str, max_characters: int | None = None) -> str:
    """Return redacted text without control characters (which could change a terminal), shortened in the middle to
    `max_characters`."""
    text = redact(text)  # before a cut, which may fall into a secret
    if max_characters is not None and len(text) > max_characters:
        kept = max_characters - 60
        left_out = f" ... ({len(text) - kept:,} characters left out) ... "
        text = text[: kept * 3 // 4] + left_out + text[len(text) - kept // 4 :]
    return escaped(text)


def escaped(text: str) -> str:
    """Return foreign text for a terminal: control characters become escapes such as `\\x1b`, and lines stay lines."""
    return _CONTROL.sub(_escape, text)


def on_one_line(text: str) -> str:
    """Return foreign text for one line of a file or of the terminal: line feeds and tabs become escapes too."""
    return _CONTROL_OR_BREAK.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def shorten_home(text: str) -> str:
    """Replace the user's home by `~` at the start of paths in `text`."""
    home = os.path.expanduser("~").rstrip("/")
    return text if not home or home == "~" else _replaced_folder(text, home, "~")


def shown_as_given(folder: Path) -> Path:
    """Return the folder as an absolute path. Redacted text shows the path as it was given."""
    if not folder.is_absolute():
        _GIVEN[str(folder.absolute())] = str(folder)
    return folder.absolute()


def as_given(folder: Path) -> Path:
    """The path from which `shown_as_given` made this one."""
    return Path(_GIVEN.get(str(folder), folder))


def _replaced_folder(text: str, folder: str, name: str) -> str:
    if folder not in text:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(folder)}(?=/|\b(?![\w.-]))", lambda _: name, text)
