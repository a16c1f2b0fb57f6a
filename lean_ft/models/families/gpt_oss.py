"""gpt-oss: experts with biases, clamped and scaled gates that alternate with ups, and a router with a bias."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from lean_ft.models.config import DecoderConfig, FamilyParts, MixtureConfig
from lean_ft.models.families.family import ACTIVATION_NAMES, ATTENTION_BIAS, Family
from lean_ft.models.families.mixtures import MIXTURE, MIXTURE_DEFAULTS
from lean_ft.models.mix import ExpertFormula
from lean_ft.models.moe import Experts, Router
from lean_ft.system.config_fields import ConfigFields


@dataclass(frozen=True)
class GptOss:
    """The experts' `ExpertFormula`."""

    gate_scale: float
    limit: float


class GptOssRouter(Router):
    def add_others(self, config: MixtureConfig) -> None:
        self.bias = nn.Parameter(torch.empty(config.num_experts))


class GptOssExperts(Experts):
    @classmethod
    def of(cls, config: DecoderConfig, mixture: MixtureConfig) -> Self:
        formula = ExpertFormula.of(
            mixture,
            gates_interleaved=True,
            gate_scale=config.own.gate_scale,
            up_offset=1.0,
            limit=config.own.limit,
            input_first=True,
        )
        return cls(config.hidden_size, mixture, formula, has_bias=True)


def _own(fields: ConfigFields) -> GptOss:
    gate_scale = fields.positive("swiglu_alpha")
    if gate_scale != 1.0 and ACTIVATION_NAMES[str(fields.get("hidden_act"))] != "silu":
        raise fields.wrong("hidden_act", "'silu', the only activation of this family's experts")
    return GptOss(gate_scale, fields.positive("swiglu_limit"))


# A table: related fields share a line.
# fmt: off
GPT_OSS: dict[str, Family] = {
    "gpt_oss": Family(
        scores_as="GptOss", facts={**ATTENTION_BIAS, "attention_sinks": True},
        parts=FamilyParts(router=GptOssRouter, experts=GptOssExperts, splits=True), own=_own,
        has_window=lambda fields, layer: layer % 2 == 0, reads_layer_types=True,
        mixture={**MIXTURE, "weights_sum_to_one": True, "router_name": "router"},
        defaults={
            **MIXTURE_DEFAULTS, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
# fmt: on
