"""Count the families that use each fact of the shared configuration of decoders.

    python scripts/family_facts.py          all facts, the rarest first
    python scripts/family_facts.py 3        facts that fewer than 3 families use

A family uses a fact if one of its cases in tests/models/family_cases.py gives it another value than the default, alone
or with a setting that config.json may have in any family: a rotary scaling, the router's loss, or labels. Facts of
fewer than three families belong in the families' files (CONTRIBUTING.md). `parts` and `own` hold these, `vision` is the
images' own configuration, and the configurations of recurrent mixers are the mixers' own.
"""

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lean_ft.models import decoder_config  # noqa: E402
from lean_ft.models.config import DecoderConfig, LatentConfig, LayerConfig, MixtureConfig  # noqa: E402
from lean_ft.models.config_json import SCORE_ARCHITECTURES  # noqa: E402
from lean_ft.models.families import MULTIMODAL  # noqa: E402
from lean_ft.models.rope import RopeConfig  # noqa: E402
from lean_ft.models.vision.config import VISION_FAMILIES  # noqa: E402
from tests.models.family_cases import CASES, ENCODER_CASES, LLAMA3, SIZES, YARN  # noqa: E402

SHARED = DecoderConfig, LayerConfig, MixtureConfig, LatentConfig, RopeConfig
WITHOUT = "parts", "own", "has_output", "dense", "num_drafting"  # the last three: how a folder is loaded
_YARN = YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
_ON_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def families_of_facts() -> dict[str, set[str]]:
    """The families that use each fact, by `Class.field`."""
    families: dict[str, set[str]] = {
        f"{part.__name__}.{field.name}": set()
        for part in SHARED
        for field in fields(part)
        if field.default is not MISSING and field.name not in WITHOUT
    }
    for model_type, config in _configs():
        for part in _parts(config):
            for field in fields(part):
                name = f"{type(part).__name__}.{field.name}"
                if name in families and getattr(part, field.name) != field.default:
                    families[name].add(model_type)
    families["DecoderConfig.vision"] = _with_images()
    return families


def _configs() -> Iterator[tuple[str, DecoderConfig]]:
    """Every case, as it is and with each shared setting that its family reads."""
    with_images = _with_images()
    for model_type, case in (CASES | ENCODER_CASES).values():
        settings: list[dict[str, Any]] = [
            {},
            {"rope_parameters": _YARN},
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}},
            {"output_router_logits": True, "router_aux_loss_coef": 0.1},
        ]
        if model_type in SCORE_ARCHITECTURES:
            settings.append({"architectures": [SCORE_ARCHITECTURES[model_type]]})
        if model_type in with_images:
            settings.append({"rope_parameters": _ON_AXES})
        for setting in settings:
            try:
                yield model_type, decoder_config({**SIZES, **case, **setting, "model_type": model_type})
            except ValueError:
                assert setting, f"{model_type}: its case is refused"


def _with_images() -> set[str]:
    """The families of language models that read images."""
    return {family for whole in VISION_FAMILIES for family in MULTIMODAL[whole].families}


def _parts(config: DecoderConfig) -> list[Any]:
    of_layers = [part for layer in config.layers for part in (layer, layer.rope, layer.mixture)]
    return [part for part in (config, config.latent, *of_layers) if part is not None]


def main() -> None:
    below = int(sys.argv[1]) if len(sys.argv) > 1 else len(CASES)
    for name, families in sorted(families_of_facts().items(), key=lambda item: len(item[1])):
        if len(families) < below:
            more = "" if len(families) <= 6 else ", ..."
            print(f"{len(families):3} {name:55} {', '.join(sorted(families)[:6])}{more}")


if __name__ == "__main__":
    main()
