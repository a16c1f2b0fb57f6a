"""Every fact of a decoder, and every family's own parts, on two ranks of tensor parallelism: equal to one process, or
refused."""

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import transformers

from lean_ft.models import Decoder, decoder_config
from lean_ft.models.config import DecoderConfig, FamilyParts, LayerConfig, MixtureConfig
from lean_ft.models.families import FAMILIES
from lean_ft.models.rope import RopeConfig
from lean_ft.parallel.tensor import check_divides
from tests.models.family_cases import CASES, ENCODER_CASES, SIZES
from tests.parallel.processes import needs_parts, on_ranks
from tests.parallel.small_training import small_model
from tests.parallel.test_cuts import LATENT, MIXTURE, STATE, TENSOR, Case, check, outcome

ROPE = RopeConfig(theta=500.0)
CENTERED = {"norm_centered": True}
GATED = replace(MIXTURE, shared_intermediate_size=40)
GROUPS = replace(MIXTURE, num_groups=4, groups_per_token=2, score="sigmoid")
DYNAMIC = {"scaling": "dynamic", "factor": 3.0, "original_max_positions": 12}
YARN = {"scaling": "yarn", "factor": 8.0, "original_max_positions": 32}
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_max_positions": 64, "high_freq_factor": 4.0}
FACTORS = tuple(1.0 + 0.3 * i for i in range(8))
LONG = {"scaling": "longrope", "original_max_positions": 12, "short_factors": (1.0,) * 8, "long_factors": FACTORS}
GROWTH = {"query_growth": 0.3, "query_growth_positions": 4}

# The arguments of `small_model` in which a fact has a value that is not neutral; several if the fact has several kinds
# of value.
OF_DECODER: dict[str, list[dict[str, Any]]] = {
    "norm_placement": [{"norm_placement": name} for name in ("post", "both", "parallel", "parallel_normed")],
    "norm_centered": [CENTERED],
    "norm_parameters": [{"norm_parameters": "none"}, CENTERED | {"norm_parameters": "weight_and_bias"}],
    "norm_weight_offset": [{"norm_weight_offset": 1.0}],
    "bidirectional": [{"bidirectional": True}, {"bidirectional": True, "layer": {"window": 5}}],
    "qkv_bias": [{"qkv_bias": True}],
    "output_bias": [{"output_bias": True}],
    "mlp_bias": [{"mlp_bias": True}],
    "fused_qkv": [{"fused_qkv": True}],
    "qkv_by_head": [{"fused_qkv": True, "qkv_by_head": True, "num_kv_heads": 4}],
    "fused_gate_up": [{"fused_gate_up": True}],
    "activation": [
        {"activation": "gelu"},
        *({"activation": name, "gated": False} for name in ("xielu", "relu", "relu2")),
    ],
    "gated": [{"gated": False, "mlp_bias": True}],
    "qk_norm": [{"qk_norm": name} for name in ("head", "turned_head", "projection", "centered", "centered_by_head")],
    "value_norm": [{"value_norm": True}],
    "attention_scale": [{"attention_scale": 0.1}],
    "latent": [LATENT],
    "attention_gate": [{"attention_gate": "own"}, {"attention_gate": "in_query"}],
    "attention_sinks": [{"attention_sinks": True}],
    "position_row": [{"position_row": 0}],
    "embedding_multiplier": [{"embedding_multiplier": 3.0}],
    "embedding_multiplier_in_weight_dtype": [
        {"embedding_multiplier": 3.1, "embedding_multiplier_in_weight_dtype": True}
    ],
    "residual_multiplier": [{"residual_multiplier": 0.5}],
    "logits_divisor": [{"logits_divisor": 2.0}],
    "logits_softcap": [{"logits_softcap": 3.0}],
    "head_bias": [{"head_bias": True}],
    "has_output": [{"has_output": False}],
    "num_drafting": [{"num_drafting": 1}],
    "num_scores": [{"num_scores": 512}],  # as many as `small_training` has targets
}
OF_LAYER: dict[str, list[dict[str, Any]]] = {
    "window": [{"layer": {"window": 5}}],
    "mixer": [{"layer": STATE}],
    "has_attention": [{"layer": {"rope": None, "has_attention": False}}],
    "mixture": [{"layer": {"mixture": MIXTURE}}],
    "intermediate_size": [{"layer": {"intermediate_size": size}} for size in (96, 97, 0)],
    "kv_shape": [{"layer": {"kv_shape": shape}} for shape in ((4, 16), (1, 16), (2, 8))],
    "kv_from_layer": [{"layer": {"kv_from_layer": 0}}],
}
_MIXTURES: dict[str, list[MixtureConfig]] = {
    "router_name": [replace(MIXTURE, router_name="router")],
    "activation": [replace(MIXTURE, activation=name) for name in ("gelu_tanh", "relu2")],
    "shared_intermediate_size": [GATED],
    "shared_name": [replace(GATED, shared_name="shared_experts")],
    "shared_is_fused": [replace(GATED, shared_is_fused=True)],
    "shared_gate": [replace(GATED, shared_gate=True)],
    "score": [replace(MIXTURE, score="sigmoid")],
    "has_score_correction": [replace(MIXTURE, score="sigmoid", has_score_correction=True)],
    "num_groups": [GROUPS],
    "groups_per_token": [replace(GROUPS, groups_per_token=3)],
    "weights_factor": [replace(MIXTURE, weights_factor=2.5)],
    "router_in_float32": [replace(MIXTURE, router_in_float32=True)],
    "router_weight_in_float32": [replace(MIXTURE, router_in_float32=True, router_weight_in_float32=True)],
    "router_aux_loss_coef": [MIXTURE],
}
_ROPES: dict[str, list[dict[str, Any]]] = {
    "scaling": [{"scaling": "linear", "factor": 4.0}, DYNAMIC, LLAMA3, YARN, LONG],
    "rotary_fraction": [{"rotary_fraction": 0.5}],
    "interleaved": [{"interleaved": True}],
    "in_float32": [{"in_float32": True}],
    "query_growth": [GROWTH],
    "query_growth_positions": [GROWTH],
    "factor": [DYNAMIC],
    "low_freq_factor": [{**LLAMA3, "low_freq_factor": 2.0}],
    "high_freq_factor": [LLAMA3],
    "original_max_positions": [YARN],
    "attention_factor": [{**YARN, "attention_factor": 1.3}],
    "beta_fast": [{**YARN, "beta_fast": 4.0}],
    "beta_slow": [{**YARN, "beta_slow": 0.5}],
    "truncate": [{**YARN, "truncate": False}],
    "axes": [{"axes": (0, 1, 2, 0, 1, 2, 0, 1)}],
    "nonzero_fraction": [{"scaling": "proportional", "nonzero_fraction": 0.5}],
    "short_factors": [{**LONG, "short_factors": FACTORS}],
    "long_factors": [LONG],
}
OF_MIXTURE = {name: [{"layer": {"mixture": one}} for one in values] for name, values in _MIXTURES.items()}
OF_ROPE = {name: [{"layer": {"rope": replace(ROPE, **value)}} for value in values] for name, values in _ROPES.items()}
FACTS = {DecoderConfig: OF_DECODER, LayerConfig: OF_LAYER, MixtureConfig: OF_MIXTURE, RopeConfig: OF_ROPE}
# Facts without a case: images are in test_image_towers.py, layers after pooling in test_vectors.py, and each family
# with parts of its own is in `CASES_WITH_PARTS`.
WITHOUT_CASE = {DecoderConfig: {"vision", "dense", "parts", "own"}, LayerConfig: {"own"}}
ALL_CASES = CASES | ENCODER_CASES
CASES_WITH_PARTS = [name for name, (family, _) in ALL_CASES.items() if FAMILIES[family].parts != FamilyParts()]
REFUSAL = "parallel.tensor=2 does not "


