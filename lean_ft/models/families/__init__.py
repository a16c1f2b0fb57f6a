"""Model families: one row of facts each, a value or a function that reads it from config.json, and defaults of absent fields.
`lean_ft.models.config_json` reads a config.json by its family's row."""

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

__all__ = ["FAMILIES", "MULTIMODAL", "REFUSED", "SIZES_7B", "Family", "Multimodal", "no_layer"]

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
