"""Layers split by tokens, heads and experts: losses and weights equal one process."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from lean_ft.models.config import DecoderConfig, DeltaRuleConfig, FamilyParts, LatentConfig, MixtureConfig
from lean_ft.models.families import FAMILIES
from lean_ft.models.families.gpt_oss import GptOss
from lean_ft.models.families.llama4 import Llama4Experts
from lean_ft.models.families.mimo_v2_flash import Mimo, MimoAttention
from lean_ft.models.rope import RopeConfig
from lean_ft.parallel import join, parallelize
from lean_ft.settings import LoRAConfig, MemoryConfig, OptimizerConfig, ParallelConfig
from tests.parallel.processes import needs_parts, on_ranks
from tests.parallel.small_training import CPU, Config, build, small_model, train, whole_tensors

pytestmark = [pytest.mark.long, needs_parts]

DYNAMIC = RopeConfig(theta=500.0, scaling="dynamic", factor=3.0, original_max_positions=12)
LONG = RopeConfig(
    theta=500.0,
    scaling="longrope",
    original_max_positions=12,
    short_factors=(1.0,) * 8,
    long_factors=tuple(2.0 + 0.3 * i for i in range(8)),
)
MIXTURE = MixtureConfig(
    num_experts=8, experts_per_token=2, intermediate_size=32, weights_sum_to_one=True, router_aux_loss_coef=0.1
)
SHARED = replace(MIXTURE, shared_intermediate_size=40, shared_gate=True)
LATENT = {"latent": LatentConfig(rank=12, query_rank=None, plain_dim=8, value_dim=16), "num_kv_heads": 4}
STATE = {"rope": None, "mixer": DeltaRuleConfig(2, 4, 8, 6, num_taps=3, fused_projections=True)}
BIASED = {
    "layer": {"mixture": replace(MIXTURE, num_experts=4, experts_per_token=3, router_aux_loss_coef=0.0)},
    "parts": FAMILIES["gpt_oss"].parts,
    "own": GptOss(gate_scale=1.0, limit=7.0),
}
WEIGHED = {
    "layer": {"mixture": replace(MIXTURE, weights_sum_to_one=False, score="sigmoid", router_aux_loss_coef=0.0)},
    "parts": FamilyParts(experts=Llama4Experts, splits=True),
}
SMALL_VALUES = {
    "parts": FAMILIES["mimo_v2_flash"].parts,
    "own": Mimo(value_dim=3, value_multiplier=0.7),
    "layer": {"window": 5},
}
ODD = MixtureConfig(num_experts=5, experts_per_token=2, intermediate_size=32, weights_sum_to_one=True)
ALONE = ParallelConfig()


class CappedMimo(MimoAttention):
    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.scoring = replace(self.scoring, softcap=20.0)


FULL = {"activation_checkpointing": "full"}
ATTENTION_LORA = LoRAConfig(rank=4, dora=True, targets=["q_proj", "k_proj", "v_proj", "o_proj"])


NOTHING: dict[str, Any] = {}


class Case(NamedTuple):
    parallel: ParallelConfig
    optimizer: dict[str, Any] = NOTHING
    memory: dict[str, Any] = NOTHING
    compile: bool = False
    clip: float | None = None
    micro_batches: int = 2
    model: dict[str, Any] = NOTHING


def parallel(**settings: Any) -> ParallelConfig:
    return ParallelConfig(**settings)


CONTEXT, TENSOR, EXPERTS = parallel(context=2), parallel(tensor=2), parallel(experts=2)
REPLICAS, REPLICAS_OF_SHARDS = parallel(replicate=2), parallel(replicate=2)  # on two ranks, and on four
TWO: dict[str, Case] = {
    "context, adafactor": Case(CONTEXT, {"name": "adafactor"}),
    "context, both sides": Case(CONTEXT, model={"bidirectional": True, "layer": {"window": 5}}),
    "context, sinks, cap and window": Case(
        CONTEXT,
        model={"attention_sinks": True, **SMALL_VALUES, "parts": FamilyParts(attention=CappedMimo, splits=True)},
    ),
    "context, dynamic": Case(CONTEXT, model={"layer": {"rope": DYNAMIC}}),
    "context, longrope in backward, recomputed, clipped": Case(
        CONTEXT, {"in_backward": True}, FULL, model={"layer": {"rope": LONG}, "tied": True}
    ),
    "context, selective, tiled, clipped": Case(
        CONTEXT, memory={"activation_checkpointing": "selective", "tile_mlp": 2}, clip=0.5
    ),
    "context, latent": Case(CONTEXT, model=LATENT),
    "context, mixture": Case(CONTEXT, {"in_backward": True}, FULL, model={"layer": {"mixture": MIXTURE}}),
    "context, adapter": Case(CONTEXT, {"in_backward": True}, model={"lora": LoRAConfig(rank=4, dora=True)}),
    "context, norms without weights": Case(
        CONTEXT, {"in_backward": True}, FULL, model={"norm_parameters": "none", "parts": FAMILIES["nanochat"].parts}
    ),
    "shards of norms of heads": Case(
        ALONE,
        model={
            "qk_norm": "centered_by_head",
            "norm_centered": True,
            "norm_parameters": "weight_and_bias",
            "norm_weight_offset": 1.0,
        },
    ),
    "tensor, biases, head norms, sinks": Case(
        TENSOR,
        model=dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "attention_sinks"), True)
        | {
            "qk_norm": "head",
            "norm_placement": "both",
            "attention_gate": "own",
            **SMALL_VALUES,
        },
    ),
    "tensor in backward, recomputed, tied": Case(TENSOR, {"in_backward": True}, FULL, model={"tied": True}),
    "tensor, tiled, selective, clipped": Case(
        TENSOR, memory={"activation_checkpointing": "selective", "tile_mlp": 2}, clip=0.5
    ),
    "tensor, dynamic": Case(TENSOR, model={"layer": {"rope": DYNAMIC}}),
    "tensor, adapter": Case(TENSOR, {"in_backward": True}, FULL, model={"lora": LoRAConfig(rank=4)}),
    "tensor, mixture with a shared expert": Case(TENSOR, model={"layer": {"mixture": SHARED}}),
    "shards of layers with a state": Case(ALONE, {"in_backward": True}, FULL, model={"layer": STATE}),
    "tensor, momentum": Case(TENSOR, {"momentum": 0.9}),
    "experts, tied": Case(EXPERTS, model={"layer": {"mixture": MIXTURE}, "tied": True}),
    "experts, adafactor": Case(EXPERTS, {"name": "adafactor"}, model={"layer": {"mixture": MIXTURE}}),
    "experts in backward, recomputed": Case(EXPERTS, {"in_backward": True}, FULL, micro_batches=4, model=WEIGHED),
    "experts with biases, selective, tiled, clipped": Case(
        EXPERTS,
        memory={"activation_checkpointing": "selective", "tile_mlp": 2},
        clip=0.5,
        micro_batches=3,
        model=BIASED,
    ),
    "experts, adapter of attention": Case(
        EXPERTS, {"in_backward": True}, model={"layer": {"mixture": MIXTURE}, "lora": ATTENTION_LORA}
    ),
}
FOUR: dict[str, Case] = {
    "replicas of shards, accumulated": Case(
        REPLICAS_OF_SHARDS, {"in_backward": True}, {**FULL, "tile_mlp": 2}, micro_batches=8
    ),
    "replicas of shards, adafactor": Case(REPLICAS_OF_SHARDS, {"name": "adafactor"}, clip=0.5, model={"tied": True}),
    "replicas of shards, adapter": Case(REPLICAS_OF_SHARDS, model={"lora": LoRAConfig(rank=4)}),
    "context beyond the key-value heads": Case(
        parallel(context=4), {"in_backward": True}, FULL, model={"attention_sinks": True, "layer": {"window": 20}}
    ),
    "context over replicas": Case(parallel(replicate=2, context=2), {"in_backward": True}, FULL, micro_batches=4),
    "context, sharded": Case(
        parallel(shard=2, context=2), memory=FULL, clip=0.5, micro_batches=3, model={"tied": True}
    ),
    "tensor over replicas": Case(parallel(replicate=2, tensor=2), {"in_backward": True}, FULL, micro_batches=4),
    "tensor, sharded": Case(
        parallel(shard=2, tensor=2), {"in_backward": True}, FULL, model={"tied": True, "lora": LoRAConfig(rank=4)}
    ),
    "context and tensor": Case(
        parallel(context=2, tensor=2), {"in_backward": True}, FULL, model={"num_kv_heads": 4, "attention_sinks": True}
    ),
    "experts, sharded": Case(
        parallel(experts=2), {"in_backward": True}, FULL, micro_batches=4, model={"layer": {"mixture": MIXTURE}}
    ),
    "experts over replicas": Case(parallel(replicate=2, experts=2), clip=0.5, micro_batches=5, model=BIASED),
    "experts on four ranks, sharded by all": Case(
        parallel(context=2, tensor=2, experts=4), {"in_backward": True}, FULL, model={"layer": {"mixture": MIXTURE}}
    ),
}
COMPILED: dict[str, Case] = {
    "shards": Case(ALONE, {"in_backward": True}, FULL, compile=True),
    "replicas": Case(REPLICAS, {"in_backward": True}, compile=True, model={"tied": True}),
    "context": Case(CONTEXT, {"in_backward": True}, FULL, compile=True),
    "tensor": Case(TENSOR, {"in_backward": True}, FULL, compile=True, model={"output_bias": True}),
    "tensor, adapter": Case(TENSOR, {"in_backward": True}, compile=True, model={"lora": LoRAConfig(rank=4)}),
}


def config(case: Case, parallel: ParallelConfig) -> Config:
    return Config(
        optimizer=OptimizerConfig(**{"name": "sgd", "weight_decay": 0.1, **case.optimizer}),
        gradient_accumulation_steps=case.micro_batches,
        clip_grad_norm=case.clip,
        memory=MemoryConfig(loss_chunk_tokens=16, **case.memory),
        compile=case.compile,
        parallel=parallel,
    )


def outcome(case: Case, parallel: ParallelConfig = ALONE) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    cfg = config(case, parallel)
    model, optimizer, ranks = build(cfg, **case.model)
    numbers = list(train(cfg, model, optimizer, ranks, steps=2))  # after the first step, no bias is zero
    return numbers, whole_tensors(model, optimizer)


def work(cases: dict[str, Case]) -> dict[str, Any]:
    return {name: outcome(case, case.parallel) for name, case in cases.items()}


def in_few_bits(num_ranks: int) -> dict[str, Any]:
    cases = {name: case for name, case in FEW_BITS.items() if (case[1] is REPLICAS_OF_SHARDS) == (num_ranks == 4)}
    return {name: state_in_few_bits(*case) for name, case in cases.items()}


def work_of_four() -> dict[str, Any]:
    clipped = {"replicas of shards": moves_of_a_clipped_step(*CLIPPED["replicas of shards"])}
    return {**work(FOUR), "few bits": in_few_bits(4), "clipped": clipped}


def work_of_two() -> dict[str, Any]:
    with pytest.raises(ValueError) as not_cut:
        parallelize(small_model(), TENSOR, join(TENSOR, CPU))
    refused = [refusal(*case) for case in REFUSED]
    clipped = {name: moves_of_a_clipped_step(*case) for name, case in CLIPPED.items() if name != "replicas of shards"}
    results = {"few bits": in_few_bits(2), "clipped": clipped, "refused": refused, "not cut": str(not_cut.value)}
    return work(TWO) | results


def state_in_few_bits(rule: str, parallel: ParallelConfig, model_settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """State after one step, before Adam can turn a rounding error into a full step."""
    cfg = config(Case(parallel, {"name": rule, "in_backward": True}), parallel)
    model, optimizer, ranks = build(cfg, **model_settings)
    list(train(cfg, model, optimizer, ranks, steps=1))
    return {name: tensor for name, tensor in whole_tensors(model, optimizer).items() if ".exp_avg" in name}


WIDE = {"head_dim": 128, "intermediate_size": 512}  # each rank's columns are whole blocks of 256
FEW_BITS = {
    "tensor, 8": ("adamw_8bit", TENSOR, WIDE),
    "tensor, 4": ("adamw_4bit", TENSOR, WIDE),
    "context, 8": ("adamw_8bit", CONTEXT, NOTHING),
    "context, 4": ("adamw_4bit", CONTEXT, NOTHING),
    "experts, 8": ("adamw_8bit", EXPERTS, {"layer": {"mixture": MIXTURE}}),
    "experts, 4": ("adamw_4bit", EXPERTS, {"layer": {"mixture": MIXTURE}}),
    "replicas of shards, 8": ("adamw_8bit", REPLICAS_OF_SHARDS, NOTHING),
    "replicas of shards, 4": ("adamw_4bit", REPLICAS_OF_SHARDS, NOTHING),
}


CLIPPED = {
    "tensor": (TENSOR, NOTHING),
    "context": (CONTEXT, NOTHING),
    "experts": (EXPERTS, {"layer": {"mixture": MIXTURE}}),
    "replicas of shards": (REPLICAS_OF_SHARDS, NOTHING),
}


def moves_of_a_clipped_step(
    parallel: ParallelConfig, model_settings: dict[str, Any], clipping: bool = True
) -> dict[str, float]:
    """Distance that AdamW moves each parameter in a second step with gradients ten times the first's."""
    cfg = config(Case(parallel, {"name": "adamw", "update_clipping": clipping, "in_backward": True}), parallel)
    model, optimizer, ranks = build(cfg, **model_settings)
    steps = train(cfg, model, optimizer, ranks, steps=2, spoil=lambda step, rank, loss: loss * 10**step)
    before, after = (whole_tensors(model, optimizer) for _ in steps)
    return {name: float((after[name] - before[name]).double().norm()) for name, _ in model.named_parameters()}


