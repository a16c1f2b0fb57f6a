"""Reading of config.json in both of transformers' spellings, and fields that are refused."""

import contextlib
import json

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from lean_ft.models import RopeConfig, decoder_config, load_model, save_model
from lean_ft.models.config_json import as_its_family, language_model_config
from lean_ft.models.families import FAMILIES, MULTIMODAL, REFUSED
from lean_ft.models.own_families import check_own_families
from lean_ft.settings import ModelConfig
from lean_ft.system.user_functions import OWN_FAMILIES, OwnRow
from lean_ft.training.summary import describe_model
from tests.models.family_cases import CASES
from tests.models.family_cases import SIZES as CASE_SIZES

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PHIMOE = {"model_type": "phimoe", "architectures": ["PhimoeForCausalLM"], "lm_head_bias": True}

# As published, but for ids of tokens and library versions.
LLAMA_3_2_1B = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
  "vocab_size": 128256
}""")
QWEN2_5_0_5B = json.loads("""{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896,
  "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
  "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "use_mrope": false,
  "use_sliding_window": false, "vocab_size": 151936
}""")

MISTRAL_7B_V0_1 = json.loads("""{
  "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
  "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
  "vocab_size": 32000
}""")
GEMMA_2_2B = json.loads("""{
  "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
  "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
  "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
  "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "use_cache": true, "vocab_size": 256000
}""")
GEMMA_3_1B = json.loads("""{
  "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": null, "cache_implementation": "hybrid", "final_logit_softcapping": null,
  "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
  "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
  "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
  "sliding_window": 512, "sliding_window_pattern": 6, "use_cache": true, "vocab_size": 262144
}""")
# With factors of our own for the published lists of 48.
PHI_4_MINI = json.loads("""{
  "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "embd_pdrop": 0.0,
  "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
  "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
  "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": {"type": "longrope"}, "rope_theta": 10000.0,
  "sliding_window": 262144, "tie_word_embeddings": true, "use_cache": true, "vocab_size": 200064
}""")
PHI_4_MINI["rope_scaling"] |= {"short_factor": [1.0] * 48, "long_factor": [1 + 0.5 * i for i in range(48)]}
SMOLLM3_3B = json.loads("""{
  "architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 65536,
  "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4,
  "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "use_cache": true,
  "use_sliding_window": false, "vocab_size": 128256
}""")
SMOLLM3_3B |= {"layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9}
PUBLISHED = [LLAMA_3_2_1B, QWEN2_5_0_5B, MISTRAL_7B_V0_1, GEMMA_2_2B, GEMMA_3_1B, PHI_4_MINI, SMOLLM3_3B]


def test_facts_of_single_layers_are_read():
    gemma = decoder_config(GEMMA_3_1B)
    assert [layer.window for layer in gemma.layers[:7]] == [512] * 5 + [None, 512]
    assert [layer.rope.theta for layer in gemma.layers[:7]] == [1e4] * 5 + [1e6, 1e4]
    assert [layer.window for layer in decoder_config(GEMMA_2_2B).layers[:3]] == [4096, None, 4096]
    assert {layer.window for layer in decoder_config(MISTRAL_7B_V0_1).layers} == {4096}
    assert [layer.rope is None for layer in decoder_config(SMOLLM3_3B).layers[:5]] == [False, False, False, True, False]
    phi = decoder_config(PHI_4_MINI).layers[0].rope
    assert (phi.rotary_fraction, phi.original_max_positions, len(phi.long_factors)) == (0.75, 4096.0, 48)


def test_published_configs_are_read():
    llama = decoder_config(LLAMA_3_2_1B)
    assert (llama.num_layers, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (16, 32, 8, 64)
    assert llama.tied_embeddings
    assert llama.norm_eps == 1e-5
    assert llama.layers[0].rope == RopeConfig(
        500000.0, "llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    qwen = decoder_config(QWEN2_5_0_5B)
    assert (qwen.qkv_bias, qwen.output_bias, qwen.mlp_bias) == (True, False, False)
    assert (qwen.hidden_size, qwen.head_dim, qwen.vocab_size, qwen.max_positions) == (896, 64, 151936, 32768)
    assert qwen.layers[0].rope == RopeConfig(1e6)


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_both_spellings_of_the_rotary_settings_mean_the_same(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)  # in the spelling of version 5
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in rewritten
    assert decoder_config(rewritten) == decoder_config(config)


SIZES = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 32}
SIZES |= {"rotary_dim": 2}  # at most a head's
# Fields without which transformers has no model of the family.
REQUIRED = {
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_transformers_defaults(family):
    sizes = {**SIZES, **REQUIRED.get(family, {})}
    said_in_full = transformers.AutoConfig.for_model(family, **sizes).to_dict()
    assert len(said_in_full) > len(SIZES) + 20
    assert decoder_config({"model_type": family, **sizes}) == decoder_config(said_in_full)


@pytest.mark.first(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_null_is_read_as_in_transformers_or_refused(family):
    sizes = {**SIZES, **REQUIRED.get(family, {})}
    said_in_full = transformers.AutoConfig.for_model(family, **sizes).to_dict()
    compared = set()
    for name in sorted({*said_in_full, *FAMILIES[family].defaults, "rope_scaling"} - {"model_type"}):
        settings = {**sizes, name: None}
        try:
            ours = decoder_config({"model_type": family, **settings})
            theirs = transformers.AutoConfig.for_model(family, **settings).to_dict()
        except (ValueError, StrictDataclassError):  # one of the two refuses it
            continue
        assert ours == decoder_config(theirs), name
        compared.add(name)
    turns = {"rope_parameters"} & set(said_in_full)  # nothing turns in some
    assert {"rope_scaling", *turns} <= compared
    layers = decoder_config(said_in_full).layers
    # GPT-J turns by a number of its own.
    assert turns or family == "gptj" or all(layer.rope is None for layer in layers)


def test_a_config_with_the_fields_of_text_and_images_in_one(tmp_path):
    """Qwen2.5-VL is published this way."""
    config = QWEN2_5_0_5B | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {"depth": 1},
        "vision_start_token_id": 96,
        "image_token_id": 98,
        "max_window_layers": 70,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "rope_theta": 1e6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert "hidden_size" in theirs["text_config"] and "hidden_size" not in theirs
    ours = decoder_config(language_model_config(config))
    assert ours == decoder_config(language_model_config(theirs)) == decoder_config(QWEN2_5_0_5B)


FOREIGN = [None, "x", -1, 0, 1.5, True, 10**30, float("nan"), [], [[]], ["x"], {}, {"rope_type": "x"}]


@pytest.mark.first(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_any_type_is_read_or_refused(family):
    settings = next(settings for of, settings in CASES.values() if of == family)
    config = transformers.AutoConfig.for_model(family, **{**CASE_SIZES, **settings}).to_dict()
    for name in sorted({*config, *FAMILIES[family].defaults} - {"model_type"}):
        for value in FOREIGN:
            with contextlib.suppress(ValueError):
                decoder_config({**config, name: value})


@pytest.mark.first(12)
@pytest.mark.parametrize("name", MULTIMODAL)
def test_fields_that_a_multimodal_config_leaves_out_have_transformers_defaults(name):
    """Also the sizes of a language model, which the first LLaVA models leave out."""
    kind = transformers.CONFIG_MAPPING[name]
    own = kind().text_config.model_type
    for text_type in [own] if own not in FAMILIES else [own, *set(MULTIMODAL[name].families) - {own}]:
        for sizes in ({}, SIZES):
            experts = {"num_experts": 8} if name == "qwen3_vl_moe" else {}  # every published file has it
            text = {"model_type": text_type, **sizes, **experts, "tie_word_embeddings": False}
            whole = {"model_type": name, "tie_word_embeddings": False, "text_config": text}
            try:
                theirs = decoder_config(language_model_config(kind.from_dict(whole).to_dict()))
            except (ValueError, StrictDataclassError):  # transformers checks the image encoder's width
                continue
            try:
                assert decoder_config(language_model_config(whole)) == theirs, text_type
            except ValueError:  # a size is missing
                assert not sizes


def test_a_type_is_either_read_or_refused():
    read = {*FAMILIES, *MULTIMODAL}
    assert not read & REFUSED.keys()
    assert all(as_its_family({"model_type": name})["model_type"] == name for name in REFUSED)


OWN = """
from lean_ft.models.families import Family
from lean_ft.models.families.family import UNGATED_ACTIVATION_NAMES
arcee = Family(facts={"gated": False}, activations=UNGATED_ACTIVATION_NAMES, defaults={"hidden_act": "relu2"})
llama = Family()
typo = Family(facts={"gatd": False})
text = "arcee"
late = Family(facts={"num_heads": lambda fields: {}["n_embd"]}, defaults={"max_position_embeddings": 64})
"""


def test_a_row_of_the_user(make_checkpoint, tmp_path, monkeypatch, own_families):
    folder, reference = make_checkpoint("arcee")
    other, _ = make_checkpoint("llama")
    del FAMILIES["arcee"]
    (tmp_path / "own.py").write_text(OWN)

    def read(folder, family):
        return load_model(ModelConfig(path=str(folder), dtype="float32", family=f"{tmp_path}/own.py:{family}"))

    try:
        model, ids = read(folder, "arcee"), torch.arange(40)[None]
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
        save_model(model, tmp_path / "saved")
        assert not {"model.family", "own"} & set((tmp_path / "saved" / "config.json").read_text().split('"'))
        torch.testing.assert_close(load_model(tmp_path / "saved")(ids), model(ids))
        read(other, "llama")
        with pytest.raises(ValueError, match="own.py:llama has no effect: lean_ft reads llama itself"):
            check_own_families(f"{tmp_path}/own.py:llama")
        (other / "config.json").write_text((other / "config.json").read_text().replace('"llama"', '"llama2"'))
        with pytest.raises(ValueError, match="is the row of another model_type. Name the row llama2"):
            read(other, "arcee")
        for name in ("typo", "text", "late"):
            monkeypatch.setitem(OWN_FAMILIES, name, OwnRow(f"{tmp_path}/own.py:{name}"))
        with pytest.raises(ValueError, match="own.py:typo: facts has gatd; .* Did you mean 'gated'"):
            decoder_config({**LLAMA, "model_type": "typo"})
        with pytest.raises(ValueError, match="own.py:text is a str; expected a Family"):
            decoder_config({**LLAMA, "model_type": "text"})
        with pytest.raises(ValueError, match=r"own.py, line 8: the row of late fails: KeyError: 'n_embd'"):
            decoder_config({**LLAMA, "model_type": "late"})
        with pytest.raises(ValueError, match="own.py has no row missing; it has arcee, llama, typo, text"):
            read(folder, "missing")
        with pytest.raises(ValueError, match="expected FILE.py:NAME"):
            ModelConfig(path="x", family="arcee")
    finally:
        OWN_FAMILIES.clear()
    with pytest.raises(ValueError, match="model_type is 'arcee'.*model.family=FILE.py:arcee"):
        load_model(folder)


OWN_PART = """
from dataclasses import dataclass

