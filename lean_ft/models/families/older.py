"""Dense families with LayerNorms and feed-forward layers without a gate."""

from collections.abc import Callable, Mapping
from typing import Any

from lean_ft.models.families.family import (
    UNGATED_ACTIVATION_NAMES,
    Family,
    every_layer,
    flag,
    no_rope,
    partial_rope,
    root_of_hidden_size,
)
from lean_ft.models.rope import RopeConfig
from lean_ft.models.rope_settings import head_dim_of, rope_config
from lean_ft.system.config_fields import ConfigFields


def spelled(
    spellings: Mapping[str, str], ignored: tuple[str, ...] = ()
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Rewrites a config.json: fields by their usual names, without those that transformers ignores."""

    def preprocessed(config: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in config.items() if name not in ignored}
        return kept | {usual: kept[name] for name, usual in spellings.items() if kept.get(name) is not None}

    return preprocessed


def _head_bias(fields: ConfigFields) -> bool:
    fields.expect("which the bias of the output layer needs", tie_word_embeddings=False)
    return True


def _placement(fields: ConfigFields) -> str:
    return "parallel_normed" if fields.flag("use_parallel_residual") else "pre"


def _gpt2_config(config: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    usual |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
    config = spelled(usual, (*_BY_HEAD, "intermediate_size"))(config)
    hidden_size = config.get("hidden_size")
    return ({"intermediate_size": 4 * hidden_size} if isinstance(hidden_size, int) else {}) | config


def _bigcode_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return _gpt2_config(config) | ({"num_key_value_heads": 1} if config.get("multi_query", True) else {})


def _rope_of_some_features(fields: ConfigFields, layer: int, is_windowed: bool) -> RopeConfig:
    head_dim = head_dim_of(fields)
    # The number of features is cut off to an integer.
    share = min(1.0, (fields.count("rotary_dim", most=head_dim, multiple_of=2) + 0.5) / head_dim)
    settings = {"rope_theta": 10_000.0, "partial_rotary_factor": share}
    return rope_config(fields, settings, "rotary_dim", may_be_partial=True, interleaved=True)


def _falcon_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """All heads share one key and value, unless `multi_query` is off."""
    config = spelled({"ffn_hidden_size": "intermediate_size"}, (*_BY_HEAD, "intermediate_size"))(config)
    hidden_size = config.get("hidden_size")
    config = ({"intermediate_size": 4 * hidden_size} if isinstance(hidden_size, int) else {}) | config
    return config | ({"num_key_value_heads": 1} if config.get("multi_query", True) else {})


def _biogpt_multiplier(fields: ConfigFields) -> float:
    return root_of_hidden_size(fields) if fields.flag("scale_embedding") else 1.0


def _gpt2_scale(fields: ConfigFields) -> float | None:
    fields.expect(scale_attn_by_inverse_layer_idx=False)
    return None if fields.flag("scale_attn_weights") else 1.0


def _opt_bias(fields: ConfigFields) -> bool:
    fields.expect(do_layer_norm_before=True, layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    if fields.get("word_embed_proj_dim") is not None:
        fields.expect("the hidden size", word_embed_proj_dim=fields.count("hidden_size"))
    return fields.flag("enable_bias")


# A table: related fields share a line.
# fmt: off
_BY_HEAD = ("head_dim", "num_key_value_heads")
_LAYER_NORM = {"norm_centered": True, "norm_parameters": "weight_and_bias", "gated": False}
_EVERY_BIAS: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_MLP_ON_DISK = {"mlp.up_proj": ("mlp.dense_h_to_4h",), "mlp.down_proj": ("mlp.dense_4h_to_h",)}
_GPT_ON_DISK = {
    "self_attn.qkv_proj": ("attn.c_attn",), "self_attn.o_proj": ("attn.c_proj",), "mlp.up_proj": ("mlp.c_fc",),
    "mlp.down_proj": ("mlp.c_proj",), "input_layernorm": ("ln_1",), "post_attention_layernorm": ("ln_2",),
    "embed_tokens": ("wte",), "embed_positions": ("wpe",), "model.norm": ("model.ln_f",),
}
_GPT_DEFAULTS: dict[str, Any] = {
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "max_position_embeddings": 1024,
}
_GPT: dict[str, Any] = {
    "norm_eps_field": "layer_norm_epsilon", "activation_field": "activation_function", "layers": "h",
    "activations": UNGATED_ACTIVATION_NAMES, "prefix_on_disk": "transformer.", "prefix_in_memory": "transformer.",
    "unread": (".attn.bias", ".attn.masked_bias"),
}
_QK_NORM_ON_DISK = {"self_attn.q_norm": ("self_attn.q_layernorm",), "self_attn.k_norm": ("self_attn.k_layernorm",)}
_QK_NORM = {"qk_norm": lambda fields: "centered" if fields.flag("qk_layernorm") else None}

OLDER: dict[str, Family] = {
    "starcoder2": Family(
        scores_as="Starcoder2", has_window=every_layer, norm_eps_field="norm_epsilon",
        activations=UNGATED_ACTIVATION_NAMES,
        facts={**_LAYER_NORM, **dict.fromkeys(_EVERY_BIAS, flag("use_bias"))},
        on_disk={"mlp.up_proj": ("mlp.c_fc",), "mlp.down_proj": ("mlp.c_proj",)},
        defaults={
            "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
            "initializer_range": 0.018042, "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True,
        },
    ),
    "phi": Family(
        scores_as="Phi", rope=partial_rope, norm_eps_field="layer_norm_eps", activations=UNGATED_ACTIVATION_NAMES,
        facts={**_LAYER_NORM, **_EVERY_BIAS, **_QK_NORM, "norm_placement": "parallel", "head_bias": _head_bias},
        on_disk={
            **_QK_NORM_ON_DISK, "self_attn.o_proj": ("self_attn.dense",), "mlp.up_proj": ("mlp.fc1",),
            "mlp.down_proj": ("mlp.fc2",), "model.norm": ("model.final_layernorm",),
        },
        defaults={
            "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "qk_layernorm": False,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt_neox": Family(
        scores_as="GPTNeoX", rope=partial_rope, norm_eps_field="layer_norm_eps", activations=UNGATED_ACTIVATION_NAMES,
        facts={
            **_LAYER_NORM, "qkv_bias": flag("attention_bias"), "output_bias": flag("attention_bias"), "mlp_bias": True,
            "norm_placement": _placement, "fused_qkv": True, "qkv_by_head": True,
        },
        preprocessed=spelled(
            {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
            ("num_key_value_heads", "rope_theta", "partial_rotary_factor"),
        ),
        prefix_on_disk="gpt_neox.", prefix_in_memory="gpt_neox.", in_memory={"lm_head": "lm_head"},
        unread=(".attention.bias", ".attention.masked_bias"),
        on_disk={
            **_MLP_ON_DISK, "self_attn.qkv_proj": ("attention.query_key_value",),
            "self_attn.o_proj": ("attention.dense",), "model.embed_tokens": ("model.embed_in",),
            "model.norm": ("model.final_layer_norm",), "lm_head": ("embed_out",),
        },
        defaults={
            "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "attention_bias": True,
            "partial_rotary_factor": 0.25, "use_parallel_residual": True,
        },
    ),
    "persimmon": Family(
        scores_as="Persimmon", rope=partial_rope, norm_eps_field="layer_norm_eps", activations=UNGATED_ACTIVATION_NAMES,
        facts={**_LAYER_NORM, **_EVERY_BIAS, **_QK_NORM, "fused_qkv": True, "qkv_by_head": True},
        preprocessed=spelled({}, ("num_key_value_heads",)),
        on_disk={
            **_MLP_ON_DISK, **_QK_NORM_ON_DISK, "self_attn.qkv_proj": ("self_attn.query_key_value",),
            "self_attn.o_proj": ("self_attn.dense",), "model.norm": ("model.final_layernorm",),
        },
        defaults={
            "hidden_act": "relu2", "max_position_embeddings": 16384, "layer_norm_eps": 1e-5, "qk_layernorm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt2": Family(
        **_GPT, scores_as="GPT2", rope=no_rope, preprocessed=_gpt2_config,
        facts={**_LAYER_NORM, **_EVERY_BIAS, "fused_qkv": True, "position_row": 0, "attention_scale": _gpt2_scale},
        on_disk=_GPT_ON_DISK, transposed=("self_attn.", "mlp."), defaults=_GPT_DEFAULTS,
    ),
    "gpt_bigcode": Family(
        **_GPT, scores_as="GPTBigCode", rope=no_rope, preprocessed=_bigcode_config, on_disk=_GPT_ON_DISK,
        facts={
            **_LAYER_NORM, **_EVERY_BIAS, "fused_qkv": True,
            "qkv_by_head": lambda fields: not fields.flag("multi_query"),
            "position_row": 0, "attention_scale": _gpt2_scale,
        },
        defaults={**_GPT_DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    ),
    "gptj": Family(
        **_GPT, scores_as="GPTJ", rope=_rope_of_some_features, preprocessed=_gpt2_config,
        facts={**_LAYER_NORM, "mlp_bias": True, "norm_placement": "parallel", "head_bias": _head_bias},
        on_disk={
            **_GPT_ON_DISK, "self_attn.o_proj": ("attn.out_proj",), "self_attn": ("attn",),
            "mlp.up_proj": ("mlp.fc_in",), "mlp.down_proj": ("mlp.fc_out",),
        },
        defaults={**_GPT_DEFAULTS, "tie_word_embeddings": False, "max_position_embeddings": 2048, "rotary_dim": 64},
    ),
    "opt": Family(
        scores_as="OPT", rope=no_rope, norm_eps_field="layer_norm_eps", activation_field="activation_function",
        activations=UNGATED_ACTIVATION_NAMES,
        preprocessed=spelled(
            {"ffn_dim": "intermediate_size", "init_std": "initializer_range"},
            (*_BY_HEAD, "intermediate_size", "initializer_range", "layer_norm_eps"),
        ),
        facts={**_LAYER_NORM, **dict.fromkeys(_EVERY_BIAS, _opt_bias), "position_row": 2},
        prefix_on_disk="model.decoder.", prefix_in_memory="model.decoder.",
        on_disk={
            "self_attn.o_proj": ("self_attn.out_proj",), "mlp.up_proj": ("fc1",), "mlp.down_proj": ("fc2",),
            "input_layernorm": ("self_attn_layer_norm",), "post_attention_layernorm": ("final_layer_norm",),
            "model.norm": ("model.final_layer_norm",),
        },
        defaults={
            "activation_function": "relu", "layer_norm_eps": 1e-5, "tie_word_embeddings": True, "enable_bias": True,
            "intermediate_size": 3072, "max_position_embeddings": 2048,
        },
    ),
    "biogpt": Family(
        scores_as="BioGpt", rope=no_rope, activations=UNGATED_ACTIVATION_NAMES,
        preprocessed=spelled({}, _BY_HEAD), prefix_on_disk="biogpt.", prefix_in_memory="biogpt.",
        facts={
            **_LAYER_NORM, **_EVERY_BIAS, "norm_eps": 1e-5, "position_row": 2,
            "embedding_multiplier": _biogpt_multiplier,
        },
        on_disk={
            "self_attn.o_proj": ("self_attn.out_proj",), "mlp.up_proj": ("fc1",), "mlp.down_proj": ("fc2",),
            "input_layernorm": ("self_attn_layer_norm",), "post_attention_layernorm": ("final_layer_norm",),
            "model.norm": ("model.layer_norm",), "lm_head": ("output_projection",),
        },
        defaults={
            "intermediate_size": 4096, "hidden_act": "gelu", "max_position_embeddings": 1024, "scale_embedding": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon": Family(
        scores_as="Falcon", norm_eps_field="layer_norm_epsilon", activation_field="activation",
        activations=UNGATED_ACTIVATION_NAMES, preprocessed=_falcon_config,
        only={"alibi": False, "new_decoder_architecture": False},
        facts={
            **_LAYER_NORM, **dict.fromkeys(_EVERY_BIAS, flag("bias")), "fused_qkv": True,
            "qkv_by_head": lambda fields: not fields.flag("multi_query"),
            "norm_placement": lambda fields: "parallel" if fields.flag("parallel_attn") else "pre",
        },
        prefix_on_disk="transformer.", prefix_in_memory="transformer.", layers="h",
        on_disk={
            **_MLP_ON_DISK, "self_attn.qkv_proj": ("self_attention.query_key_value",),
            "self_attn.o_proj": ("self_attention.dense",), "model.embed_tokens": ("model.word_embeddings",),
            "model.norm": ("model.ln_f",),
        },
        defaults={
            "activation": "gelu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bias": False,
            "max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True,
        },
    ),
}
# fmt: on