def refusal(message: str, case: Case) -> str:
    with pytest.raises(ValueError) as raised:
        outcome(case, case.parallel)
    return str(raised.value)


REFUSED = [
    (
        "adamw_8bit keeps one scale per 256 neighboring elements, but parallel.tensor splits",
        Case(TENSOR, {"name": "adamw_8bit"}),
    ),
    ("does not support this model's recurrent layers", Case(TENSOR, model={"layer": STATE})),
    ("does not support this model's recurrent layers", Case(CONTEXT, model={"layer": STATE})),
    ("keys and values made from one latent vector", Case(TENSOR, model=LATENT)),
    ("layers that use another layer's keys", Case(TENSOR, model={"layer": {"kv_from_layer": 0}})),
    ("muon works on whole matrices", Case(TENSOR, {"name": "muon"})),
    ("does not support this model's learned positions", Case(TENSOR, model={"position_row": 0})),
    ("does not support this model's learned positions", Case(CONTEXT, model={"position_row": 0})),
    ("parallel.tensor=2 does not support this model's fused projections", Case(TENSOR, model={"fused_qkv": True})),
    ("norms over the queries and keys of all heads", Case(TENSOR, model={"qk_norm": "projection"})),
    ("does not divide this model's 1 key-value heads", Case(TENSOR, model={"num_kv_heads": 1})),
    (
        "does not divide this model's 129 inner features of its feed-forward layers",
        Case(TENSOR, model={"intermediate_size": 129}),
    ),
    ("o_proj, because that layer has a bias", Case(TENSOR, model={"output_bias": True, "lora": LoRAConfig(rank=4)})),
    ("has 3 query and 3 key-value heads. Set", Case(CONTEXT, model={"num_heads": 3, "num_kv_heads": 3})),
    ("does not divide this model's 5 experts", Case(EXPERTS, model={"layer": {"mixture": ODD}})),
]


