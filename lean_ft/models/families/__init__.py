"""Model families: one row of facts each, a value or a function that reads it from config.json, and defaults of absent fields.
`lean_ft.models.config_json` reads a config.json by its family's row. A user's row is a variable of a file, `model.family`."""

from dataclasses import fields
from typing import Any

from lean_ft.models.config import DecoderConfig, MixtureConfig
from lean_ft.models.families.corrected_mixtures import CORRECTED_MIXTURES
from lean_ft.models.families.dense import DENSE
from lean_ft.models.families.family import Family, no_layer
from lean_ft.models.families.gemma import GEMMA
from lean_ft.models.families.hybrids import HYBRIDS
from lean_ft.models.families.latent import LATENT
from lean_ft.models.families.layer_norm import LAYER_NORM
from lean_ft.models.families.mamba import MAMBA
from lean_ft.models.families.mixtures import MIXTURES
from lean_ft.models.families.multimodal import MULTIMODAL, SIZES_7B, Multimodal
from lean_ft.models.families.older import OLDER
from lean_ft.models.families.refused import REFUSED
from lean_ft.models.families.unusual_attention import UNUSUAL_ATTENTION
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import OWN_FAMILIES, load_value

__all__ = ["FAMILIES", "MULTIMODAL", "REFUSED", "SIZES_7B", "Family", "Multimodal", "family_of", "no_layer"]

FAMILIES: dict[str, Family] = {
    **DENSE,
    **LAYER_NORM,
    **OLDER,
    **GEMMA,
    **MIXTURES,
    **CORRECTED_MIXTURES,
    **LATENT,
    **UNUSUAL_ATTENTION,
    **HYBRIDS,
    **MAMBA,
}


def family_of(model_type: Any) -> Family | None:
    """The row of a model_type, lean_ft's or the user's; None if there is neither. Raises ValueError if the user's is not a valid
    row."""
    if not isinstance(model_type, str):
        return None
    own = OWN_FAMILIES.get(model_type.replace("-", "_"))
    if model_type in FAMILIES or own is None:
        return FAMILIES.get(model_type)
    row = load_value(own)
    if not isinstance(row, Family):
        raise ValueError(f"{own} is a {type(row).__name__}; expected a Family of lean_ft.models.families.")
    for kind, facts, config in (("facts", row.facts, DecoderConfig), ("mixture", row.mixture, MixtureConfig)):
        known = [field.name for field in fields(config)]
        if unknown := [name for name in facts if name not in known]:
            meant = did_you_mean(unknown[0], known)
            raise ValueError(f"{own}: {kind} has {unknown[0]}; expected fields of {config.__name__}.{meant}")
    return row


def check_own_family(family: str, model_type: Any, folder: Any) -> None:
    """Raise ValueError if the user's row FILE.py:NAME has no effect on a folder with this model_type."""
    name, found = family.rpartition(":")[2], str(model_type).replace("-", "_")
    if found in FAMILIES:
        raise ValueError(
            f"model.family={family}: lean_ft reads {model_type} of {folder} itself. Leave out model.family."
        )
    if found != name:
        raise ValueError(
            f"model.family={family} is the row of {name}, and {folder} is {model_type}. Name the row {found}."
        )
