"""Model families: one row of facts each, a value or a function that reads it from config.json, and defaults of absent
fields. `lean_ft.models.config_json` reads a config.json by its family's row. A user's row is a variable of a file,
`model.family`."""

import re
from dataclasses import fields

from lean_ft.models.config import DecoderConfig, MixtureConfig
from lean_ft.models.families.cohere2_moe import COHERE2_MOE
from lean_ft.models.families.corrected_mixtures import CORRECTED_MIXTURES
from lean_ft.models.families.dense import DENSE
from lean_ft.models.families.encoders import ENCODERS
from lean_ft.models.families.falcon_h1 import FALCON_H1
from lean_ft.models.families.family import Family, no_layer
from lean_ft.models.families.gemma import GEMMA
from lean_ft.models.families.gemma3n import GEMMA3N
from lean_ft.models.families.gemma4 import GEMMA4
from lean_ft.models.families.gpt_oss import GPT_OSS
from lean_ft.models.families.hybrids import HYBRIDS
from lean_ft.models.families.latent import LATENT
from lean_ft.models.families.layer_norm import LAYER_NORM
from lean_ft.models.families.llama4 import LLAMA4
from lean_ft.models.families.mamba import MAMBA
from lean_ft.models.families.mimo_v2_flash import MIMO_V2_FLASH
from lean_ft.models.families.mixtures import MIXTURES
from lean_ft.models.families.multimodal import MULTIMODAL, SIZES_7B, Multimodal
from lean_ft.models.families.nanochat import NANOCHAT
from lean_ft.models.families.older import OLDER
from lean_ft.models.families.phimoe import PHIMOE
from lean_ft.models.families.refused import REFUSED
from lean_ft.models.families.unusual_attention import UNUSUAL_ATTENTION
from lean_ft.system.spelling import did_you_mean
from lean_ft.system.user_functions import OWN_FAMILIES, OwnRow, load_value

__all__ = ["ENCODERS", "FAMILIES", "MULTIMODAL", "REFUSED", "SIZES_7B", "Family", "Multimodal", "family_of", "no_layer"]
__all__ += ["own_name", "own_row"]

FAMILIES: dict[str, Family] = {
    **DENSE,
    **NANOCHAT,
    **LAYER_NORM,
    **OLDER,
    **GEMMA,
    **GEMMA3N,
    **GEMMA4,
    **MIXTURES,
    **COHERE2_MOE,
    **GPT_OSS,
    **PHIMOE,
    **LLAMA4,
    **CORRECTED_MIXTURES,
    **LATENT,
    **UNUSUAL_ATTENTION,
    **MIMO_V2_FLASH,
    **HYBRIDS,
    **MAMBA,
    **FALCON_H1,
    **ENCODERS,
}


def family_of(model_type: object) -> Family | None:
    """The row of a model_type, lean_ft's or the user's; None if there is neither. Raises ValueError if the user's is
    not a valid row."""
    if not isinstance(model_type, str):
        return None
    entry = own_row(model_type)
    if model_type in FAMILIES or entry is None:
        return FAMILIES.get(model_type)
    if entry.row is None:
        row = load_value(entry.setting)
        if not isinstance(row, Family):
            raise ValueError(
                f"{entry.setting} is a {type(row).__name__}; expected a Family of lean_ft.models.families."
            )
        for part, facts, config in (("facts", row.facts, DecoderConfig), ("mixture", row.mixture, MixtureConfig)):
            valid = [field.name for field in fields(config) if field.name not in ("parts", "own")]
            if unknown := [name for name in facts if name not in valid]:
                meant = did_you_mean(unknown[0], valid)
                raise ValueError(
                    f"{entry.setting}: {part} has {unknown[0]}; expected fields of {config.__name__}.{meant}"
                )
        entry.row = row
    return entry.row


def own_row(model_type: str) -> OwnRow | None:
    return OWN_FAMILIES.get(own_name(model_type))


def own_name(model_type: str) -> str:
    """The variable of a user's row: the model_type, with `_` for characters that a variable's name cannot have."""
    return re.sub(r"\W", "_", model_type)