@pytest.fixture(scope="module")
def on_two() -> list[Any]:
    return on_ranks(2, work_of_two)


@pytest.mark.parametrize("name", FEW_BITS)
def test_quantized_blocks_are_within_shards(request, name):
    rule, parallel, settings = FEW_BITS[name]
    alone = state_in_few_bits(rule, ALONE, settings)
    ranks = request.getfixturevalue("on_four" if parallel is REPLICAS_OF_SHARDS else "on_two")
    for found in (of_rank["few bits"][name] for of_rank in ranks):
        assert found.keys() == alone.keys()
        for key, tensor in alone.items():
            if tensor.dtype == torch.uint8:
                assert (found[key] == tensor).float().mean() > 0.99, key
            else:
                torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clipped_step_is_as_long_as_on_one_process(request, name):
    """Norms are compared, because AdamW's step differs where a gradient is nearly zero (5e-6 in 14 of 32,768
    elements)."""
    parallel, settings = CLIPPED[name]
    alone, plain = (moves_of_a_clipped_step(ALONE, settings, clipping) for clipping in (True, False))
    assert all(plain[key] > 1.2 * alone[key] for key in alone if "embed_tokens" not in key)  # most rows do not change
    ranks = request.getfixturevalue("on_four" if parallel is REPLICAS_OF_SHARDS else "on_two")
    for found in (of_rank["clipped"][name] for of_rank in ranks):
        assert found == pytest.approx(alone, rel=1e-5)


