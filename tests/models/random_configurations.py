"""Random configurations of every family: fields that many families have, and by family what differs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import transformers
from hypothesis import strategies as st

from tests.models.family_cases import CASES, FIRST_CASES, YARN, longrope

Draw = Callable[[st.SearchStrategy[Any]], Any]
Rope = Callable[[int], st.SearchStrategy[dict[str, Any] | None]]  # rotary settings by the size of a head

KINDS = ["full_attention", "sliding_attention"]
FLAG, ABOUT_1, SMALL = st.booleans(), st.floats(0.3, 2.0), st.integers(3, 20)
SIZE, FEW, CAP = st.integers(1, 9), st.integers(1, 3), st.none() | st.floats(0.5, 50.0)
# fmt: off
FLAGS = (
    "attention_bias", "mlp_bias", "use_bias", "attention_out_bias", "use_sliding_window", "attn_temperature_tuning",
    "norm_topk_prob", "qkv_bias", "use_qk_norm", "rope_interleave", "conv_bias", "block_auto_adjust_ff_dim",
    "use_qkv_bias",
    "qk_layernorm", "use_parallel_residual", "mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm",
    "mamba_norm_before_gate",
    "projectors_bias", "use_conv_bias", "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block", "enable_bias",
    "scale_attn_weights", "multi_query", "use_expert_bias", "enable_moe_fp32_combine",
)
FACTORS = [f"{of}_multiplier" for of in ("key", "ssm_in", "ssm_out", "attention_in", "attention_out", "lm_head")]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(FLAGS, FLAG), **dict.fromkeys(FACTORS, ABOUT_1),
    "sliding_window": st.integers(1, 30), "max_window_layers": st.integers(0, 3), "sliding_window_pattern": FEW,
    "attention_chunk_size": st.integers(1, 30), "no_rope_layer_interval": st.integers(1, 4),
    "attn_logit_softcapping": CAP, "final_logit_softcapping": CAP, "query_pre_attn_scalar": st.integers(1, 300),
    "attention_multiplier": st.floats(0.1, 1.0), "embedding_multiplier": st.floats(0.5, 12.0),
    "residual_multiplier": st.floats(0.1, 1.0), "logits_scaling": st.floats(0.5, 8.0),
    "logit_scale": st.floats(0.1, 2.0),
    "num_experts": st.integers(3, 6), "num_local_experts": st.integers(3, 6), "moe_num_experts": st.integers(3, 6),
    "n_routed_experts": st.sampled_from([8, 12]), "num_experts_per_tok": st.integers(2, 3), "moe_k": FEW,
    "moe_topk": FEW,
    "moe_intermediate_size": SMALL, "shared_expert_intermediate_size": SMALL,
    "moe_shared_expert_intermediate_size": SMALL,
    "shared_intermediate_size": st.integers(3, 40), "moe_num_shared_experts": st.integers(0, 2),
    "n_shared_experts": st.integers(1, 2), "num_shared_experts": st.integers(1, 2),
    "num_dense_layers": st.integers(0, 2),
    "moe_layer_start_index": st.integers(0, 1), "moe_layer_interval": st.integers(1, 2),
    "interleave_moe_layer_step": st.integers(1, 2), "decoder_sparse_step": st.integers(1, 2),
    "first_k_dense_replace": st.integers(0, 2), "n_group": st.sampled_from([1, 2]),
    "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
    "routed_scaling_factor": st.floats(0.5, 3.0), "router_scaling_factor": st.floats(0.5, 3.0),
    "intermediate_size_mlp": st.integers(5, 60), "ffn_dim": st.integers(5, 60),
    "n_inner": st.none() | st.integers(5, 60),
    "floor_scale": st.integers(1, 20), "attn_scale": st.floats(0.1, 1.0), "layer_norm_epsilon": st.floats(1e-6, 1e-2),
    "kv_lora_rank": st.integers(4, 20), "q_lora_rank": st.none() | st.integers(4, 20), "v_head_dim": st.integers(3, 24),
    "qk_rope_head_dim": st.sampled_from([4, 10]), "qk_nope_head_dim": st.integers(3, 12),
    "swiglu_alpha": st.floats(0.5, 2.0), "swiglu_limit": st.floats(0.3, 7.0),
    "linear_key_head_dim": SIZE, "linear_value_head_dim": SIZE, "linear_conv_kernel_dim": st.integers(2, 5),
    "conv_L_cache": st.integers(2, 5), "block_multiple_of": SIZE,
    "position_embedding_type": st.sampled_from(["rope", None]),
    "mamba_d_state": SIZE, "mamba_d_conv": st.integers(2, 5), "mamba_head_dim": SIZE, "ssm_state_size": SIZE,
    "conv_kernel": st.integers(2, 5), "ssm_multipliers": st.none() | st.lists(ABOUT_1, min_size=5, max_size=5),
    "mlp_multipliers": st.none() | st.lists(ABOUT_1, min_size=2, max_size=2),
    "hidden_size_per_layer_input": st.sampled_from([0, 5]),
}
# fmt: on
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
SCALED = [YARN, {**PLAIN, "rope_type": "linear", "factor": 2.0}, {**PLAIN, "rope_type": "dynamic", "factor": 2.0}]


def usual(head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([PLAIN, *SCALED])


def none(head_dim: int) -> st.SearchStrategy[None]:
    return st.none()


def in_part(head_dim: int, shares: tuple[float, ...] = (0.5, 1.0)) -> st.SearchStrategy[dict[str, Any]]:
    both = st.tuples(usual(head_dim), st.sampled_from(shares))
    return both.map(lambda drawn: {**drawn[0], "partial_rotary_factor": drawn[1]})


def with_beta(rope: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    both = st.tuples(rope, st.floats(0.1, 1.0))
    return both.map(
        lambda drawn: {"original_max_position_embeddings": 16, **drawn[0], "llama_4_scaling_beta": drawn[1]}
    )


def rope_of_phi3(head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    """transformers takes the size of a head from the hidden size where it checks the factors."""
    return st.sampled_from([PLAIN, longrope(head_dim // 2), longrope(head_dim // 4, partial_rotary_factor=0.5)])


def rope_of_phimoe(head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    long = longrope(head_dim // 2, short_mscale=1.2, long_mscale=1.4, original_max_position_embeddings=16)
    return st.sampled_from([PLAIN, long | {"long_factor": long["short_factor"]}])


def rope_of_mimo(head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    shares = st.lists(st.sampled_from([0.334, 0.5, 1.0]), min_size=2, max_size=2)
    return shares.map(
        lambda drawn: {kind: PLAIN | {"partial_rotary_factor": share} for kind, share in zip(KINDS, drawn, strict=True)}
    )


def draw_layers(draw: Draw, chosen: dict[str, Any], kinds: list[str], name: str = "layer_types") -> list[str]:
    length = chosen["num_hidden_layers"]
    chosen[name] = draw(st.lists(st.sampled_from(kinds), min_size=length, max_size=length))
    return chosen[name]


def finish_gemma4(draw: Draw, chosen: dict[str, Any], shares_keys: bool = True) -> None:
    chosen["num_kv_shared_layers"] = draw(st.integers(0, chosen["num_hidden_layers"])) if shares_keys else 0
    num_own = chosen["num_hidden_layers"]
    chosen["num_hidden_layers"] += chosen["num_kv_shared_layers"]
    kinds = draw_layers(draw, chosen, KINDS)
    kinds[num_own:] = [kinds[i % num_own] for i in range(num_own, len(kinds))]
    kinds[num_own - 1] = kinds[-1] = "full_attention"
    if chosen.get("enable_moe_block"):
        chosen |= {"num_experts": draw(st.integers(3, 6)), "top_k_experts": draw(FEW)}
    if chosen["num_kv_shared_layers"]:  # without inputs of layers transformers fails there
        chosen["hidden_size_per_layer_input"] = 5


def finish_mimo(draw: Draw, chosen: dict[str, Any]) -> None:
    draw_layers(draw, chosen, KINDS)
    chosen |= {
        "num_attention_heads": 2 * chosen["num_attention_heads"],
        "v_head_dim": draw(st.integers(1, chosen["head_dim"])),
    }


def finish_mistral4(draw: Draw, chosen: dict[str, Any]) -> None:
    """transformers rounds the share of rotated features down."""
    chosen |= {"qk_nope_head_dim": chosen["head_dim"], "head_dim": 2 * chosen["head_dim"]}


def finish_deepseek_v2(draw: Draw, chosen: dict[str, Any]) -> None:
    """transformers fails with odd sizes."""
    chosen |= {name: 2 * chosen[name] for name in ("qk_nope_head_dim", "kv_lora_rank")}


def finish_mamba(draw: Draw, chosen: dict[str, Any]) -> None:
    num_heads = chosen["num_attention_heads"]
    chosen |= {"mamba_n_heads": num_heads, "mamba_n_groups": draw(st.sampled_from([1, num_heads]))}


def finish_bamba(draw: Draw, chosen: dict[str, Any]) -> None:
    finish_mamba(draw, chosen)
    chosen["attn_layer_indices"] = [chosen["num_hidden_layers"] - 1]


def finish_hybrid(draw: Draw, chosen: dict[str, Any], mixer: str = "linear_attention") -> None:
    draw_layers(draw, chosen, ["full_attention", mixer])[-1] = "full_attention"  # without one transformers' cache fails


def finish_granite_hybrid(draw: Draw, chosen: dict[str, Any]) -> None:
    finish_hybrid(draw, chosen)
    finish_mamba(draw, chosen)


def finish_delta_rule(draw: Draw, chosen: dict[str, Any]) -> None:
    finish_hybrid(draw, chosen)
    chosen["linear_num_key_heads"] = draw(st.integers(1, 2))
    group = chosen["num_attention_heads"] // chosen["num_key_value_heads"]
    chosen["linear_num_value_heads"] = chosen["linear_num_key_heads"] * group


def finish_nemotron_h(draw: Draw, chosen: dict[str, Any]) -> None:
    kinds = draw_layers(draw, chosen, ["full_attention", "linear_attention", "mlp", "moe"], "layers_block_type")
    kinds[-1] = "full_attention"
    chosen["use_bias"] &= "linear_attention" in kinds  # without a Mamba layer it has no effect: refused
    chosen["mlp_bias"] &= "moe" not in kinds  # shared experts then have a bias: its tensors are refused


def finish_cohere2_moe(draw: Draw, chosen: dict[str, Any]) -> None:
    """transformers fails with more dense layers than layers."""
    chosen["first_k_dense_replace"] = draw(st.integers(0, chosen["num_hidden_layers"]))


def finish_granite_swa(draw: Draw, chosen: dict[str, Any]) -> None:
    length = chosen["num_hidden_layers"]
    bases = st.lists(st.sampled_from([0, 70.0, 700.0]), min_size=length, max_size=length)
    chosen["layer_rope_theta"] = draw(st.none() | bases)


@dataclass(frozen=True)
class Draws:
    """What differs in a family's random configurations."""

    fields: dict[str, st.SearchStrategy[Any]] = field(default_factory=dict)  # other values, or further fields
    without: str = ""  # a field that others draw
    rope: Rope = usual
    finish: Callable[[Draw, dict[str, Any]], Any] = lambda draw, chosen: None
    is_square: bool = False  # a head has the hidden size's share