# The cases of Gemma 4 share keys or have odd numbers of heads.
_EVEN_HEADS = {"num_kv_shared_layers": 0, "num_key_value_heads": 2, "num_global_key_value_heads": 2}


def family_settings(case: str, **changes: Any) -> dict[str, Any]:
    model_type, settings = ALL_CASES[case]
    settings = {**settings, **changes}
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings}).to_dict()
    return {"config": decoder_config(config | {"architectures": None})}


def all_cases() -> dict[str, dict[str, Any]]:
    """The arguments of `small_model` by name."""
    of_facts = {
        f"{part.__name__}.{name} {i}": settings
        for part, facts in FACTS.items()
        for name, values in facts.items()
        for i, settings in enumerate(values)
    }
    of_families = {name: family_settings(name) for name in CASES_WITH_PARTS}
    return of_facts | of_families | {"gemma4_even_heads": family_settings("gemma4_text_experts", **_EVEN_HEADS)}


def parts_of(model: Decoder, kind: type) -> list[Any]:
    config = model.config
    found = [
        config,
        *config.layers,
        *(layer.mixture for layer in config.layers),
        *(layer.rope for layer in config.layers),
    ]
    return [part for part in found if isinstance(part, kind)]


def refusal_or_outcome(settings: dict[str, Any]) -> Any:
    try:
        return outcome(Case(TENSOR, model=settings), TENSOR)
    except ValueError as error:
        return str(error)


def work() -> dict[str, Any]:
    return {name: refusal_or_outcome(settings) for name, settings in all_cases().items()}


@pytest.mark.parametrize("part", FACTS, ids=lambda part: part.__name__)
def test_every_fact_has_a_value_that_is_not_neutral(part):
    """A new fact needs a case here, and is then split or refused."""
    defaults = {field.name: field.default for field in fields(part) if field.default is not MISSING}
    assert FACTS[part].keys() == defaults.keys() - WITHOUT_CASE.get(part, set())
    for name, default in defaults.items():
        for settings in FACTS[part].get(name, ()):
            found = parts_of(small_model(**settings), part)
            assert any(getattr(one, name) != default for one in found), name


def test_parts_of_a_family_are_refused_unless_they_state_that_they_split():
    parts = FAMILIES["nanochat"].parts
    check_divides(small_model(parts=parts), 2)
    with pytest.raises(ValueError, match=f"{REFUSAL}support this model's modules that only its family has"):
        check_divides(small_model(parts=replace(parts, splits=False)), 2)


@pytest.fixture(scope="module")
def on_two() -> list[Any]:
    return on_ranks(2, work, timeout=600)


@pytest.mark.long
@needs_parts
@pytest.mark.parametrize("name", all_cases())
def test_two_ranks_equal_one_process_or_the_fact_is_refused(on_two, name):
    results = [of_rank[name] for of_rank in on_two]
    if isinstance(results[0], str):
        assert all(REFUSAL in result for result in results), results
    else:
        check(on_two, name, Case(TENSOR, model=all_cases()[name]))