def test_unsupported_cuts_are_refused_by_name(on_two):
    for result in on_two:
        assert "parallel.tensor=2 is not supported by this recipe" in result["not cut"]
        for (expected, _), message in zip(REFUSED, result["refused"], strict=True):
            assert expected in message


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_make_the_numbers_of_one_process(on_two, name):
    check(on_two, name, TWO[name])


def check(found: list[Any], name: str, case: Case) -> None:
    """Within a few float32 roundings; measured on two ranks: 1.7e-7 for losses and norms, 1.2e-7 for weights."""
    numbers, tensors = outcome(case)
    for theirs, whole in (of_rank[name] for of_rank in found):
        for step, expected in zip(theirs, numbers, strict=True):
            assert step == pytest.approx(expected, rel=1e-6)
        assert whole.keys() == tensors.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(
                whole[key], tensor, rtol=1e-6, atol=2e-7, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.fixture(scope="module")
def on_four() -> list[Any]:
    return on_ranks(4, work_of_four, timeout=300)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_make_the_numbers_of_one_process(on_four, name):
    check(on_four, name, FOUR[name])


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    return on_ranks(2, work, COMPILED, timeout=500)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_make_the_numbers_of_one_process(compiled, name):
    check(compiled, name, COMPILED[name]._replace(compile=False))