UNTIED, NO_BIAS = {"tie_word_embeddings": st.just(False)}, {"mlp_bias": st.just(False)}  # experts' biases are refused
SQUARE, WINDOWED = Draws(is_square=True), Draws(rope=none)  # layers with a window have separate rotary settings
IN_HALF = partial(in_part, shares=(0.5,))  # of 2 turned features `dynamic` divides by 0
DELTA_RULE, IN_PART = Draws(rope=IN_HALF, finish=finish_delta_rule), Draws(rope=in_part, is_square=True)
LEARNED = Draws({"max_position_embeddings": st.just(256)}, rope=none, is_square=True)
GEMMA4 = {"vocab_size_per_layer_input": st.just(101), "global_head_dim": st.integers(2, 9).map(lambda half: 2 * half)}
GEMMA4 |= {"num_global_key_value_heads": st.sampled_from([None, 1]), "num_experts": st.none()}
# fmt: off
DRAWS: dict[str, Draws] = {
    "olmo3": WINDOWED, "mellum": WINDOWED, "olmoe": SQUARE, "cohere2": SQUARE, "gpt_neox": IN_PART,
    "persimmon": IN_PART,
    "biogpt": LEARNED,
    "falcon": SQUARE,
    "cohere2_moe": Draws({
        "rms_norm_eps": st.none() | st.just(1e-3), "num_shared_experts": st.integers(0, 2),
        "shared_expert_combination_strategy": st.sampled_from(["average", "sum"]),
        "expert_selection_fn": st.sampled_from(["softmax", "sigmoid"]),
        "prefix_dense_sliding_window_pattern": FEW, "prefix_dense_intermediate_size": st.none() | SMALL,
        "num_experts_per_tok": FEW,
    }, finish=finish_cohere2_moe),
    "phi": replace(IN_PART, fields=UNTIED), "stablelm": replace(IN_PART, rope=IN_HALF),
    "gpt2": LEARNED, "gpt_bigcode": LEARNED, "opt": LEARNED, "gptj": replace(
        LEARNED, fields=LEARNED.fields | UNTIED,
        finish=lambda draw, chosen: chosen.update(rotary_dim=draw(st.sampled_from([1, 2])) * chosen["head_dim"] // 2),
    ),
    "qwen3_next": DELTA_RULE, "qwen3_5_text": DELTA_RULE, "qwen3_5_moe_text": DELTA_RULE,
    "granitemoehybrid": Draws(finish=finish_granite_hybrid),
    "lfm2_moe": Draws(finish=partial(finish_hybrid, mixer="conv")),
    "lfm2": Draws(finish=partial(finish_hybrid, mixer="conv"), is_square=True),
    "bamba": Draws(finish=finish_bamba), "falcon_h1": Draws({"mamba_d_ssm": st.none()}, finish=finish_mamba),
    "nemotron_h": Draws(  # transformers reads a window and does not apply it
        {"mamba_num_heads": st.just(4), "n_groups": st.sampled_from([1, 2, 4])}, "sliding_window",
        finish=finish_nemotron_h,
    ),
    "granite_swa": Draws(finish=finish_granite_swa), "granitemoe_swa": Draws(finish=finish_granite_swa),
    # transformers reads this cap and does not apply it
    "gemma3_text": Draws(without="attn_logit_softcapping", rope=none),
    "gemma3n_text": Draws({  # transformers fails with others
        "hidden_size_per_layer_input": st.just(5), "final_logit_softcapping": st.floats(0.5, 50.0),
        "num_kv_shared_layers": st.just(0), "altup_num_inputs": st.integers(2, 4), "laurel_rank": st.integers(2, 9),
        "altup_correct_scale": FLAG,
    }, rope=none),
    "gemma4_text": Draws(GEMMA4, rope=none, finish=finish_gemma4),
    "gemma4_unified_text": Draws(GEMMA4, rope=none, finish=partial(finish_gemma4, shares_keys=False)),
    "phi3": Draws({"original_max_position_embeddings": st.sampled_from([16, 64])}, rope=rope_of_phi3, is_square=True),
    "phimoe": Draws({
        "num_experts_per_tok": st.just(2), "router_jitter_noise": st.floats(0.01, 1.0), "lm_head_bias": FLAG,
    }, rope=rope_of_phimoe, is_square=True),
    "ministral3": Draws(rope=lambda head_dim: with_beta(usual(head_dim))),
    "mistral4": Draws(
        rope=lambda head_dim: with_beta(st.just(YARN | {"original_max_position_embeddings": 8})),
        finish=finish_mistral4,
    ),
    "afmoe": Draws({"mup_enabled": FLAG, "route_scale": st.floats(0.5, 3.0), "global_attn_every_n_layers": FEW}),
    "minicpm3": Draws({
        "scale_emb": st.floats(0.5, 12.0), "scale_depth": st.none() | ABOUT_1,
        "dim_model_base": st.none() | st.integers(2, 99),
    }),
    "mimo_v2_flash": Draws({"attention_value_scale": st.none() | ABOUT_1}, rope=rope_of_mimo, finish=finish_mimo),
    "ernie4_5_moe": Draws({"use_bias": st.just(False)}),  # with them the output layer has one too, and they are refused
    "deepseek_v2": Draws(NO_BIAS | {"norm_topk_prob": st.just(False)}, finish=finish_deepseek_v2),
    "hy_v3": Draws(NO_BIAS), "exaone_moe": Draws(
        NO_BIAS | {"num_experts": st.sampled_from([8, 12])}, finish=partial(draw_layers, kinds=KINDS),
    ),
}
# fmt: on


@st.composite
def configurations(draw: Draw, model_type: str) -> dict[str, Any]:
    """Random settings of a family."""
    own = DRAWS.get(model_type, Draws())
    known = set(transformers.AutoConfig.for_model(model_type).to_dict())
    num_kv_heads, group, half = (draw(FEW) for _ in range(3))
    chosen: dict[str, Any] = {
        "num_hidden_layers": draw(FEW),
        "num_attention_heads": num_kv_heads * group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 8 * half,
        "intermediate_size": draw(st.integers(5, 60)),
        "max_position_embeddings": draw(st.sampled_from([20, 256])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "tie_word_embeddings": draw(FLAG),
    }
    chosen |= {name: draw(values) for name, values in FIELDS.items() if name in known and name != own.without}
    chosen |= {name: draw(values) for name, values in own.fields.items()}
    chosen["tie_word_embeddings"] &= not chosen.get("lm_head_bias")
    if (rope := draw(own.rope(chosen["head_dim"]))) is not None:
        chosen["rope_parameters"] = dict(rope)
    if "n_group" in chosen:
        chosen["topk_group"] = draw(st.integers(1, chosen["n_group"]))
    if "kv_lora_rank" in chosen:
        chosen |= {"num_attention_heads": num_kv_heads, "head_dim": chosen["qk_rope_head_dim"]}
    if "mlp_layer_types" in known:
        draw_layers(draw, chosen, ["dense", "sparse"], "mlp_layer_types")
    own.finish(draw, chosen)
    shares = st.just(chosen["head_dim"]) if own.is_square else st.integers(3, 9)
    chosen["hidden_size"] = chosen["num_attention_heads"] * draw(shares)
    if isinstance(getattr(transformers.CONFIG_MAPPING[model_type], "head_dim", None), property):  # of other fields
        assert own.is_square
        del chosen["head_dim"]
    names = ("hidden_activation", "mlp_hidden_act", "activation_function", "activation")
    activation = next((name for name in names if name in known), "hidden_act")
    only_one = CASES[FIRST_CASES[model_type]][1].get(activation)
    chosen[activation] = only_one or draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"]))
    return chosen
