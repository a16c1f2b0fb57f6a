"""Hints for names and values that a recipe refuses: what replaces another tool's, or the nearest name of ours."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lean_ft.settings.describing import Setting
from lean_ft.settings.other_tools import (
    NEEDLESS,
    RECIPE,
    UNSUPPORTED,
    VALUE,
    Equivalent,
    Settings,
    are_in,
    assigned,
    by_lower_value,
    equivalent,
    read_equivalent,
    table,
    tools,
)
from lean_ft.settings.strict_yaml import Plain, as_text
from lean_ft.system.foreign_values import JSON
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import names_in


def hint_for_name(name: str, value: JSON, settings: Mapping[str, Setting]) -> str:
    """Return the end of a message for a name that is no setting: what replaces it, or the nearest name; empty for
    neither."""
    substitutes, sentence = replacement(name, as_text(value), settings)
    if substitutes or sentence:
        return _hint(assigned(substitutes, as_text(value), name in settings), sentence)
    return did_you_mean(name, (setting.key for setting in settings.values() if setting.group is None))


def hint_for_value(setting: Setting, value: JSON, settings: Mapping[str, Setting]) -> str:
    """Return the end of a message for a value that its setting refuses, in the same way."""
    text, expected = as_text(value), re.split(r" \| | or ", setting.type)
    substitutes, sentence = value_replacement(setting.key, text)
    if all(key in settings for key in substitutes) and (substitutes or sentence):
        return _hint(assigned(substitutes, text), sentence)
    if (spelled := table("spellings").get(text.lower())) in expected:
        return _hint(f"{setting.key}={spelled}")
    if text.endswith(".py") and "FILE.py:" in setting.type:
        names = names_in(Path(text).expanduser())
        others = f"The file has {', '.join(names)}." if len(names) > 1 else ""
        return _hint(f"{setting.key}={text}:{names[0]}", others) if names else ""
    if isinstance(value, str) and "number" in setting.type and not isinstance(Plain(value).value(), str | None):
        return f" Write the number without quotes: {value}"
    if isinstance(value, list) and " | " in setting.type:  # one of a list of names
        expected = [name.removeprefix("list of ") for name in expected]
        unknown = next((item for item in value if isinstance(item, str) and item not in expected), None)
        return did_you_mean(unknown, expected) if unknown else ""
    return did_you_mean(value, expected) if isinstance(value, str) and " | " in setting.type else ""


def hint_for_command(name: str) -> str:
    """Return the end of a message for a name that is no command and no recipe: what other tools' command is here."""
    if (row := table("commands").get(name.lower())) is None:
        return ""
    command, _, note = str(row).partition("; ")
    if command in (NEEDLESS, UNSUPPORTED):
        return f" {_sentence(f'{command}: {note}')}"
    return f" Run `{command.replace(VALUE, name.lower())}`." + (f" {_sentence(note)}" if note else "")


def _hint(meant: str, sentence: str = "") -> str:
    quoted = meant if "'" in meant else f"'{meant}'"
    return (f" Did you mean {quoted}?" if meant else "") + (f" {sentence}" if sentence else "")


def replacement(name: str, value: str, recipe_names: Collection[str]) -> tuple[Settings, str]:
    """Return what replaces a setting that a recipe does not have: settings and a note, or no settings and the reason.

    recipe_names: of its settings and groups.
    """
    equivalents, group = list(_equivalents(name, value, recipe_names)), name.partition(".")[0]
    if group != name and (name in table("recipes") or group not in recipe_names) and (owner := _owner(name)):
        return {}, f"The recipe {owner} has {name if name in table('recipes') else f'the group {group}'}."
    for candidate in equivalents:
        for settings in candidate.alternatives:
            if RECIPE in settings:
                further = {key: text for key, text in settings.items() if key != RECIPE}
                return {}, f"Use the recipe {settings[RECIPE]}{' with ' if further else ''}{assigned(further, value)}."
            if are_in(recipe_names, settings):
                return settings, _sentence(candidate.note)
    named = [settings for candidate in equivalents for settings in candidate.alternatives]
    for settings in (*named, *([{name: VALUE}] if name in table("recipes") else [])):
        owners = [_owner(key) for key in settings if key not in recipe_names]
        if owner := next(filter(None, owners), "finetune" if settings in named else None):
            return {}, f"The recipe {owner} has {assigned(settings, value)}."
    return {}, next(
        (_sentence(f"{candidate.verdict}: {candidate.note}") for candidate in equivalents if candidate.verdict), ""
    )


def value_replacement(key: str, value: str) -> tuple[Settings, str]:
    """Return what replaces a value of one of our settings, in the same way as `replacement`."""
    rows = [(name, row) for part in ("values", *tools()) for name, row in table(part).items() if isinstance(row, dict)]
    for name, row in rows if value.lower() != "any" else ():
        if (text := by_lower_value(row).get(value.lower())) is None:
            continue
        of_value, of_any = read_equivalent(text), read_equivalent(row.get("any", key))
        meant = next((settings for settings in of_value.alternatives if key in settings), None)
        if meant is not None:
            return meant, _sentence(of_value.note)
        if name == key or any(key in settings for settings in of_any.alternatives):
            if of_value.verdict:
                return {}, _sentence(f"{of_value.verdict}: {of_value.note}")
            if of_value.alternatives[0].get(RECIPE):
                return {}, f"Use the recipe {of_value.alternatives[0][RECIPE]}."
    return {}, ""


def _equivalents(name: str, value: str, recipe_names: Collection[str]) -> Iterator[Equivalent]:
    """Yield what the file says of a name, or of names with the same last part."""
    parts, (group, _, last) = ("values", "words", *tools()), name.rpartition(".")
    exact = [equivalent(part, name, value) for part in parts if name in table(part)]
    if any(exact):
        yield from filter(None, exact)
        return
    endings = [
        (part, answer)
        for part in parts[1:]
        for answer in table(part)
        if answer != name and answer.rpartition(".")[2] == last
    ]
    for part, ending in endings:
        answer = equivalent(part, ending, value)
        if answer and (
            group not in recipe_names or any(f"{group}." in key for settings in answer.alternatives for key in settings)
        ):
            yield answer


def _owner(key: str) -> str | None:
    """Return a recipe that has a setting which not all have."""
    recipes, names = table("recipes"), key.split(".")
    prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
    return next((str(recipes[prefix]) for prefix in prefixes if prefix in recipes), None)


def _sentence(text: str) -> str:
    """Return a note as a sentence. It may begin with the name of a setting or a file, which keeps its spelling."""
    is_name = text.startswith("lean_ft") or re.match(r"`|\w+[._/]\w", text)
    return f"{text if is_name else text[:1].upper() + text[1:]}." if text else ""