from lean_ft.models.config import FamilyParts
from lean_ft.models.families import Family
from lean_ft.models.layers import MLP


@dataclass(frozen=True)
class Power:
    power: int


class PowerMLP(MLP):
    @classmethod
    def of(cls, config, layer):
        mlp = super().of(config, layer)
        mlp.power = config.own.power
        return mlp

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu() ** self.power)


arcee = Family(
    facts={"gated": False},
    parts=FamilyParts(mlp=PowerMLP),
    own=lambda fields: Power(fields.count("power")),
    activations={"relu2": "silu"},
    defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "power": 2},
)
"""


def test_a_row_of_the_user_with_a_part_of_its_own(make_checkpoint, tmp_path, own_families):
    """The squared ReLU of Arcee, as if lean_ft did not have it."""
    folder, reference = make_checkpoint("arcee")
    del FAMILIES["arcee"]
    (tmp_path / "own.py").write_text(OWN_PART)
    try:
        model = load_model(ModelConfig(path=str(folder), dtype="float32", family=f"{tmp_path}/own.py:arcee"))
        ids = torch.arange(40)[None]
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
        (config := json.loads((folder / "config.json").read_text()))["power"] = 3
        assert decoder_config(config) != model.config  # keys of caches and plans see the family's facts
        assert "power=3" in repr(decoder_config(config))
    finally:
        OWN_FAMILIES.clear()


def test_dropout_of_the_file_changes_nothing_and_is_reported(make_checkpoint):
    settings = {"attention_dropout": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.0, "classifier_dropout": 0.3}
    assert decoder_config({**LLAMA, **settings}) == decoder_config(LLAMA)
    # Its default is attention_dropout=0.1, as published.
    folder, _ = make_checkpoint("seed_oss", residual_dropout=0.05)
    described = describe_model(load_model(folder).train())
    assert described.endswith("; dropout is ignored (attention_dropout=0.1, residual_dropout=0.05 in config.json)")
    folder, _ = make_checkpoint("llama")
    assert "dropout" not in describe_model(load_model(folder))


def test_linear_scaling_in_its_oldest_spelling():
    config = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}
    assert decoder_config(config).layers[0].rope == RopeConfig(1e4, "linear", factor=2.0)


def test_head_dim_and_key_heads_are_derived():
    config = decoder_config({**LLAMA, "head_dim": None, "num_key_value_heads": None})
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


@pytest.mark.parametrize("number", ["2", "02"])  # transformers pads the numbers of models of 10 layers or more
def test_settings_of_single_layers(number):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"layer_types": kinds, "per_layer_config": {number: {"head_dim": 40}}}
    config = decoder_config({**LLAMA, "model_type": "gemma4_text", "hidden_act": "gelu_pytorch_tanh", **own})
    assert [config.head_dim_of(layer) for layer in range(3)] == [256, 256, 40]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "lama"},
            r"model_type is 'lama', which lean_ft does not read\. Did you mean 'llama'\? docs/models",
        ),
        ({"model_type": "mamba2"}, r"model_type is 'mamba2', which lean_ft does not read\. Did you mean 'bamba'"),
        ({"model_type": "gemma5"}, r"model_type is 'gemma5', which lean_ft does not read\. Did you mean 'gemma'"),
        ({"model_type": "deepseek_v32"}, r"model_type is 'deepseek_v32': an indexer chooses the tokens"),
        ({"model_type": "glm5_next_text"}, r"model_type is 'glm5_next_text': an indexer chooses the tokens"),
        ({"model_type": "t5"}, "model_type is 't5': it has an encoder and a decoder"),
        (
            {"model_type": "gemma4_text", "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            "layer_types ends with sliding_attention; expected full_attention",
        ),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 1}, "no lower layer of the kind of layer 2"),
        ({"model_type": "gemma4_text", "enable_moe_block": True}, "the field num_experts is missing"),
        (
            {"model_type": "gemma4_text", "per_layer_config": {"2": {"sliding_window": 4}}},
            "per_layer_config: 2 has sliding_window; expected only head_dim",
        ),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "architectures .* a language model"),
        ({"architectures": "LlamaModel"}, "architectures is 'LlamaModel'"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'; expected one of gelu, gelu_pytorch_tanh, silu, swish"),
        ({"hidden_activation": "gelu"}, "hidden_act is 'silu' and hidden_activation is 'gelu'. Remove"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"sliding_window": 512}, "sliding_window is 512"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"layer_types": ["sliding_attention"] * 3}, "expected no layer with a sliding window"),
        (
            {"layer_types": ["full_attention", "chunked", "chunked"]},
            "layer_types has chunked, full_attention; expected",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types is .* expected a list of 3, one per layer"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 4.0}},
            "rope_scaling has the rope type 'mrope'; expected one of",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: short_factor is None; expected a list of 8"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7 + [0]}},
            "long_factor is .* expected a list of 8 positive numbers",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate is 1; expected true or false"),
        ({"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_scaling has factor"),
        ({"rope_scaling": {"type": "lineer", "factor": 4.0}}, "Did you mean 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "field factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1; expected a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "rope_scaling has beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": "llama3"}, "expected an object"),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "rope_type": "llama3", "high_freq_factor": 0.5}},
            "must not be below low_freq",
        ),
        ({"rope_theta": "10000"}, "rope_theta is '10000'"),
        ({"vocab_size": None}, "field vocab_size is missing"),
        ({"hidden_size": 63.5}, "hidden_size is 63.5; expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected a positive integer"),
        ({"num_attention_heads": 5}, "not a multiple of 5 attention heads"),
        ({"num_key_value_heads": 3}, "expected a multiple of num_key_value_heads, 3"),
        ({"head_dim": 15}, "head_dim is 15; rotary embeddings need an even number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({**PHIMOE, "tie_word_embeddings": True}, "lm_head_bias and tie_word_embeddings are both true"),
        ({**PHIMOE, "num_experts_per_tok": 3}, "num_experts_per_tok is 3; expected 2"),
        ({**PHIMOE, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'; expected longrope"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_fields_are_refused_by_name(change, message):
    decoder_config(LLAMA)  # is fine without the change
    with pytest.raises(ValueError, match=message) as error:
        decoder_config({**LLAMA, **change}, where="/models/mine/config.json")
    assert str(error.value).startswith("/models/mine/config.json: ")
