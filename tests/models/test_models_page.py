"""docs/models.md agrees with the tables that loading uses."""

import re
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto

from lean_ft.models import decoder_config
from lean_ft.models.config_json import as_its_family
from lean_ft.models.families import FAMILIES, MULTIMODAL
from lean_ft.models.vision.config import VISION_FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
SECTIONS = {
    "Language models": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "Models of images and text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_says_what_is_read(title):
    """A type that is not read has the reason of the error. Run scripts/make_models_page.py if a row differs."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\S+)` \|.*\| ([^|]+) \|$", section, re.MULTILINE))
    for name, how in rows.items():
        family = as_its_family({"model_type": name, "hidden_size": 48, "num_attention_heads": 6})["model_type"]
        if name in MULTIMODAL:
            assert how == "with images" if name in VISION_FAMILIES else how.startswith("language model, `"), name
            assert name in VISION_FAMILIES or re.findall("`(.*?)`", how) == list(MULTIMODAL[name].families), name
        elif family in FAMILIES:
            assert how == ("yes" if family == name else f"yes, as `{family}`"), name
        else:
            with pytest.raises(ValueError, match=re.escape(f"model_type is '{name}'")) as error:
                decoder_config({"model_type": name})
            reason = "which lean_ft does not read" if how == "no: no family computes it" else how.removeprefix("no: ")
            assert reason in str(error.value), name
    assert rows.keys() == SECTIONS[title].keys()
    num_read = sum(not how.startswith("no: ") for how in rows.values())
    assert f"- **{num_read} of {len(rows)}** " in PAGE
