"""A model of the Hugging Face hub, held to one commit: `org/name` becomes `org/name@commit` before a run begins.

What config.yaml records is then what was trained, and a run that goes on takes the commit that it began with, wherever
the repository's main branch is by now.
"""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from lean_ft.hub import download as hub
from lean_ft.hub.paths import path_at_commit, repository_name
from lean_ft.settings import RecipeConfig, models_of
from lean_ft.system.log import say
from lean_ft.training.checkpoint import list_checkpoints, read_training_state
from lean_ft.training.run_directory import Settings, read_starts

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def hold_models_to_commits(cfg: ConfigT) -> ConfigT:
    """Returns the settings with every model of the hub at a commit; a training run says which.

    `org/name` is the commit that the run in `output_dir` began with, else the newest of its main branch; a branch or
    tag in `org/name@revision` is looked up, so that going on with one that has moved is refused like any other model.
    Raises as `lean_ft.hub.download` does.
    """
    recorded = _recorded_settings(cfg) if isinstance(cfg, RecipeConfig) else {}
    held: dict[str, BaseModel] = {}
    for (group, field), asked in models_of(cfg).items():
        name = repository_name(asked)
        if name is None or name.names_commit:
            continue
        begun = hub.parse_name(str(recorded.get(f"{group}.{field}")))
        goes_on = name.revision is None and begun is not None and begun.repo == name.repo and begun.names_commit
        path = str(begun) if goes_on else str(path_at_commit(asked))
        held[group] = getattr(cfg, group).model_copy(update={field: path})
        if isinstance(cfg, RecipeConfig):
            key = group if field == "path" else field  # model, teacher
            say("hub", f"{key} {path}{', as when this run began' if goes_on else ''}")
    return cfg.model_copy(update=held)


def _recorded_settings(cfg: RecipeConfig) -> Settings:
    """The settings of the run that `cfg` goes on with, as far as there is one; whether it can is checked later."""
    if cfg.resume == "never":
        return {}
    checkpoints = list_checkpoints(cfg.output_dir) if cfg.resume == "auto" else [Path(cfg.resume)]
    for folder in reversed(checkpoints):
        try:
            return read_training_state(folder)["settings"]
        except (OSError, ValueError, KeyError):
            continue  # damaged, or no checkpoint at all: told by find_checkpoint
    starts = read_starts(cfg.output_dir) if cfg.resume == "auto" else []
    return starts[-1]["settings"] if starts else {}
