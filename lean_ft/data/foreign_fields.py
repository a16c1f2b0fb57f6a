"""Fields of a row and keys of a message to which other tools give a meaning.

A format reads its own fields (`lean_ft.data.formats`), and a content part its own keys (`lean_ft.data.parts`). Of the
others, those in these tables raise an error that names the remedy, because training without them would teach something
else. All further fields, such as ids, scores and log-probabilities of a reference model, are named once in the report,
and so are tools, keys of messages and template variables that the chat template does not mention.

Sources: the documentation of TRL, axolotl, LLaMA-Factory, ms-swift, torchtune and OpenAI.
"""

from collections.abc import Collection, Mapping
from typing import Any

from lean_ft.data.media import MEDIA_FIELDS, refuse_key, refuse_part_key
from lean_ft.tokenizers.chat_template import REASONING

_NO_WEIGHTS = (
    "rows have no weights. Put rows of one weight into one file, and set 'data.source=[{path: FILE, weight: W}, ...]'"
)
_PARTS = "parts of a message cannot be selected. Remove the key; `train: false` and `weight: 0` exclude a whole message"
REFUSED: dict[str, str] = MEDIA_FIELDS | dict.fromkeys(
    ("weight", "sample_weight", "example_weight", "loss_weight"), _NO_WEIGHTS
)
REFUSED_KEYS: dict[str, str] = MEDIA_FIELDS | dict.fromkeys(
    ("mask", "loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail"), _PARTS
)
"""Fields of a row and keys of a message, with the remedy."""

OTHER_NAMES = {"functions": "tools", "system_prompt": "system", "system_message": "system"}
"""Refused unless the row also has the field that lean_ft reads."""

PROMPTS = ("prompt", "instruction", "input", "question", "query")
"""Refused if they hold a text that the row's prompt lacks."""

SWITCHES = {"train": True, "training": True, "loss": True, "weight": True, "masked": False}
"""Keys of a message -> their value for a message that is trained."""

CALLS = ("tool_calls", "function_call")  # refused if the chat template does not write them


def is_given(value: Any) -> bool:
    """Return whether a field or key has a value that could have an effect."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")
    return value is not None and value != [] and value != {}


def unread_fields(
    row: Mapping[str, Any],
    read: Mapping[str, str],
    readable: Collection[str],
    columns: Mapping[str, str],
    variables: Collection[str] = (),
) -> list[str]:
    """Return the names of a row's fields that are not read.

    read: lean_ft's names of the fields that are read -> the row's names; readable: all fields of the format; columns:
    `data.columns`; variables: names of the variables of the row's chat template. Raises ValueError for a field that
    must not be dropped.
    """
    unread = {name: value for name, value in row.items() if name not in read.values() and is_given(value)}
    asked = [name for name in (*PROMPTS, "conversations") if name in read] if unread else []
    texts = [_text_of(row[read[name]]) for name in asked or ["chosen"] if name in read]
    for name, value in unread.items():
        _refuse(name, value, REFUSED, "the row has the field")
        if name in variables:
            raise ValueError(
                f"the row has the field `{name}`, which is a variable of the chat template. Put it into the row's "
                f"field `chat_template_kwargs`, or set data.chat_template_kwargs.{name}, or remove the field."
            )
        if (ours := OTHER_NAMES.get(name)) in readable and ours not in read:
            raise ValueError(f"the row has the field `{name}` and no `{ours}`. Set data.columns.{ours}={name}.")
        is_prompt = name in PROMPTS and isinstance(value, str) and texts and columns.keys().isdisjoint(PROMPTS)
        if (
            is_prompt
            and not any(value.strip() in text for text in texts)
            and not all(t.strip() in value for t in texts)
        ):
            ours = (*asked, "prompt")[0]
            raise ValueError(
                f"the row has the field `{name}`, and its text is not part of the prompt. Set "
                f"data.columns.{ours}={name} to read it as the prompt, or data.columns.{ours}={read.get(ours, ours)} "
                "to leave it out."
            )
    return list(unread)


def unwritten(
    messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any], mentioned: frozenset[str]
) -> list[str]:
    """Return what a chat template does not mention: `tools`, keys of `messages`, and template variables.

    Raises ValueError for a key that must not be dropped.
    """
    ours = ("role", "content")
    keys = {k: value for message in messages for k, value in message.items() if k not in ours and is_given(value)}
    names = [] if tools is None or "tools" in mentioned else ["tools"]
    for key, value in keys.items():
        _refuse(key, value, REFUSED_KEYS, "a message has the key")
        refuse_key(key, value)
        if key in mentioned or (key in REASONING and not mentioned.isdisjoint(REASONING)):
            continue
        if key in CALLS:
            raise ValueError("the chat template does not write tool calls. Set data.chat_template to one that does.")
        names.append(f"messages.{key}")
    return names + [f"chat_template_kwargs.{name}" for name in variables if name not in mentioned]


def refuse_part_keys(keys: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for an unread key of a content part that must not be dropped."""
    for key, value in keys.items():
        refuse_part_key(key, value, where)
        if value != SWITCHES.get(key, value):
            raise ValueError(f"{where} has a content part with the key `{key}`, and {_PARTS}.")
        _refuse(key, value, REFUSED_KEYS, f"{where} has a content part with the key")


def _refuse(name: str, value: Any, reasons: Mapping[str, str], place: str) -> None:
    is_neutral = name.endswith(("weight", "scale")) and str(value).strip() in ("1", "1.0")
    if name in reasons and not is_neutral:
        raise ValueError(f"{place} `{name}`, and {reasons[name]}.")


def _text_of(value: Any) -> str:
    """Return the text of a prompt: a string, or the contents of messages."""
    messages = [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []
    return "\n".join(str(m.get("content", m.get("value"))) for m in messages) if messages else str(value)
