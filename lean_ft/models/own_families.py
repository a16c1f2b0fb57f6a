"""Errors about users' rows of model families: a row without effect, a row that fails, a model that needs one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lean_ft.models.families import FAMILIES, MULTIMODAL, own_name, own_row
from lean_ft.system.run_directory import TRAINING_STATE_FILE
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import OWN_FAMILIES, is_function_path, line_in
from lean_ft.system.whole_files import read_json


def check_own_families(setting: str | None = None) -> None:
    """Raise ValueError if this process has read no model by the user's row `setting`, FILE.py:NAME; by default, by the
    row of the option --family."""
    from lean_ft.models.config_json import as_its_family  # here, because that module imports this one

    for name, own in OWN_FAMILIES.items():
        if own.row is None and (own.by_option if setting is None else own.setting == setting):
            reason = f"no model here has the model_type {name}. Give the row the name of its model_type"
            if as_its_family({"model_type": name})["model_type"] in {*FAMILIES, *MULTIMODAL}:
                reason = f"lean_ft reads {name} itself. A row of your own needs another model_type in config.json"
            raise ValueError(f"model.family={own.setting} has no effect: {reason}, or leave the row out.")


@contextmanager
def naming_row(model_type: str) -> Iterator[None]:
    """Raise the error of a function in a user's row as a ValueError that names its line."""
    try:
        yield
    except Exception as error:
        own = own_row(model_type)
        if own is None or isinstance(error, ValueError):
            raise
        place = line_in(Path(own.setting.rpartition(":")[0]).expanduser().resolve(), error)
        raise ValueError(f"{place}: the row of {model_type} fails: {type(error).__name__}: {error}") from error


def remedy(model_type: str, where: str, known: Iterable[str]) -> str:
    """How to have a model read that lean_ft does not read: by the row that a run's checkpoint records, or by a new one.
    `known` model types are read."""
    settings = read_json(Path(where).parent / TRAINING_STATE_FILE).get("settings")
    if isinstance(settings, dict) and is_function_path(own := settings.get("model.family")):
        return f" Its run read it by a row of yours: if you trust this file, set model.family={own}, or --family {own}."
    if OWN_FAMILIES:
        rows = ", ".join(own.setting for own in OWN_FAMILIES.values())
        return f" model.family={rows} is the row of another model_type. Name the row {own_name(model_type)}."
    return (
        f"{did_you_mean(model_type, known)} docs/models.md lists the models that it reads, and docs/new_family.md "
        f"shows how to add one. With a row of your own, set model.family=FILE.py:{own_name(model_type)}, or --family "
        "of a command without settings."
    )
