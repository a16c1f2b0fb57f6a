"""nanochat: the last norm also norms the embeddings, rotated queries and keys are normed, and positions rotate
backwards.

Shapes: B batch, T tokens of a row, R rotated features.
"""

from torch import Tensor

from lean_ft.models.attention.attention import Attention
from lean_ft.models.config import DecoderConfig, FamilyParts
from lean_ft.models.families.family import ATTENTION_BIAS, UNGATED_ACTIVATION_NAMES, Family, number_or_null
from lean_ft.models.layers import unit_rms
from lean_ft.models.rope import RotaryEmbedding
from lean_ft.models.trunk import Trunk


class NanochatTrunk(Trunk):
    def embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.norm(super().embedded(input_ids, positions))


class NanochatAttention(Attention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.norm_eps = config.norm_eps

    def turned(self, query: Tensor, key: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key = super().turned(query, key, cos, sin)
        return unit_rms(query, self.norm_eps), unit_rms(key, self.norm_eps)


class BackwardRotary(RotaryEmbedding):
    def angles(self, turned: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
        return -super().angles(turned, positions, lengths)


# A table: related fields share a line.
# fmt: off
NANOCHAT: dict[str, Family] = {
    "nanochat": Family(
        facts={
            **ATTENTION_BIAS, "norm_parameters": "none", "gated": False,
            "logits_softcap": number_or_null("final_logit_softcapping"),
        },
        parts=FamilyParts(trunk=NanochatTrunk, attention=NanochatAttention, rotary=BackwardRotary, splits=True),
        activations=UNGATED_ACTIVATION_NAMES,
        on_disk={"mlp.up_proj": ("mlp.fc1",), "mlp.down_proj": ("mlp.fc2",)},
        defaults={"hidden_act": "relu2", "max_position_embeddings": 2048, "final_logit_softcapping": 15.0},
    ),
}
# fmt: on
