"""Dense families with LayerNorms and feed-forward layers without a gate."""

from collections.abc import Callable, Mapping
from typing import Any

from lean_ft.models.families.family import (
    UNGATED_ACTIVATION_NAMES,
    Family,
    every_layer,
    flag,
    partial_rope,
)
from lean_ft.system.config_fields import ConfigFields


def _spelled(
    spellings: Mapping[str, str], ignored: tuple[str, ...] = ()
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Rewrites a config.json: fields by their usual names, without those that transformers ignores."""

    def preprocessed(config: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in config.items() if name not in ignored}
        return kept | {usual: kept[own] for own, usual in spellings.items() if kept.get(own) is not None}

    return preprocessed


def _head_bias(fields: ConfigFields) -> bool:
    fields.expect("as the output layer has a bias of its own", tie_word_embeddings=False)
    return True


def _placement(fields: ConfigFields) -> str:
    return "parallel_normed" if fields.flag("use_parallel_residual") else "pre"


# A table: related fields share a line.
# fmt: off
_BY_HEAD = ("head_dim", "num_key_value_heads")  # ignored where every head has its own keys
_LAYER_NORM = {"norm_centered": True, "norm_bias": True, "gated": False}
_EVERY_BIAS: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_MLP_ON_DISK = {"mlp.up_proj": ("mlp.dense_h_to_4h",), "mlp.down_proj": ("mlp.dense_4h_to_h",)}
_QK_NORM_ON_DISK = {"self_attn.q_norm": ("self_attn.q_layernorm",), "self_attn.k_norm": ("self_attn.k_layernorm",)}
_QK_NORM = {
    "qk_norm": lambda fields: "head" if fields.flag("qk_layernorm") else None,
    "qk_norm_centered": flag("qk_layernorm"),
}

OLDER: dict[str, Family] = {
    "starcoder2": Family(
        scores_as="Starcoder2", has_window=every_layer, norm_eps_field="norm_epsilon", activations=UNGATED_ACTIVATION_NAMES,
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
        preprocessed=_spelled(
            {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
            (*_BY_HEAD, "rope_theta", "partial_rotary_factor"),
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
        preprocessed=_spelled({}, _BY_HEAD),
        on_disk={
            **_MLP_ON_DISK, **_QK_NORM_ON_DISK, "self_attn.qkv_proj": ("self_attn.query_key_value",),
            "self_attn.o_proj": ("self_attn.dense",), "model.norm": ("model.final_layernorm",),
        },
        defaults={
            "hidden_act": "relu2", "max_position_embeddings": 16384, "layer_norm_eps": 1e-5, "qk_layernorm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
}
# fmt: on
