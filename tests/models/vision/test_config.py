"""A damaged config.json of a model with images is a ValueError."""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from lean_ft.models.config_json import as_its_family, decoder_config
from lean_ft.models.hf_format import empty_model
from lean_ft.models.vision.config import VISION_FAMILIES
from tests.models.vision.documents import CASES, save

DAMAGE = [None, "x", 0, {}, [1, "a"], 1e30]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4", "lfm2_vl"])
@pytest.mark.parametrize("where", ["vision_config", ""])
def test_damaged_fields_are_refused_or_harmless(where: str, name: str, tmp_path: Path):
    file, refused = save(CASES[name], tmp_path) / "config.json", 0
    whole = json.loads(file.read_text())
    for field in whole[where] if where else whole:
        for value in DAMAGE:
            changed = {field: value} if not where else {where: {**whole[where], field: value}}
            file.write_text(json.dumps(whole | changed))
            try:
                empty_model(tmp_path, images="frozen")
            except ValueError:
                refused += 1
    assert refused > (45 if where else 10)


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_absent_fields_have_the_values_of_transformers(name: str):
    towers = {"gemma3": "siglip_vision_model", "mistral3": "pixtral", "lfm2_vl": "siglip2_vision_model"}
    theirs = CONFIG_MAPPING[towers[name]]() if name in towers else CONFIG_MAPPING[name](vision_config={}).vision_config
    rope = getattr(theirs, "rope_parameters", None) or {}
    for field, value in VISION_FAMILIES[name].defaults.items():
        their = rope.get(field, value) if field == "rope_theta" else getattr(theirs, field, value)
        assert value == (list(their) if isinstance(their, tuple) else their), field


def test_the_text_of_qwen3_vl_moe_has_the_values_of_transformers():
    sizes = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2, "num_experts": 6}
    sizes |= {"num_attention_heads": 32, "model_type": "qwen3_vl_moe_text"}
    theirs = CONFIG_MAPPING["qwen3_vl_moe_text"](**sizes, tie_word_embeddings=False).to_dict()
    ignored = {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 8}  # as in transformers
    absent, present, other = (decoder_config(as_its_family(x)) for x in (sizes, theirs, theirs | ignored))
    assert absent == present == other
    assert present.mixture is not None and present.mixture.weights_sum_to_one


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer is -2; expected -1"),
        ("qwen3_vl", {"model_type": "llava"}, "model_type is 'llava'"),
        (
            "gemma3",
            {"vision_config": {"num_hidden_layers": 2**20}},
            "num_hidden_layers is 1048576; expected at most 1,024",
        ),
        ("gemma3", {"vision_config": None}, "vision_config is None; expected an object"),
        (
            "gemma3",
            {"text_config": {"model_type": ["gemma3_text"]}},
            r"text_config has the model_type \['gemma3_text'\]",
        ),
        ("qwen3_vl", {"text_config": {"rope_parameters": {"rope_theta": 1e4}}}, "text_config lacks mrope_section"),
        (
            "qwen3_vl",
            {"text_config": {"rope_parameters": {"mrope_section": [9, 3, 2]}}},
            "mrope_section is .* 8 in all",
        ),
        (
            "gemma3",
            {"vision_config": {"hidden_size": 33}},
            "hidden_size is 33; expected a multiple of the number of attention heads, 2",
        ),
        (
            "mistral3",
            {"vision_config": {"hidden_size": 36, "num_attention_heads": 6, "head_dim": None}},
            "expected a multiple of 4 times",
        ),
        ("gemma4", {"vision_config": {"head_dim": 4}}, "vision_config: head_dim is 4; expected 16"),
    ],
)
def test_what_is_not_supported_is_named(name: str, changed: dict, message: str, tmp_path: Path):
    file = save(CASES[name], tmp_path) / "config.json"
    whole = json.loads(file.read_text())
    for field, value in changed.items():
        whole[field] = {**whole[field], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=message):
        empty_model(tmp_path, images="frozen")
