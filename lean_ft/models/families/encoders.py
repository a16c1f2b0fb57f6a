"""Text encoders: the tokens of a text see all of it. They give vectors and no text.

EuroBERT is a Llama in all else. ModernBERT norms its embeddings instead of the first layer's input.

Shapes: B batch, T tokens of a row, D hidden size.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lean_ft.models.block import Block
from lean_ft.models.config import DecoderConfig, FamilyParts
from lean_ft.models.families.family import ATTENTION_BIAS, Family, flag, rope_by_window
from lean_ft.models.layers import residual_norm
from lean_ft.models.trunk import Trunk
from lean_ft.system.config_fields import ConfigFields


class NormedTrunk(Trunk):
    def add_others(self, config: DecoderConfig) -> None:
        self.embed_norm = residual_norm(config)

    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_norm(super().embedded(input_ids, positions))


class ModernBertBlock(Block):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        if layer_index == 0:
            del self.input_layernorm
            self.norms = (None, *self.norms[1:])


def _modernbert_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The window counts both sides. Published files have a base for each kind of layer. Every head has its own keys."""
    config = {key: value for key, value in config.items() if key not in ("num_key_value_heads", "head_dim")}
    width = config.pop("local_attention", 128)
    is_number = isinstance(width, int) and not isinstance(width, bool)
    config["sliding_window"] = width // 2 + 1 if is_number and width >= 0 else width
    shared = config.pop("rope_scaling", None)
    by_type = config.get("rope_parameters")
    if by_type is None:
        by_type = {"full_attention": {}, "sliding_attention": {}}
    if isinstance(by_type, dict) and isinstance(shared, dict):
        by_type = {
            name: {**(of or {}), **shared} if isinstance(of, dict | None) else of for name, of in by_type.items()
        }
    return {**config, "rope_parameters": by_type, "rope_scaling": None} | {
        ours: config[theirs]
        for theirs, ours in (("global_rope_theta", "rope_theta"), ("local_rope_theta", "rope_local_base_freq"))
        if theirs in config
    }


def _has_window(fields: ConfigFields, layer: int) -> bool:
    return layer % fields.count("global_attn_every_n_layers") != 0


def _norm_parameters(fields: ConfigFields) -> str:
    return "weight_and_bias" if fields.flag("norm_bias") else "weight"


# A table: related fields share a line.
# fmt: off
ENCODERS: dict[str, Family] = {
    "eurobert": Family(
        facts={**ATTENTION_BIAS, "mlp_bias": flag("mlp_bias"), "bidirectional": True},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    ),
    "modernbert": Family(
        facts={
            **ATTENTION_BIAS, "mlp_bias": flag("mlp_bias"), "bidirectional": True, "fused_qkv": True,
            "fused_gate_up": True, "norm_centered": True, "norm_parameters": _norm_parameters,
        },
        parts=FamilyParts(trunk=NormedTrunk, block=ModernBertBlock, splits=True),
        has_window=_has_window, reads_layer_types=True, preprocessed=_modernbert_config,
        rope=lambda fields, layer, is_windowed: rope_by_window(fields, layer, is_windowed, in_float32=True),
        norm_eps_field="norm_eps", activation_field="hidden_activation",
        on_disk={
            "embed_tokens": ("embeddings.tok_embeddings",), "embed_norm": ("embeddings.norm",),
            "self_attn.qkv_proj": ("attn.Wqkv",), "self_attn.o_proj": ("attn.Wo",),
            "mlp.gate_up_proj": ("mlp.Wi",), "mlp.down_proj": ("mlp.Wo",),
            "input_layernorm": ("attn_norm",), "post_attention_layernorm": ("mlp_norm",),
            "model.norm": ("model.final_norm",),
        },
        defaults={
            "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
            "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-5,
            "norm_bias": False, "global_attn_every_n_layers": 3, "tie_word_embeddings": True, "rope_theta": 160_000.0,
            "rope_local_base_freq": 10_000.0, "rope_scaling": None,
        },
    ),
}
# fmt: on
