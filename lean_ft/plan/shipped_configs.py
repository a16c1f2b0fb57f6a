"""Plan a preset's model that is not on this machine, from the config.json that ships beside the preset."""

from lean_ft.hub.download import find_cached
from lean_ft.hub.paths import repository_name
from lean_ft.settings import RecipeConfig, models_of
from lean_ft.system.catalog import shipped_config


def with_shipped_configs(cfg: RecipeConfig) -> RecipeConfig:
    """The settings with models that are not downloaded replaced by the folder of their shipped config.json, if there is one.

    Only plans use it: a run reads the model's own config.json. A model with new tokens is left, because it needs its tokenizer.
    """
    updates = {}
    for (group, name), path in models_of(cfg).items():
        settings, repository = updates.get(group, getattr(cfg, group)), repository_name(path)
        if (
            repository is None
            or getattr(settings, "new_tokens", ())
            or find_cached(repository, weights=False) is not None
        ):
            continue
        if (folder := shipped_config(path)) is not None:
            updates[group] = settings.model_copy(update={name: str(folder)})
    return cfg.model_copy(update=updates)
